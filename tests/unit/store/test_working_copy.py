"""A run folder on object storage: what one process wrote the next has, from an empty copy."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import numpy as np
import pytest

from agentrl_cli.errors import RunFolderError, StoreError
from agentrl_cli.records import Trajectory
from agentrl_cli.store import layout, working_copy
from agentrl_cli.store.remote import lease, remote_files
from agentrl_cli.store.remote.object_store import ObjectStore
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.trajectory_file import read_proximal_logprobs
from agentrl_cli.train.resume import DataCursor


def make(step: int, index: int = 0) -> Trajectory:
    return Trajectory(
        id=f"{step}/{index}", group_id=f"g{step}", task_id="0", step=step, sample_index=index
    )


@pytest.fixture
def on_storage(make_config, s3_bucket: str):
    return lambda **changes: make_config(output_dir=f"{s3_bucket}/runs", **changes)


@pytest.fixture
def files(s3_bucket: str) -> ObjectStore:
    return ObjectStore(f"{s3_bucket}/runs/exp/t0")


def write_all(run: RunFolder) -> None:
    run.append_metrics({"step": 1, "reward_mean": 0.5, "kl": math.nan})
    run.write_trajectories(1, [make(1, 1), make(1, 2)], {0: ["a"]})
    run.write_proximal_logprobs(1, {"call": np.array([-0.5, math.nan], np.float32)})
    run.write_eval(0, [make(0)], {"mean_reward": 0.5})
    run.add_pending(make(2))
    run.add_pending(make(3))
    for step in (1, 2, 3):
        with run.new_checkpoint(step) as path:
            (path / "learner").mkdir()
            (path / "learner" / "weights").write_text(f"{step}" * 99)
            DataCursor(3, "digest").save(path, step)
    run.prune_checkpoints(1, keep=(1,))
    run.log_path("trainer").write_text("line 1\n")


def read_all(run: RunFolder) -> list[object]:
    latest = run.latest_checkpoint()
    assert latest is not None
    weights = (run.fetch(latest[1]) / "learner" / "weights").read_text()
    return [
        [line["step"] for line in run.read_metrics()],
        run.trajectory_steps(),
        run.read_trajectories(1),
        run.read_open_rounds(1),
        str(read_proximal_logprobs(run.find_trajectory_file(1), ["call"])["call"]),
        run.list_evals(),
        run.read_eval(0),
        [step for step, _ in run.list_checkpoints()],
        weights,
        run.log_path("trainer").read_text(),
    ]


def test_the_next_start_has_what_a_local_folder_has(make_config, on_storage, files) -> None:
    found = []
    for config in (make_config(), on_storage()):
        with RunFolder.create_or_resume(config) as run:
            write_all(run)
        with RunFolder.create_or_resume(config) as again:
            found.append([*read_all(again), again.read_pending()])
            with again.log_path("trainer").open("a") as log:
                log.write("line 2\n")
    assert found[0] == found[1]
    reader = RunFolder.open(f"{files.url}/checkpoints/step-000003")
    assert reader.location == files.url
    log = files.read("logs/trainer.log")
    assert log is not None
    assert log.content == b"line 1\nline 2\n"
    assert "starts" in reader.fetch(layout.MANIFEST).read_text()
    with RunFolder.create_or_resume(on_storage(), overwrite=True) as run:
        assert not run.trajectory_steps()
        assert run.latest_checkpoint() is None
    assert {*files.list_names()} == {"config.yaml", "manifest.json"}


@pytest.mark.slow
def test_a_killed_start_leaves_what_the_next_one_needs(on_storage, files, monkeypatch) -> None:
    """At every write of a step: whatever is not there yet, nothing is lost and nothing is twice."""
    batch = [make(5, 1), make(5, 2)]
    puts: list[str] = []

    def die_at(number: int) -> None:
        class Files(ObjectStore):
            def put(self, name: str, path: Path) -> None:
                self.count()
                super().put(name, path)
                puts.append(name)

            def delete(self, names) -> None:
                self.count()
                super().delete(names)

            def count(self) -> None:
                nonlocal number
                number -= 1
                if number < 0:
                    raise remote_files.UnreachableError("killed here")

        monkeypatch.setitem(working_copy.BACKENDS, "s3", Files)

    monkeypatch.setattr(remote_files, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(lease.Lease, "release", lambda self: self._released.set())
    for number in range(2, 9):
        die_at(number)
        run = RunFolder.create_or_resume(on_storage())
        try:
            run.write_trajectories(5, batch)
            run.append_metrics({"step": 5})
        except StoreError:
            pass
        finally:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(run, "flush", lambda: None)
                run.close()
        monkeypatch.setitem(working_copy.BACKENDS, "s3", ObjectStore)
        files.delete([".lock"])
        with RunFolder.create_or_resume(on_storage()) as again:
            steps, pending = again.trajectory_steps(), again.read_pending()
            stored = again.read_trajectories(5) if steps else pending
            assert not (steps and pending), "none is there twice"
            assert len(again.read_metrics()) <= len(steps)
            if any("batch" in name for name in puts):
                assert ([t.id for t in stored], steps) == (["5/1", "5/2"], [5])
        files.delete([*files.list_names()])
        puts.clear()


def test_a_server_that_is_away_for_a_moment_is_waited_for(on_storage, s3_server) -> None:
    with RunFolder.create_or_resume(on_storage()) as run:
        s3_server.stop()
        timer = threading.Timer(2.0, s3_server.start)
        timer.start()
        run.write_trajectories(1, [make(1)])
        run.append_metrics({"step": 1})
        timer.join()
        assert RunFolder.open(run.location).trajectory_steps() == [1]


def test_one_that_stays_away_ends_the_run_with_what_to_type(
    on_storage, s3_server, monkeypatch
) -> None:
    with RunFolder.create_or_resume(on_storage()) as run:
        run.write_trajectories(1, [make(1)])
        run.append_metrics({"step": 1})
        monkeypatch.setattr(remote_files, "PATIENCE_SECONDS", 1.0)
        s3_server.stop()
        try:
            with pytest.raises(
                StoreError, match="type the same command: the run resumes"
            ) as caught:
                run.append_metrics({"step": 2})
            assert str(caught.value).startswith(run.location)
            run.add_pending(make(2))
            with pytest.raises(StoreError):
                run.flush()
        finally:
            s3_server.start()
    with RunFolder.create_or_resume(on_storage()) as again:
        assert [line["step"] for line in again.read_metrics()] == [1]
        assert [t.id for t in again.read_pending()] == ["2/0"], "closing kept what was in the copy"


def test_pending_trajectories_are_pushed_soon_and_a_group_once_for_many(
    on_storage, files, monkeypatch
) -> None:
    pushed: list[str] = []
    go_on = threading.Event()

    class Files(ObjectStore):
        def put(self, name: str, path: Path) -> None:
            if name.startswith("pending"):
                pushed.append(name)
                assert go_on.wait(60)
            super().put(name, path)

    monkeypatch.setitem(working_copy.BACKENDS, "s3", Files)
    with RunFolder.create_or_resume(on_storage()) as run:
        for index in range(50):
            run.add_pending(make(7, index))
        go_on.set()
        run.flush()
        assert len(pushed) <= 3
    with RunFolder.create_or_resume(on_storage()) as again:
        assert len(again.read_pending()) == 50


def test_logs_are_pushed_while_the_run_goes_on(on_storage, files, monkeypatch) -> None:
    monkeypatch.setattr(working_copy, "_GROWING_SECONDS", 0.05)
    with RunFolder.create_or_resume(on_storage()) as run:
        for text in ("one\n", "one\ntwo\n"):
            run.log_path("trainer").write_text(text)
            waiter = threading.Event()
            for _ in range(600):
                found = files.read("logs/trainer.log")
                if found is not None and found.content.decode() == text:
                    break
                waiter.wait(0.05)
            else:
                pytest.fail(f"{text!r} was not pushed")


def test_messages_name_the_url(on_storage, files) -> None:
    with RunFolder.create_or_resume(on_storage()) as run:
        run.write_trajectories(1, [make(1)])
        run.append_metrics({"step": 1})
        scratch = str(run.path)
    with pytest.raises(RunFolderError) as other:
        RunFolder.create_or_resume(on_storage(seed=9))
    with pytest.raises(RunFolderError) as nothing:
        RunFolder.open(f"{files.url}0")
    reader = RunFolder.open(files.url)
    (reader.fetch("trajectories/step-000001.parquet")).write_bytes(b"broken")
    with pytest.raises(StoreError) as damaged:
        reader.read_trajectories(1)
    for caught in (other, nothing, damaged):
        assert str(caught.value).startswith(files.url)
        assert "agentrl-run" not in str(caught.value)
    assert "trial_name=t1" in str(other.value)
    assert not Path(scratch).exists()
