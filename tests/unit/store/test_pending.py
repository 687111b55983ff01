"""What finished before its step was complete is kept, whatever cuts the file short."""

from __future__ import annotations

import logging
import math
import random
import tempfile
import threading
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_cli.errors import StoreError
from agentrl_cli.records import Boundary, Failure, FailureCause, Interaction, Trajectory
from agentrl_cli.store import layout, pending_trajectories, run_folder
from agentrl_cli.store.pending_trajectories import PendingTrajectories
from agentrl_cli.store.run_folder import RunFolder


def make(step: int, index: int, num_tokens: int = 20, **fields) -> Trajectory:
    rng = random.Random(f"{step}/{index}")
    call = Interaction(
        id=f"c{index}",
        messages=({"role": "user", "content": "lone \ud800 half"},),
        prompt_ids=(1, 2),
        completion_ids=tuple(range(num_tokens)),
        rollout_logprobs=tuple(rng.random() for _ in range(num_tokens)),
        versions=(step,) * num_tokens,
        turn_return=1 / 3,
    )
    return Trajectory(
        id=f"{step}/{index}",
        task_id=str(index),
        sample_index=index,
        step=step,
        task={"question": "q"},
        interactions=(call,),
        **{"group_id": str(step), "reward": 1 / 3, **fields},
    )


def test_what_was_added_is_read_by_the_next_start(folder: RunFolder, make_config) -> None:
    made = [make(step, index) for index in range(3) for step in (4, 5)]
    for trajectory in made:
        folder.add_pending(trajectory)
    folder.close()
    with RunFolder.create_or_resume(make_config()) as again:
        found = again.read_pending()
        assert {t.id: t for t in found} == {t.id: t for t in made}
        # A second interruption: what the first left and what was made since.
        again.add_pending(found[0])
        again.add_pending(make(4, 7))
    with RunFolder.create_or_resume(make_config()) as third:
        assert sorted(t.id for t in third.read_pending()) == sorted([*(t.id for t in made), "4/7"])


def test_a_complete_step_has_nothing_pending(folder: RunFolder, make_config) -> None:
    for step in (1, 2):
        folder.add_pending(make(step, 0))
    # The second was never added: it is kept by being the step's.
    folder.write_trajectories(1, [make(1, 0), make(1, 1)])
    folder.flush()
    assert [p.name for p in (folder.path / "pending").iterdir()] == ["2.jsonl"]
    assert RunFolder.open(folder.path).read_pending() == [make(2, 0)]
    folder.close()
    with RunFolder.create_or_resume(make_config(), overwrite=True) as run:
        assert not (run.path / "pending").exists()


def test_a_group_that_moves_to_a_later_step_stays_pending(folder: RunFolder) -> None:
    moved = make(1, 0, group_id="slow/er")
    for trajectory in (moved, make(1, 1)):
        folder.add_pending(trajectory)
    folder.write_trajectories(1, [make(1, 1)])
    assert folder.read_pending() == [moved]
    folder.write_trajectories(2, [replace(moved, step=2)])
    assert folder.read_pending() == []
    assert folder.read_trajectories(2) == [replace(moved, step=2)]


OPEN_ROUNDS = {1: [], 2: ["000002.001"]}


@pytest.mark.parametrize("moment", ["before", "while", "after"])
def test_a_step_is_learned_from_again_whenever_its_file_was_cut_off(
    folder: RunFolder, make_config, monkeypatch, moment: str
) -> None:
    """Its trajectories are pending while its own file is written, and it is known to be theirs."""
    real = run_folder.write_trajectory_file

    def write(path: Path, *given: Any) -> None:
        if moment == "while":
            layout.temporary_path(path).write_bytes(b"PAR1")
        if moment == "after":
            real(path, *given)
        raise StoreError("killed here")

    # An earlier attempt at the step, of which all failed alike, is stored.
    folder.write_trajectories(1, [make(1, 0, reward=None)])
    folder.add_pending(make(1, 0))
    folder.add_pending(make(2, 0))
    failed = Failure(boundary=Boundary.ENGINE, kind="EngineError", message="m")
    batch = [make(1, 1, reward=None, failure=failed), make(1, 0, replaced_by="3")]
    folder.flush()
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_trajectory_file", write)
        folder.write_trajectories(1, batch, OPEN_ROUNDS)
        with pytest.raises(StoreError, match="killed here"):
            folder.close()
    with RunFolder.create_or_resume(make_config()) as again:
        assert again.read_trajectories(1) == batch
        assert again.read_open_rounds(1) == OPEN_ROUNDS
        assert again.read_pending() == [make(2, 0)]
        assert [p.name for p in (again.path / "pending").iterdir()] == ["2.jsonl"]


def test_a_list_that_was_being_written_is_removed(folder: RunFolder, make_config) -> None:
    folder.add_pending(make(1, 0))
    folder.close()
    left = layout.temporary_path(folder.path / "pending" / "batch-000001.json")
    left.write_text('{"step":')
    with RunFolder.create_or_resume(make_config()) as again:
        assert not left.exists()
        assert again.read_pending() == [make(1, 0)]


def test_a_steps_file_is_written_while_it_is_trained_on(folder: RunFolder, monkeypatch) -> None:
    is_trained = threading.Event()
    real = run_folder.write_trajectory_file

    def write(path: Path, *given: Any) -> None:
        assert is_trained.wait(10.0)
        real(path, *given)

    monkeypatch.setattr(run_folder, "write_trajectory_file", write)
    folder.write_trajectories(1, [make(1, 0)])
    names = {p.name for p in (folder.path / "pending").iterdir()}
    assert names == {"1.jsonl", "batch-000001.json"}
    is_trained.set()
    # A line of metrics says that the step is done.
    folder.append_metrics({"step": 1})
    assert list((folder.path / "pending").iterdir()) == []
    assert folder.read_trajectories(1) == [make(1, 0)]


def test_a_step_of_which_some_are_damaged_is_made_again(tmp_path: Path, caplog) -> None:
    pending = PendingTrajectories(tmp_path)
    pending.commit(1, [make(1, 0), make(1, 1)], {})
    pending.close()
    path = tmp_path / "1.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    after = PendingTrajectories(tmp_path)
    written: list[int] = []
    after.restore(lambda step, *_: written.append(step))
    assert written == []
    assert "batch-000001.json: some of its trajectories are damaged" in caplog.text
    assert after.read() == [make(1, 0)]


def test_keeping_waits_for_no_disk(tmp_path: Path, monkeypatch) -> None:
    """Whoever finishes a trajectory is an event loop with others to attend to."""
    may_write = threading.Event()
    real = pending_trajectories.append_whole

    def write(*given: Any) -> None:
        assert may_write.wait(10.0)
        real(*given)

    monkeypatch.setattr(pending_trajectories, "append_whole", write)
    pending = PendingTrajectories(tmp_path)
    for index in range(3):
        pending.add(make(1, index))
    assert not (tmp_path / "1.jsonl").exists() or not (tmp_path / "1.jsonl").read_bytes()
    may_write.set()
    pending.flush()
    assert len(pending.read()) == 3


def test_failed_ones_are_made_again(folder: RunFolder, make_config) -> None:
    failure = Failure(boundary=Boundary.ENGINE, kind="EngineError", message="m", traceback="t")
    folder.add_pending(make(1, 0, reward=None, failure=failure))
    folder.add_pending(make(1, 1, reward=None))
    folder.add_pending(make(1, 2, reward=math.nan))
    # Making it again would leave out what the policy fails by.
    own = replace(failure, cause=FailureCause.POLICY)
    folder.add_pending(make(1, 3, failure=own))
    folder.close()
    with RunFolder.create_or_resume(make_config()) as run:
        assert sorted(t.id for t in run.read_pending()) == ["1/1", "1/2", "1/3"]
        run.add_pending(make(1, 0))
    with RunFolder.create_or_resume(make_config()) as run:
        assert sorted(t.id for t in run.read_pending()) == ["1/0", "1/1", "1/2", "1/3"]


def damage(content: bytes, kind: str, cut: int, noise: bytes) -> bytes:
    """``content`` from ``cut`` on as a kill, a power cut or a bad disk leaves it."""
    kept, lost = content[:cut], content[cut:]
    if kind == "truncated":
        return kept
    if kind == "zeros":
        return kept + bytes(len(lost) + 4096)
    if kind == "noise":
        return kept + noise
    flips = (noise * len(lost))[: len(lost)] if noise else b"\x01" * len(lost)
    return kept + bytes(a ^ (b or 1) for a, b in zip(lost, flips, strict=True))


@given(
    kind=st.sampled_from(["truncated", "zeros", "noise", "flipped"]),
    place=st.floats(0.0, 1.0, exclude_max=True),
    noise=st.binary(max_size=200),
)
@settings(max_examples=150, deadline=None)
def test_damage_costs_only_what_it_hit_and_appending_continues(kind, place, noise) -> None:
    made = [make(1, index, num_tokens=3) for index in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        pending = PendingTrajectories(Path(folder))
        for trajectory in made:
            pending.add(trajectory)
        pending.close()
        (path,) = Path(folder).iterdir()
        content = path.read_bytes()
        cut = int(place * len(content))
        path.write_bytes(damage(content, kind, cut, noise))
        num_intact = content[:cut].count(b"\n")

        after = PendingTrajectories(Path(folder))
        assert after.read() == made[:num_intact]
        assert path.read_bytes() == b"".join(content.splitlines(keepends=True)[:num_intact])
        after.add(make(1, 9, num_tokens=3))
        after.close()
        assert [t.id for t in PendingTrajectories(Path(folder)).read()] == [
            *(t.id for t in made[:num_intact]),
            "1/9",
        ]


def test_what_is_cut_is_said_with_the_name_of_the_file(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(pending_trajectories, "_MAX_LINE_BYTES", 2**20)
    pending = PendingTrajectories(tmp_path)
    pending.add(make(1, 0))
    pending.close()
    (path,) = tmp_path.iterdir()
    with path.open("ab") as file:
        # More than memory could hold at once, if a reader took all of it for one line.
        file.truncate(path.stat().st_size + 2**40)
    with caplog.at_level(logging.WARNING, logger="agentrl_cli"):
        assert len(PendingTrajectories(tmp_path).read()) == 1
    assert f"{path}: its last {2**40} bytes are damaged" in caplog.text
    caplog.clear()
    assert len(PendingTrajectories(tmp_path).read()) == 1
    assert caplog.text == ""


def test_records_of_another_version_are_made_again(tmp_path: Path) -> None:
    record = b'{"id": "1/0", "colour": "red"}'
    line = b'{"crc32": %d, "trajectory": %s}\n' % (zlib.crc32(record), record)
    (tmp_path / "1.jsonl").write_bytes(line)
    pending = PendingTrajectories(tmp_path)
    assert pending.read() == []
    pending.add(make(1, 0))
    pending.close()
    assert PendingTrajectories(tmp_path).read() == [make(1, 0)]


def test_a_full_disk_is_said_and_costs_only_what_did_not_fit(
    tmp_path: Path, limited_file_size
) -> None:
    pending = PendingTrajectories(tmp_path)
    with limited_file_size(100):
        pending.add(make(1, 0))
        with pytest.raises(StoreError, match="is full"):
            pending.flush()
    pending.add(make(1, 1))
    pending.flush()
    (path,) = tmp_path.iterdir()
    with limited_file_size(path.stat().st_size + 1000):
        pending.add(make(1, 2, num_tokens=5000))
        with pytest.raises(StoreError, match="is full"):
            pending.flush()
    pending.add(make(1, 3))
    pending.close()
    assert [t.id for t in PendingTrajectories(tmp_path).read()] == ["1/1", "1/3"]


WRITER = """
import sys
from agentrl_cli.config.config_file import load_config
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.store.run_folder import RunFolder

run = RunFolder.create_or_resume(load_config(sys.argv[1]))
steps = run.trajectory_steps()
step = steps[-1] + 1 if steps else 1
found = {t.id: t for t in run.read_pending()}
call = Interaction(id="c", completion_ids=tuple(range(3000)), versions=(0,) * 3000)
while True:
    made = []
    for index in range(30):
        for ahead in (0, 1):
            name = f"{step + ahead}/{index}"
            one = found.pop(name, None) or Trajectory(
                id=name,
                group_id=str(step + ahead),
                task_id="0",
                step=step + ahead,
                interactions=(call,),
            )
            run.add_pending(one)
            if not ahead:
                made.append(one)
            run.flush()
            print(name, flush=True)
    run.write_trajectories(step, made)
    print(f"complete {step}", flush=True)
    step += 1
"""


@pytest.mark.slow
def test_after_sigkill_every_one_that_was_added_is_there(make_config, write_until_killed) -> None:
    rng = random.Random(1)
    added: set[str] = set()
    for _ in range(3):
        # Somewhere in a step, and there a moment that falls on whatever it falls on.
        lines = write_until_killed(WRITER, rng.randint(1, 150), rng.uniform(0.0, 0.01))
        added |= {line.strip() for line in lines if "/" in line and line.endswith("\n")}
        with RunFolder.create_or_resume(make_config()) as run:
            complete = run.trajectory_steps()
            stored = {t.id for step in complete for t in run.read_trajectories(step)}
            pending = {t.id for t in run.read_pending()}
        assert complete == list(range(1, len(complete) + 1))
        assert added <= stored | pending
        assert not stored & pending
    assert len(added) > 30
