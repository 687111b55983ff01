"""What finished before its step was whole is kept, whatever cuts the file short."""

from __future__ import annotations

import math
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from agentrl_cli.errors import StoreError
from agentrl_cli.records import Boundary, Failure, Interaction, Trajectory
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.waiting import WaitingTrajectories


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
        group_id=str(step),
        task_id=str(index),
        sample_index=index,
        step=step,
        task={"question": "q"},
        interactions=(call,),
        **{"reward": 1 / 3, **fields},
    )


def test_what_was_added_is_read_by_the_next_start(folder: RunFolder, make_config) -> None:
    made = [make(step, index) for index in range(3) for step in (4, 5)]
    for trajectory in made:
        folder.add_waiting(trajectory)
    folder.close()
    with RunFolder.create_or_resume(make_config()) as again:
        found = again.read_waiting(4)
        assert {t.id: t for t in found} == {t.id: t for t in made}
        # A second interruption: what the first left and what was made since.
        again.add_waiting(found[0])
        again.add_waiting(make(4, 7))
    with RunFolder.create_or_resume(make_config()) as third:
        assert sorted(t.id for t in third.read_waiting(4)) == sorted([*(t.id for t in made), "4/7"])


def test_a_step_that_is_whole_does_not_wait(folder: RunFolder, make_config) -> None:
    for step in (1, 2):
        folder.add_waiting(make(step, 0))
    folder.write_trajectories(1, [make(1, 0)])
    assert [t.step for t in RunFolder.open(folder.path).read_waiting(1)] == [2]
    # Killed between the two: the step's own file is what counts.
    assert folder.read_waiting(3) == []
    assert list((folder.path / "waiting").iterdir()) == []
    folder.close()
    with RunFolder.create_or_resume(make_config(), overwrite=True) as run:
        assert not (run.path / "waiting").exists()


def test_what_ends_after_its_step_is_whole_waits_for_nothing(folder: RunFolder) -> None:
    """A group that was to take another's place, say."""
    folder.write_trajectories(1, [make(1, 0)])
    folder.add_waiting(make(1, 9))
    assert not (folder.path / "waiting").exists()


def test_failed_ones_are_made_again(folder: RunFolder, make_config) -> None:
    failure = Failure(boundary=Boundary.ENGINE, kind="EngineError", message="m", traceback="t")
    folder.add_waiting(make(1, 0, reward=None, failure=failure))
    folder.add_waiting(make(1, 1, reward=None))
    folder.add_waiting(make(1, 2, reward=math.nan))
    folder.close()
    with RunFolder.create_or_resume(make_config()) as run:
        assert sorted(t.id for t in run.read_waiting(1)) == ["1/1", "1/2"]
        run.add_waiting(make(1, 0))
    with RunFolder.create_or_resume(make_config()) as run:
        assert sorted(t.id for t in run.read_waiting(1)) == ["1/0", "1/1", "1/2"]


def test_a_torn_or_spoilt_end_costs_only_itself(tmp_path: Path) -> None:
    waiting = WaitingTrajectories(tmp_path)
    for index in range(4):
        waiting.add(make(1, index))
    waiting.close()
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    sizes = []
    for cut in range(0, len(content), 97):
        path.write_bytes(content[:cut])
        found = WaitingTrajectories(tmp_path).read(1)
        assert found == [make(1, index) for index in range(len(found))]
        sizes.append(len(found))
    assert sizes == sorted(sizes)
    assert set(sizes) == {0, 1, 2, 3}
    rng = random.Random(3)
    for _ in range(60):
        spoilt = bytearray(content)
        spoilt[rng.randrange(len(content))] ^= 0xFF
        path.write_bytes(spoilt)
        found = WaitingTrajectories(tmp_path).read(1)
        assert found == [make(1, index) for index in range(len(found))]
        assert len(found) < 4


def test_several_threads_add_at_once(tmp_path: Path) -> None:
    waiting = WaitingTrajectories(tmp_path)

    def add(first: int) -> None:
        for index in range(first, first + 20):
            waiting.add(make(1 + index % 2, index))

    threads = [threading.Thread(target=add, args=(20 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    waiting.close()
    assert len(WaitingTrajectories(tmp_path).read(1)) == 80


def test_a_full_disk_is_said_and_costs_only_what_did_not_fit(tmp_path: Path) -> None:
    waiting = WaitingTrajectories(tmp_path)
    waiting.add(make(1, 0))
    (path,) = tmp_path.iterdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 1000, limits[1]))
    try:
        with pytest.raises(StoreError, match="Everything written before is intact"):
            waiting.add(make(1, 1, num_tokens=5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    waiting.add(make(1, 2))
    waiting.close()
    assert [t.id for t in WaitingTrajectories(tmp_path).read(1)] == ["1/0", "1/2"]


def test_a_file_that_could_not_even_begin_takes_no_others_with_it(tmp_path: Path) -> None:
    waiting = WaitingTrajectories(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(StoreError, match="is full"):
            waiting.add(make(1, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    waiting.add(make(1, 1))
    waiting.close()
    assert [t.id for t in WaitingTrajectories(tmp_path).read(1)] == ["1/1"]


WRITER = """
import sys
from agentrl_cli.config.loading import load_config
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.store.run_folder import RunFolder

run = RunFolder.create_or_resume(load_config(sys.argv[1]))
steps = run.trajectory_steps()
step = steps[-1] + 1 if steps else 1
found = {t.id: t for t in run.read_waiting(step)}
call = Interaction(id="c", completion_ids=tuple(range(3000)), versions=(0,) * 3000)
while True:
    made = []
    for index in range(30):
        for ahead in (0, 1):
            name = f"{step + ahead}/{index}"
            one = found.pop(name, None) or Trajectory(
                id=name, group_id="g", task_id="0", step=step + ahead, interactions=(call,)
            )
            run.add_waiting(one)
            if not ahead:
                made.append(one)
            print(name, flush=True)
    run.write_trajectories(step, made)
    print(f"whole {step}", flush=True)
    step += 1
"""


def test_after_sigkill_every_one_that_was_added_is_there(tmp_path: Path, make_config) -> None:
    config, rng = make_config(), random.Random(1)
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    added: set[str] = set()
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            # Somewhere in a step, and there a moment that falls on whatever it falls on.
            lines = [process.stdout.readline() for _ in range(rng.randint(1, 150))]
            time.sleep(rng.uniform(0.0, 0.01))
            process.send_signal(signal.SIGKILL)
            # The last line may be cut short.
            lines += process.stdout.read().splitlines()[:-1]
            added |= {line.strip() for line in lines if "/" in line}
        with RunFolder.create_or_resume(config) as run:
            whole = run.trajectory_steps()
            stored = {t.id for step in whole for t in run.read_trajectories(step)}
            waiting = {t.id for t in run.read_waiting(len(whole) + 1)}
        assert whole == list(range(1, len(whole) + 1))
        assert added <= stored | waiting
        assert not stored & waiting
    assert len(added) > 30
