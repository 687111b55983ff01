"""When checkpoints are saved, and which of them stay."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import ConfigError, RunFolderError, StoreError
from agentrl_cli.evaluate.eval_run import choose_k_values
from agentrl_cli.log import SilentObserver
from agentrl_cli.records import Boundary, Failure, Interaction, Trajectory
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.run_outline import find_best_checkpoint, find_best_eval
from agentrl_cli.train.loop import RunCoordinator
from agentrl_cli.train.resume import (
    CheckpointSaver,
    DataCursor,
    find_first_rolled_step,
    open_cursor,
    read_unused,
)

ROWS = [{"question": "a", "n": 1}, {"question": "b", "n": 2}]


class FakeLearner:
    def save(self, folder: Path) -> None:
        (folder / "weights").write_text("w")


@pytest.fixture
def make_config(run_config):
    def make(**train: Any) -> ExperimentConfig:
        valid = {"path": "tasks.jsonl"}
        return run_config(valid_dataset=valid, train={"total_steps": 100, **train})

    return make


@pytest.fixture
def make_saver(make_config):
    folders = []

    def make(**train: Any) -> CheckpointSaver:
        config = make_config(**train)
        if folders:
            folders[-1].close()
        folders.append(RunFolder.create_or_resume(config))
        learner: Any = FakeLearner()
        return CheckpointSaver(config.train, folders[-1], learner, DataCursor.of(ROWS))

    yield make
    for folder in folders:
        folder.close()


def evaluate(saver: CheckpointSaver, step: int, reward: float | None) -> None:
    report = {"mean_reward": reward, "pass_at_k": {"1": 0.5, "4": step / 100}}
    saver.folder.write_eval(step, [], report)


@pytest.mark.parametrize("metric", ["mean_reward", "pass_at_1"])
def test_a_checkpoint_is_not_the_best_for_what_it_left_unscored(make_saver, metric) -> None:
    saver = make_saver()
    # Of 10 attempts each: 6 right; 5 right and 4 without a reward; 6 right and one without.
    for step, right, num_scored in ((1, 6, 10), (2, 5, 6), (3, 6, 9)):
        share = right / num_scored
        counts = {"num_trajectories": 10, "num_unscored": 10 - num_scored, "lowest_reward": 0.0}
        report = {"mean_reward": share, "pass_at_k": {"1": share}, **counts}
        saver.folder.write_eval(step, [], report)
    best = find_best_eval(saver.folder, metric, range(1, 4))
    assert best is not None
    assert (best.step, best.value) == (1, 0.6)


def saved_steps(saver: CheckpointSaver) -> list[int]:
    return [step for step, _ in saver.folder.list_checkpoints()]


def test_the_best_by_eval_is_saved_and_outlives_the_newest(make_saver) -> None:
    saver = make_saver(keep_last_checkpoints=2, save_every_steps=20)
    assert find_best_checkpoint(saver.folder, "mean_reward") is None
    evaluate(saver, 0, 0.9)
    rewards = {10: 0.2, 20: 0.1, 30: 0.7, 40: 0.7, 50: None, 60: 0.3, 70: 0.6, 80: float("nan")}
    history = {}
    for step in range(1, 101):
        if step in rewards:
            evaluate(saver, step, rewards[step])
        if saver.is_due(step):
            saver.save(step)
            history[step] = saved_steps(saver)
    assert history == {
        10: [10],
        20: [10, 20],
        30: [20, 30],
        40: [30, 40],
        60: [30, 40, 60],
        80: [30, 60, 80],
        100: [30, 80, 100],
    }
    best = find_best_checkpoint(saver.folder, "mean_reward")
    assert best is not None
    assert (best[0].step, best[0].value, best[1].name) == (30, 0.7, "step-000030")
    # By another number it is another one, of those that are left.
    other = find_best_checkpoint(saver.folder, "pass_at_4")
    assert other is not None
    assert other[0].step == 80
    # A resumed run saves where the undisturbed one did, though later evaluations are there.
    again = make_saver()
    assert [step for step in range(1, 100) if again.is_due(step)] == [10, 30]
    newest = make_saver(keep_last_checkpoints=1, keep_best_checkpoint=None)
    assert [step for step in range(1, 101) if newest.is_due(step)] == [100]


@pytest.mark.parametrize("n_samples", [1, 2, 6])
def test_a_metric_that_no_evaluation_reports_is_refused(make_config, n_samples: int) -> None:
    reported = choose_k_values(n_samples)
    for k in range(1, 9):
        config = make_config(keep_best_checkpoint=f"pass_at_{k}")
        config = config.model_copy(
            update={"eval_gconfig": config.gconfig.model_copy(update={"n_samples": n_samples})}
        )
        if k in reported:
            config.check_trainable()
        else:
            with pytest.raises(ConfigError, match=f"=pass_at_{n_samples}"):
                config.check_trainable()


def test_rows_that_changed_are_refused_and_those_that_did_not_are_not(make_saver) -> None:
    saver = make_saver()
    saver.save(7)
    ((_, path),) = saver.folder.list_checkpoints()
    assert json.loads((path / "data_cursor.json").read_text())["next_step"] == 8
    assert open_cursor(saver.folder, [dict(row) for row in ROWS]) == DataCursor.of(ROWS)
    begin_anew = f"begin a new run from its weights: model.path={path} trial_name=NAME"
    with pytest.raises(RunFolderError, match=f"had 2 rows and has 3 now.*{begin_anew}"):
        open_cursor(saver.folder, [*ROWS, {}])
    for changed in ([*reversed(ROWS)], [ROWS[0], {**ROWS[1], "n": 3}]):
        with pytest.raises(RunFolderError, match=r"2 rows as before.*Put them back"):
            open_cursor(saver.folder, changed)
    with pytest.raises(RunFolderError, match=f"chat template is not the one.*{begin_anew}"):
        open_cursor(saver.folder, ROWS, "another")
    # A picture, say, whose text holds its address in memory.
    odd = [DataCursor.of([{"image": object(), 3: {4: (1, 2)}, "x": math.nan}]) for _ in range(2)]
    assert odd[0] == odd[1]
    (path / "data_cursor.json").write_text("{")
    with pytest.raises(StoreError, match="damaged"):
        open_cursor(saver.folder, ROWS)
    (path / "data_cursor.json").unlink()
    open_cursor(saver.folder, ROWS)


def attempt(step: int, **fields: Any) -> Trajectory:
    return Trajectory(
        id=f"{step}/0",
        group_id=f"{step:06d}.000",
        task_id="0",
        step=step,
        interactions=(Interaction(id="c"),),
        **fields,
    )


@pytest.mark.parametrize("stored", ["a step", "a trajectory"])
def test_rows_are_known_before_the_first_checkpoint(make_saver, stored: str) -> None:
    """A run that is killed early has trajectories, of tasks that are known by their places."""
    folder = make_saver().folder
    open_cursor(folder, ROWS)
    if stored == "a step":
        folder.write_trajectories(1, [attempt(1, reward=0.5)])
    else:
        folder.add_pending(attempt(1, reward=0.5))
    open_cursor(folder, ROWS)
    with pytest.raises(RunFolderError, match=r"had 2 rows and has 1 now.*a new run: trial_name="):
        open_cursor(folder, ROWS[:1])
    # Refused, and not forgotten.
    with pytest.raises(RunFolderError):
        open_cursor(folder, ROWS[:1])


@pytest.mark.parametrize("reward", [None, 0.5])
def test_what_was_made_ahead_of_a_batch_that_failed_is_made_anew(make_saver, reward) -> None:
    """Its rewards, say, are missing too, and the next step would fail of what was mended."""
    folder = make_saver().folder
    open_cursor(folder, ROWS)
    folder.add_pending(attempt(2))
    folder.write_trajectories(1, [attempt(1, reward=reward)])
    first_step = find_first_rolled_step(folder, 1)
    if reward is None:
        assert first_step == 1
        # Nothing is left that rows, or a reward function, would have to fit.
        assert open_cursor(folder, ROWS[:1]) == DataCursor.of(ROWS[:1])
        assert read_unused(folder, first_step) == []
        assert list((folder.path / "pending").iterdir()) == []
        folder.add_pending(attempt(2, reward=0.5))
        folder.write_trajectories(1, [attempt(1, reward=0.5)])
        first_step = find_first_rolled_step(folder, 1)
    else:
        with pytest.raises(RunFolderError, match="had 2 rows and has 1 now"):
            open_cursor(folder, ROWS[:1])
    assert [t.id for t in read_unused(folder, first_step)] == ["2/0"]
    assert first_step == 2


def test_no_run_ends_between_a_step_and_its_checkpoint(
    make_saver, make_config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop that comes when the step was found not to be due is obeyed after the next one."""
    monkeypatch.setattr(RunCoordinator, "record", lambda *_: None)
    monkeypatch.setattr(RunCoordinator, "_find_alarm", lambda *_: None)
    names = [field.name for field in dataclasses.fields(RunCoordinator) if field.init]
    config, saver, stop = make_config(), make_saver(), threading.Event()
    parts = {"config": config, "folder": saver.folder, "saver": saver, "stop": stop}
    parts |= {"observer": SilentObserver(), "first_rolled_step": 4}
    run: Any = RunCoordinator(**(dict.fromkeys(names) | parts))
    for step in (1, 2):
        saver.folder.write_trajectories(step, [attempt(step, reward=0.5)])
    assert run.collect(1)
    assert not run.finish_step(1, [], {})
    stop.set()
    assert run.collect(2)
    assert run.finish_step(2, [], {})
    run.save(2)
    assert run.collect(3) is None
    assert saver.folder.latest_checkpoint()[0] == 2


def test_a_run_goes_on_at_the_first_step_that_is_not_stored(make_saver) -> None:
    folder = make_saver().folder
    assert find_first_rolled_step(folder, 1) == 1
    for step in (1, 2, 4):
        folder.write_trajectories(step, [attempt(step, reward=0.5)])
    assert [find_first_rolled_step(folder, step) for step in (1, 2, 3, 4)] == [3, 3, 3, 5]
    failure = Failure(boundary=Boundary.REWARD, kind="KeyError", message="answer", traceback="")
    folder.write_trajectories(3, [attempt(3, failure=failure)])
    folder.write_trajectories(5, [attempt(5, failure=failure)])
    assert [find_first_rolled_step(folder, step) for step in (1, 5, 6)] == [5, 5, 6]
