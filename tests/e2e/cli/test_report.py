"""The page of a run in a real browser, as a person uses it: by keyboard, from a file, served."""

from __future__ import annotations

import http.client
import json
import math
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.evaluate.eval_report import build_report
from agentrl_cli.inspector.report import report_page
from agentrl_cli.inspector.report.report_page import write_report
from agentrl_cli.records import (
    Boundary,
    Failure,
    Interaction,
    InteractionStatus,
    MismatchCause,
    Trajectory,
)
from agentrl_cli.store.run_folder import RunFolder
from tests.e2e.cli.conftest import Tab

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
)
QUESTION = {"role": "user", "content": "What is 17 x 23?"}


def make_call(
    name: str, parent: str | None, messages: Any, reply: Any, **fields: Any
) -> Interaction:
    defaults = {
        "prompt_ids": (1, 2, 3), "completion_ids": (65, 66, 67),
        "rollout_logprobs": (-0.1, -4.0, -0.25), "versions": (0, 0, 1), "finish_reason": "stop",
        "started": 1, "ended": 2, "turn_return": 1.0, "extends_parent": parent is not None,
    }  # fmt: skip
    given = {"id": name, "parent_id": parent, "messages": messages, "reply": reply}
    return Interaction(**defaults | given | fields)


def make(step: int, group: int, number: int, reward: float | None, **fields: Any) -> Trajectory:
    """Two turns around a tool call, and a second branch of the last."""
    said = "391" if reward else "It is 40."
    function = {"name": "calculate", "arguments": json.dumps({"expression": f"17*{23 + number}"})}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "t", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": "t", "content": "391"}
    after = (QUESTION, called, result)
    calls = (
        make_call("a", None, (QUESTION,), called, turn_return=reward),
        make_call("b", "a", after, {"role": "assistant", "content": said}, started=3, ended=4,
                  turn_return=reward, reward=reward),
        make_call("c", "a", after, {"role": "assistant", "content": "Or not."}, started=5, ended=6,
                  extends_parent=False, mismatch_cause=MismatchCause.RETOKENIZED,
                  turn_return=reward, has_malformed_call=number == 2),
        make_call("d", None, (QUESTION,), None, started=7, ended=None, turn_return=None,
                  status=InteractionStatus.FAILED, error="the engine died"),
    )  # fmt: skip
    row = {
        "id": f"{step:06d}.{group:03d}/{number}", "group_id": f"{step:06d}.{group:03d}",
        "task_id": str(group), "sample_index": number, "step": step, "agent_name": "solver",
        "task": {"question": QUESTION["content"], "answer": "391", "weight": math.nan},
        "interactions": calls,
        "reward": reward, "reward_parts": {"exact": reward or 0.0}, "final_answer": said,
        "seconds": 1.5,
    }  # fmt: skip
    return Trajectory(**row | fields)


def write_step(run: RunFolder, step: int) -> None:
    lost = Failure(boundary=Boundary.TOOL, kind="OSError", message="no such host",
                   traceback="Traceback of the tool")  # fmt: skip
    run.write_trajectories(
        step,
        [make(step, group, n, float((group + n) % 2)) for group in range(3) for n in range(3)]
        + [make(step, 3, 0, None, failure=lost, interactions=())],
    )
    rewards = {"reward_mean": 0.3 * step, "reward_std": 0.1, "reward_min": 0.0, "reward_max": 1.0}
    metrics = rewards | {"entropy": 0.5, "step_seconds": 3.0, "rollout_seconds": 2.0}
    run.append_metrics({"step": step} | metrics)


@pytest.fixture
def run(run_config: Callable[..., ExperimentConfig]) -> Iterator[RunFolder]:
    with RunFolder.create_or_resume(run_config()) as folder:
        for step in (1, 2):
            write_step(folder, step)
            rewards = (0.0, 1.0, 1.0) if step == 1 else (1.0, 0.0, 1.0)
            tasks = [make(900 + step, task, 0, reward) for task, reward in enumerate(rewards)]
            folder.write_eval(step, tasks, build_report(tasks).to_dict())
        folder.flush()
        yield folder


@pytest.fixture
def page_url(run: RunFolder, tmp_path: Path) -> str:
    path = tmp_path / "a page.html"
    write_report(run, path, lambda token_id: chr(token_id))
    return path.as_uri()


@pytest.mark.slow
def test_every_view_is_reached_by_keyboard(tab: Callable[..., Tab], page_url: str) -> None:
    one = tab(page_url)
    one.see("Look here first")
    one.see("Regressions in evaluations")
    keyboard = one.page.keyboard
    # A curve, and from there the trajectories of a step.
    one.tab_to(".plot")
    keyboard.press("Home")
    one.see("step 1", ".chart .legend")
    keyboard.press("Enter")
    one.see("10 trajectories")
    assert one.focused() == "Trajectories"
    one.tab_to(".grid")
    keyboard.press("ArrowDown")
    keyboard.press("Enter")
    # A trajectory, with everything that is stored of it.
    one.see("000001.000/1")
    for text in (
        "calls calculate", '"expression": "17*24"', "Branch 1 of 2", "Branch 2 of 2", "Or not.",
        "exact", "1 call that did not complete", "the engine died", "retokenized", "solver",
    ):  # fmt: skip
        one.see(text)
    one.page.get_by_text("The task's row").click()
    one.see("weight")
    # (1 - mean of 0, 1 and 0) / deviation.
    one.see("advantage 1.155")
    one.page.go_back()
    one.see("10 trajectories")
    one.page.go_forward()
    # Its tokens.
    one.see("000001.000/1")
    one.tab_to("a[href*='#/tokens']")
    keyboard.press("Enter")
    one.see("Tokens of 000001.000/1")
    one.tab_to(".tokens")
    keyboard.press("ArrowRight")
    keyboard.press("ArrowRight")
    said = one.see("token 2 of 3", ".token-said").inner_text()
    assert '"B", logprob −4 (probability 0.018), policy version 0, advantage 1.155, trained' in said
    one.tab_to("a[href*='#/group']")
    keyboard.press("Enter")
    # Its group, compared with the best.
    one.see("Group 000001.000")
    one.see("first difference")
    assert one.page.locator(".column").count() == 3
    # The map of tasks.
    one.tab_to("nav a[href='#/map']")
    keyboard.press("Enter")
    one.see("Tasks by steps")
    one.tab_to(".map-box")
    keyboard.press("ArrowRight")
    one.see("step 2: mean reward", ".map")
    keyboard.press("ArrowDown")
    keyboard.press("Enter")
    one.see("Group 000002.")
    # Evaluations: a task that was lost, before and after.
    one.tab_to("nav a[href='#/evaluations']")
    keyboard.press("Enter")
    one.see("newly failed")
    one.tab_to(".grid")
    keyboard.press("Enter")
    one.see("Task 1: before and after")
    columns = one.page.locator(".column")
    columns.nth(1).wait_for()
    assert "391" in columns.nth(0).inner_text()
    assert "It is 40." in columns.nth(1).inner_text()


@pytest.mark.slow
def test_where_engine_and_trainer_disagree(
    tab: Callable[..., Tab], run_config: Callable[..., ExperimentConfig], tmp_path: Path
) -> None:
    with RunFolder.create_or_resume(run_config()) as folder:
        calls = [
            make_call(f"{n}", None, (QUESTION,), {"role": "assistant", "content": "391"})
            for n in range(3)
        ]
        rows = [make(1, 0, n, float(n), interactions=(call,)) for n, call in enumerate(calls)]
        folder.write_trajectories(1, rows)
        # The second token of one stands out; the last trajectory did not pass forward.
        computed = {"0": (-0.1, -4.01, -0.25), "1": (-0.1, -2.5, -0.24)}
        values = {name: np.array(each, np.float32) for name, each in computed.items()}
        folder.write_proximal_logprobs(1, values)
        write_report(folder, tmp_path / "page.html", chr)
    one = tab((tmp_path / "page.html").as_uri())
    card = one.page.locator(".card", has_text="Largest gaps between engine and trainer")
    assert "1.5 nats" in card.locator("li").first.inner_text()
    card.get_by_role("link", name="List them").click()
    one.see("largest gap ↓")
    assert "1.5" in one.page.locator("#row-0").inner_text()
    one.page.locator("#row-0").click()
    one.see("largest gap 1.5")
    one.page.get_by_role("link", name="tokens").click()
    one.page.get_by_role("combobox", name="Colour").select_option("gap")
    one.see("0.5 nats and above")
    tokens = one.page.locator("[data-token]")
    heats = [tokens.nth(n).evaluate("e => e.style.getPropertyValue('--heat')") for n in range(3)]
    assert heats == ["0%", "70%", "1%"]
    tokens.nth(1).hover()
    said = one.see("token 2 of 3", ".token-said").inner_text()
    assert "logprob −4 (probability 0.018), gap 1.5 (the trainer's logprob −2.5)" in said
    # Where the trainer has computed none, the choice is not there.
    one.open(f"{one.page.url.split('#')[0]}#/tokens/step-000001/2?by=gap")
    one.see("Tokens of 000001.000/2")
    colours = one.page.get_by_role("combobox", name="Colour")
    colours.wait_for()
    assert colours.input_value() == "logprob"
    assert "gap" not in colours.inner_text()


@pytest.mark.slow
def test_search_filters_and_order(tab: Callable[..., Tab], page_url: str) -> None:
    one = tab(f"{page_url}#/trajectories?from=all")
    one.see("26 trajectories")
    one.page.get_by_label("Text").fill("no such HOST")
    one.see("2 trajectories")
    one.page.get_by_role("button", name="Clear").click()
    one.see("26 trajectories")
    one.page.get_by_label("Reward from").fill("0.5")
    one.see("12 trajectories, mean reward 1")
    one.page.get_by_label("Steps").fill("2")
    one.see("6 trajectories")
    one.page.get_by_label("Malformed").select_option("any")
    address = one.page.url
    # The address says it all.
    other = tab(address)
    count = other.page.get_by_role("status").filter(has_text="trajector").inner_text()
    assert count == one.page.get_by_role("status").filter(has_text="trajector").inner_text()
    sorted_ = tab(f"{page_url}#/trajectories?sort=reward&order=asc")
    sorted_.see("20 trajectories")
    first = sorted_.page.locator("#row-0").inner_text()
    assert first.split("\n")[1] == "0"
    # A failure, from the list to its traceback.
    failed = tab(f"{page_url}#/trajectories?failure=tool")
    failed.see("failed: tool").click()
    failed.see("Failed in tool, caused by the surroundings")
    failed.page.get_by_text("Traceback", exact=True).click()
    failed.see("Traceback of the tool")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_and_both_colours(
    tab: Callable[..., Tab], page_url: str, scheme: str
) -> None:
    one = tab(page_url, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    for view in (
        "", "map", "evaluations?task=1", "trajectories", "trajectory/step-000001/1",
        "tokens/step-000001/1", "group/step-000001?id=000001.000", "nothing",
    ):  # fmt: skip
        one.open(f"{page_url}#/{view}")
        one.page.locator("h1").wait_for()
        one.page.get_by_text("Reading").first.wait_for(state="detached")
        assert one.page.evaluate("document.documentElement.scrollWidth") <= 390, view
    background = "getComputedStyle(document.body).backgroundColor"
    dark, light = "rgb(20, 23, 26)", "rgb(251, 250, 247)"
    assert one.page.evaluate(background) == (dark if scheme == "dark" else light)
    button = one.page.get_by_role("button", name="Colours")
    for expected in (light, dark):
        button.click()
        assert one.page.evaluate(background) == expected


def test_hostile_text_is_text(
    tab: Callable[..., Tab], run_config: Callable[..., ExperimentConfig], tmp_path: Path
) -> None:
    message = {"role": "user", "content": HOSTILE, "name": HOSTILE, "constructor": None}
    call = make_call("a", None, (message,), message | {"role": "assistant"})
    failure = Failure(boundary=Boundary.TOOL, kind=HOSTILE, message=HOSTILE, traceback=HOSTILE)
    hostile = Trajectory(
        id=HOSTILE, group_id=HOSTILE, task_id=HOSTILE, agent_name=HOSTILE, interactions=(call,),
        task={"question": HOSTILE}, reward=1.0, reward_parts={HOSTILE: 1.0}, final_answer=HOSTILE,
        failure=failure, step=1,
    )  # fmt: skip
    with RunFolder.create_or_resume(run_config()) as folder:
        folder.write_trajectories(1, [hostile])
        write_report(folder, tmp_path / "p.html", lambda _: HOSTILE)
    url = (tmp_path / "p.html").as_uri()
    one = tab(url)
    for view in ("", "map", "trajectories", "tokens/step-000001/0", "trajectory/step-000001/0"):
        one.open(f"{url}#/{view}")
        one.page.locator("h1").wait_for()
    one.see("What was said")
    assert "owned" not in one.page.title()
    assert one.page.locator("main img").count() == 0
    assert HOSTILE in one.page.locator(".message .text").first.inner_text()


@pytest.mark.slow
def test_details_beside_the_page(
    tab: Callable[..., Tab], run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_page, "MAX_INLINE_BYTES", 0)
    path = tmp_path / "a #1 page.html"
    written = write_report(run, path)
    assert written.folder is not None
    url = path.as_uri()
    one = tab(f"{url}#/trajectory/step-000002/1")
    one.see("calls calculate")
    one.page.get_by_role("link", name="Overview").click()
    one.see("keep it beside this page")
    # Without that folder the page says what is missing, and the rest works.
    written.folder.rename(tmp_path / "elsewhere")
    other = Tab(one.page.context.browser)
    other.open(f"{url}#/trajectory/step-000002/1")
    other.see("is missing. It holds the details of these trajectories")
    other.page.get_by_role("link", name="Trajectories").click()
    other.see("20 trajectories")
    other.page.context.close()


def get(url: str, **headers: str) -> int:
    host, port, path = re.fullmatch(r"http://([\d.]+):(\d+)(/.*)", url).groups()  # type: ignore[union-attr]
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.request("GET", path, headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.slow
def test_a_live_run_is_served_to_this_machine_alone(
    start: Callable[..., Any], tab: Callable[..., Tab], run: RunFolder
) -> None:
    command = start("report", str(run.path), "--serve")
    command.wait_for("(this machine alone)")
    url = re.search(r"http://127\.0\.0\.1:\d+/[\w\-]+/", command.text)[0]  # type: ignore[index]
    host = url.split("/")[2]
    assert get(url) == 200
    for refused in (
        {"Host": "evil.example"}, {"Host": "evil.example:" + host.split(":")[1]},
        {"Origin": "http://evil.example"}, {"Origin": "null"},
    ):  # fmt: skip
        assert get(url, **refused) == 403
        assert get(url + "head", **refused) == 403
        assert get(url + "block/summary", **refused) == 403
    assert get(f"http://{host}/wrong/") == 404
    assert get(f"http://{host}/wrong/block/step-000001.0") == 404
    for name in ("step-000009.0", "step-000001.7", "step-000001.-1", "step-000001.%C2%B2", "x"):
        assert get(url + f"block/{name}") == 404
    assert get(url + "block/..%2F..%2Fconfig.yaml") == 404

    one = tab(url)
    one.see("Look here first")
    assert "26" in one.page.locator(".facts").first.inner_text()
    one.open(f"{url}#/trajectory/step-000001/1")
    one.see("calls calculate")
    one.open(f"{url}#/trajectories")
    one.see("20 trajectories")
    write_step(run, 3)
    run.flush()
    one.see("30 trajectories")
    one.open(f"{url}#/trajectory/step-000003/1")
    one.see("calls calculate")
    command.signal(signal.SIGINT, at="this machine alone")
    assert command.end(30) == 0
    assert "stopped serving" in command.text
    one.see("The server does not answer", "body")
    one.errors.clear()


def test_without_html_the_page_is_in_the_run_folder(
    finish: Callable[..., str], run: RunFolder
) -> None:
    printed = finish("report", str(run.path))
    page = run.path / "report.html"
    assert f"{page}: 26 trajectories" in printed
    assert page.is_file()
