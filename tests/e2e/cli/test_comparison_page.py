"""``agentrl compare --html``: models side by side in a real browser, from a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agentrl_cli.cli.compare_command import compare_command
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.evaluate.eval_report import build_report
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.store.run_folder import RunFolder
from tests.e2e.cli.conftest import Tab

HOSTILE = "<img src=x onerror=document.title='owned'>"
EARLY, LATE = "runs/exp/t0/eval-000000", "runs/exp/t1/eval-000003"


def attempt(task: int, reward: float | None, said: str, more: str = "") -> Trajectory:
    row = {"question": f"What is {task} + 1?{more}"}
    call = Interaction(
        id="c",
        messages=({"role": "user", "content": row["question"]},),
        reply={"role": "assistant", "content": said},
        completion_ids=(65, 66),
        rollout_logprobs=(-0.1, -0.2),
        versions=(0, 0),
    )
    return Trajectory(
        id=f"{task}/0",
        group_id=str(task),
        task_id=str(task),
        task=row,
        interactions=(call,),
        reward=reward,
        final_answer=said,
        seconds=1.5,
    )


def write_eval(
    run: RunFolder, step: int, rewards: Sequence[float | None], said: str, more: str = ""
) -> None:
    made = [attempt(task, reward, said, more) for task, reward in enumerate(rewards)]
    run.write_eval(step, made, build_report(made).to_dict())


@pytest.fixture
def runs(
    run_config: Callable[..., ExperimentConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs in the current folder: task 1 is lost from the first evaluation to the last."""
    monkeypatch.chdir(tmp_path)
    for trial in ("t0", "t1"):
        config = run_config(output_dir="runs", trial_name=trial)
        with RunFolder.create_or_resume(config) as run:
            for step in (1, 2, 3, 4)[: 4 if trial == "t0" else 2]:
                reward = (0.2 if trial == "t0" else 0.3) * step
                run.append_metrics({"step": step, "reward_mean": reward, "entropy": 0.5})
            write_eval(run, 0, [0.0, 1.0, 0.0, 0.0, None], f"I do not know. {HOSTILE}")
            write_eval(run, 3, [1.0, 0.0, 1.0, 0.0, 1.0], "It is 1.")


def make_page(*names: str) -> str:
    compare_command([*names], page=Path("page.html"))
    return Path("page.html").absolute().as_uri()


def test_models_stand_side_by_side_and_a_flip_shows_what_both_said(
    runs: None, tab: Callable[..., Tab]
) -> None:
    one = tab(make_page(EARLY, LATE))
    one.see("Comparison of 2 models")
    rows = one.page.locator("table tr")
    assert [row.split("\t")[:2] for row in rows.all_inner_texts()] == [
        ["evaluation", "mean reward"], [f"A {EARLY}", "0.25"], [f"B {LATE}", "0.6"],
    ]  # fmt: skip
    one.see("B is not clearly different from A: +0.250")
    one.see("1 task of A and B left out of the difference")
    # The curves of both runs: the second has ended earlier.
    one.see("A runs/exp/t0")
    legend = one.page.locator(".chart .legend")
    assert legend.first.inner_text().split() == ["step", "4", "A", "0.8", "B", "–"]
    one.tab_to(".plot")
    one.page.keyboard.press("Home")
    one.see("step 1", ".chart .legend")
    assert legend.first.inner_text().split() == ["step", "1", "A", "0.2", "B", "0.3"]
    titles = one.page.locator(".chart h3").all_inner_texts()
    assert titles == ["Reward", "Evaluations", "Entropy"]

    # By keyboard to the task that was lost, and to what both models said.
    one.tab_to("nav a[href='#/evaluations']")
    one.page.keyboard.press("Enter")
    tabs = one.page.get_by_role("group", name="Which tasks")
    tabs.wait_for()
    counts = "newly failed 1|newly passed 2|got worse 1|improved 2|all tasks 5"
    assert tabs.inner_text().replace("\n", "|") == counts
    assert one.page.locator("#row-0").inner_text().split("\n")[:3] == ["1", "1", "0"]
    one.tab_to(".grid")
    one.page.keyboard.press("Enter")
    one.see("Task 1: A and B")
    columns = one.page.locator(".column")
    columns.nth(1).wait_for()
    assert "I do not know." in columns.nth(0).inner_text()
    assert "first difference" in columns.nth(1).inner_text()
    assert "It is 1." in columns.nth(1).inner_text()
    columns.nth(1).get_by_role("link").click()
    one.see("no advantage: it is of an evaluation")
    # Lists and the map begin with what there is.
    one.tab_to("nav a[href='#/trajectories']")
    one.page.keyboard.press("Enter")
    one.see("10 trajectories")
    one.tab_to("nav a[href='#/map']")
    one.page.keyboard.press("Enter")
    one.see("task 3, A: mean reward 0")


@pytest.mark.slow
def test_equal_positions_of_other_rows_are_other_tasks(runs: None, tab: Callable[..., Tab]) -> None:
    run = RunFolder.open("runs/exp/t1")
    write_eval(run, 5, [1.0, 1.0], "It is 1.", more=" Or more?")
    one = tab(f"{make_page(EARLY, LATE, 'runs/exp/t1/eval-000005')}#/evaluations")
    one.see("On the 0 tasks that both have")
    one.open(one.page.url.split("#")[0] + "#/evaluations?before=A&after=B")
    one.see("On the 4 tasks that both have")
    one.open(one.page.url.split("#")[0] + "#/trajectories?task=1%20(row%202)")
    one.see("1 trajectory,")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hostile_text_on_a_narrow_screen(runs: None, tab: Callable[..., Tab], scheme: str) -> None:
    hostile = "runs/exp/<img src=x onerror=alert(1)>\u202e"
    Path("runs/exp/t0").rename(hostile)
    url = make_page(f"{hostile}/eval-000000", LATE)
    one = tab(url, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    for view in ("", "evaluations?task=1", "map", "trajectories", "trajectory/A/1"):
        one.open(f"{url}#/{view}")
        one.page.locator("h1").wait_for()
        one.page.get_by_text("Reading").first.wait_for(state="detached")
        assert one.page.evaluate("document.documentElement.scrollWidth") <= 390, view
        assert one.page.locator("main img").count() == 0
    one.see(HOSTILE)
    assert one.page.title() == "Comparison of 2 models - agentrl"


@pytest.mark.slow
def test_curves_alone(runs: None, tab: Callable[..., Tab], finish: Callable[..., str]) -> None:
    words = ("compare", "--curves", "runs/exp/t0", "runs/exp/t1", "--html", "page.html")
    assert "written: page.html" in finish(*words)
    one = tab(Path("page.html").absolute().as_uri())
    one.see("Comparison of 2 runs")
    one.see("B runs/exp/t1")
    # Lines are drawn in the colours of both.
    pixels = one.page.evaluate(
        """() => {
          const canvas = document.querySelector(".chart canvas");
          const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          const seen = new Set();
          for (let i = 0; i < data.length; i += 4) seen.add(data.slice(i, i + 3).join());
          return [...seen];
        }"""
    )
    assert {"11,100,119", "154,91,19"} <= {*pixels}, json.dumps(pixels)
    assert one.page.locator("nav a").all_inner_texts() == ["Comparison"]
