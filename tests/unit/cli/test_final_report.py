from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from agentrl_cli.cli.display.final_report import (
    build_report_table,
    find_telling_pair,
    print_summary,
)
from agentrl_cli.evaluate.eval_report import build_report
from agentrl_cli.records import Boundary, Failure, Interaction, MismatchCause, Trajectory
from agentrl_cli.store.run_folder import RunFolder


def attempt(task: int, reward: float | None, text: str = "", tokens: int = 1) -> Trajectory:
    call = Interaction(
        id=f"c{task}",
        messages=({"role": "user", "content": f"question {task}"},),
        reply={"role": "assistant", "content": text},
        completion_ids=(1,) * tokens,
    )
    return Trajectory(
        id=f"{task}/0", group_id=str(task), task_id=str(task), interactions=(call,), reward=reward
    )


@pytest.fixture
def folder(run_config, tmp_path: Path):
    with RunFolder.create_or_resume(run_config(output_dir=str(tmp_path / "my runs"))) as run:
        yield run


def summarize(folder: RunFolder) -> str:
    console = Console(file=io.StringIO(), width=160, color_system=None)
    print_summary(
        folder, config_path=Path("c.yaml"), overrides=["gconfig.n_samples=8"], console=console
    )
    return console.file.getvalue()


def test_summary_of_a_run_that_learned(folder: RunFolder) -> None:
    before = [attempt(0, 0.0, "wrong zero"), attempt(1, 1.0, "right one"), attempt(2, 0.0)]
    after = [attempt(0, 1.0, "right zero"), attempt(1, 1.0, "still right"), attempt(2, 0.0)]
    folder.write_eval(0, before, build_report(before).to_dict())
    folder.write_eval(5, after, build_report(after).to_dict())
    for step in range(1, 6):
        seconds = {"store_seconds": 1.0, "step_seconds": 2.0}
        folder.append_metrics({"step": step, "reward_mean": 0.2 * step, **seconds})
    folder.write_trajectories(5, after)
    with folder.new_checkpoint(5):
        pass
    text = summarize(folder)
    assert "reward of 5 steps  0.200 ▂▄▅▇█ 1.000" in text
    assert "mean reward 0.333 -> 0.667: +0.333" in text
    assert "time to the end of the last step, 10 s:  store 50 %, other 50 %" in text
    assert "1 improved, 0 got worse" in text
    # The pair is of the task that gained.
    assert "wrong zero" in text
    assert "right zero" in text
    assert "still right" not in text
    assert f"agentrl inspect-trajectories '{folder.path}'" in text
    assert f"see it as a page:     agentrl report '{folder.path}'" in text
    assert "agentrl eval --config c.yaml --checkpoint" in text
    assert "step-000005' gconfig.n_samples=8" in text


def test_summary_of_a_run_that_was_stopped_at_once(folder: RunFolder) -> None:
    assert "agentrl" not in summarize(folder)
    before = [attempt(0, 0.0)]
    folder.write_eval(0, before, build_report(before).to_dict())
    text = summarize(folder)
    assert "evaluation after step 0" in text
    assert "->" not in text


def test_summary_names_the_alarms_that_rang(folder: RunFolder) -> None:
    for step in range(1, 7):
        alarms = {"alarm_truncated": float(step in (2, 3, 6)), "alarm_kl_of_update": 0.0}
        folder.append_metrics({"step": step, "reward_mean": 0.5} | alarms)
    text = summarize(folder)
    assert "alarm truncated active in steps 2-3, 6" in text
    assert "logs/trainer.log" in text
    assert "kl_of_update" not in text


def test_summary_of_a_report_of_another_version(folder: RunFolder) -> None:
    for step, reward in ((0, 0.0), (1, 1.0)):
        folder.write_eval(step, [attempt(0, reward), attempt(1, reward)], {"old": 1})
    assert "mean reward 0.000 -> 1.000: +1.000" in summarize(folder)


def test_the_pair_that_tells_most() -> None:
    before = [attempt(0, 0.0, tokens=9), attempt(1, 0.5), attempt(2, None), attempt(3, 0.0)]
    after = [attempt(0, 1.0), attempt(1, 1.0), attempt(2, 1.0), attempt(3, 1.0), attempt(4, 1.0)]
    # Tasks 0 and 3 gained most; 3 is shorter to read.
    assert [t.task_id for t in find_telling_pair(before, after)] == ["3", "3"]
    assert not find_telling_pair(before, [])
    assert not find_telling_pair([attempt(2, None)], after)


def test_a_report_shows_what_went_wrong_and_what_to_type() -> None:
    forked = Interaction(id="c", mismatch_cause=MismatchCause.TEMPLATE_CHANGED)
    failure = Failure(boundary=Boundary.TIMEOUT, kind="TimeoutError", message="")
    failed = Trajectory(
        id="1/0", group_id="1", task_id="1", interactions=(forked,), failure=failure
    )
    console = Console(file=io.StringIO(), width=300, color_system=None)
    for trajectories in ([attempt(0, 1.0), failed], [failed]):
        console.print(build_report_table(build_report(trajectories)))
    both, alone = console.file.getvalue().split("mean reward")[1:]
    for text in (
        *("pass@1", "timeout 1", "unscored", "prefix mismatches: template_changed"),
        *("1 turn, 0 prompt tokens re-prefilled", "offer the same tools"),
    ):
        assert text in both
    assert "nothing was scored" in alone
