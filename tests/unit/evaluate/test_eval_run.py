from __future__ import annotations

from contextlib import suppress

import pytest

from agentrl_cli.config.experiment import RolloutConfig
from agentrl_cli.errors import RolloutFailedError
from agentrl_cli.evaluate.eval_report import EvalReport
from agentrl_cli.evaluate.eval_run import choose_k_values, evaluate
from agentrl_cli.log import SilentObserver
from agentrl_cli.records import Boundary, Failure, Interaction, Trajectory
from agentrl_cli.rollout.dataset import build_eval_tasks
from agentrl_cli.rollout.workflow import Attempt, RolloutWorkflow
from agentrl_cli.store.run_folder import RunFolder


class ScriptedWorkflow(RolloutWorkflow):
    """Right in every second attempt; task 2 always fails."""

    async def arun_episode(self, engine, data):
        raise NotImplementedError

    async def arun_trajectory(self, engine, attempt: Attempt) -> Trajectory:
        if attempt.task.task_id == "2":
            failure = Failure(boundary=Boundary.TOOL, kind="X", message="")
            return attempt.begin_trajectory(failure=failure)
        return attempt.begin_trajectory(
            reward=float(attempt.sample_index % 2), interactions=(Interaction(id="call"),)
        )


class RecordingObserver(SilentObserver):
    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def on_stage(self, stage: str, total: int | None = None) -> None:
        self.seen.append((stage, total))

    def on_progress(self, num_done: int, note: str = "") -> None:
        self.seen.append((num_done, note))


async def test_every_task_is_attempted_reported_and_stored(run_config) -> None:
    observer = RecordingObserver()
    folder = RunFolder.for_evaluation(run_config())
    report = await evaluate(
        folder,
        ScriptedWorkflow(),
        engine=None,  # type: ignore[arg-type]
        tasks=build_eval_tasks([{"q": 0}, {"q": 1}, {"q": 2}]),
        n_samples=4,
        rollout=RolloutConfig(max_concurrent=2, min_concurrent=2, max_retries=0),
        observer=observer,
        step=7,
    )
    trajectories, stored = folder.read_eval(7)
    assert EvalReport.from_dict(stored) == report
    assert len(trajectories) == 12
    assert {t.step for t in trajectories} == {7}
    assert report.num_tasks == 3
    assert report.num_unscored == 4
    assert report.mean_reward == 0.5
    # Tasks 0 and 1: 2 of 4 passed; task 2: none is scored. pass@2 = 1 - C(2,2)/C(4,2)
    assert report.pass_at_k == pytest.approx({1: 1 / 2, 2: 1 - 1 / 6, 4: 1.0})
    assert report.failures == {"tool": 4}
    assert observer.seen[0] == ("evaluation", 12)
    assert [n for n, _ in observer.seen[1:]] == list(range(1, 13))
    assert observer.seen[-1] == (12, "mean reward 0.500  failed: 4 surroundings")


@pytest.mark.parametrize(
    ("n_samples", "expected"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8))]
)
def test_k_values(n_samples: int, expected: tuple[int, ...]) -> None:
    assert choose_k_values(n_samples) == expected


async def test_a_failed_evaluation_is_kept_beside_the_one_that_is_made_again(run_config) -> None:
    class Failing(ScriptedWorkflow):
        async def arun_trajectory(self, engine, attempt: Attempt) -> Trajectory:
            failure = Failure(boundary=Boundary.ENGINE, kind="X", message="")
            return attempt.begin_trajectory(failure=failure)

    folder = RunFolder.for_evaluation(run_config())
    for workflow in (Failing(), Failing(), ScriptedWorkflow()):
        with suppress(RolloutFailedError):
            await evaluate(
                folder,
                workflow,
                engine=None,  # type: ignore[arg-type]
                tasks=build_eval_tasks([{"q": 0}], "eval-000007"),
                n_samples=1,
                rollout=RolloutConfig(max_concurrent=1, max_retries=0),
                observer=SilentObserver(),
                step=7,
            )
    assert folder.list_evals() == [(7, None), (7, "failed"), (7, "failed-2")]
    ids = [
        t.id for step, label in folder.list_evals() for t in folder.read_eval(step, label=label)[0]
    ]
    assert ids == ["eval-000007.000/0", "failed:eval-000007.000/0", "failed-2:eval-000007.000/0"]
