from __future__ import annotations

import io
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console

from agentrl_cli.cli.display.progress_display import (
    PlainObserver,
    RichObserver,
    StepLines,
    format_step,
    is_plain,
)
from agentrl_cli.sparkline import format_sparkline


@pytest.mark.parametrize(
    ("env", "is_terminal", "plain"),
    [
        ({}, True, False),
        ({}, False, True),
        ({"CI": "true"}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, True),
        ({"TERM": "xterm"}, True, False),
    ],
)
def test_where_lines_are_plain(env: dict[str, str], is_terminal: bool, plain: bool) -> None:
    assert is_plain(env, is_terminal) is plain


def test_a_step_in_one_line() -> None:
    metrics = {"step": 3, "reward_mean": 0.41251, "tokens_per_second": 1812.3, "policy_failures": 0}
    assert format_step(metrics, 40) == "step 3/40  reward 0.413  1,812 tokens/s"
    failures = {"policy_failures": 2, "surroundings_failures": 1}
    assert format_step({"step": 3, "reward_mean": math.nan, **failures}, None) == (
        "step 3  failed: 2 policy  failed: 1 surroundings"
    )
    assert format_step({}, None) == "step ?"


def test_a_step_says_how_long_the_rest_will_take() -> None:
    lines = StepLines(total_steps=100)
    assert lines.format({"step": 1, "step_seconds": 100.0}).endswith("100.0 s  2 h 45 min left")
    assert lines.format({"step": 2, "step_seconds": 20.0}).endswith("20.0 s  1 h 38 min left")
    assert lines.format({"step": 99}).endswith("  1 min left")
    assert "left" not in lines.format({"step": 100, "step_seconds": 20.0})
    assert "left" not in StepLines(None).format({"step": 1, "step_seconds": 1.0})


def test_a_step_fits_into_a_line_of_the_terminal() -> None:
    metrics = {"step": 10, "reward_mean": 0.5, "completion_tokens_mean": 120.0}
    metrics |= {"tool_calls_mean": 1.5, "tokens_per_second": 2254.0, "step_seconds": 14.0}
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with RichObserver(total_steps=1000, console=console) as observer:
        observer.on_step(metrics)
    line = "step 10/1000  reward 0.500  120 tokens/trajectory  14.0 s  3 h 51 min left"
    assert line in console.file.getvalue()
    assert StepLines(1000).format(metrics) == line.replace(
        "  14.0 s", "  1.5 tool calls  2,254 tokens/s  14.0 s"
    )


@pytest.mark.parametrize("value", ["1", ""])
def test_no_color_takes_the_colours_alone(value: str, monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", value)
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    with RichObserver(total_steps=2, console=console) as observer:
        observer.on_step({"step": 1, "reward_mean": 0.5})
        observer.on_stage("rollout", 8)
    text = console.file.getvalue()
    assert "step 1/2  reward 0.500" in text
    assert "rollout" in text, "the display is still there"
    assert ("\x1b[32m" in text) == (not value)


def test_plain_lines_are_few(capsys) -> None:
    now = [0.0]
    observer = PlainObserver(total_steps=2, clock=lambda: now[0])
    with observer:
        observer.on_stage("evaluation", 8)
        observer.on_stage("rollout", 64)
        for number in range(64):
            now[0] += 0.5
            observer.on_progress(number + 1, "mean reward 0.5")
        observer.on_stage("train")
        observer.on_step({"step": 1, "reward_mean": 0.5})
        observer.on_message("saved")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "evaluation (0/8) ..."
    assert len(lines) == 6, "the stages of a step have no lines of their own"
    # 32 seconds, a line every ten
    assert [line for line in lines if "mean reward" in line] == [
        f"rollout ({n}/64) mean reward 0.5" for n in (20, 40, 60)
    ]
    assert lines[-2:] == ["step 1/2  reward 0.500", "saved"]


def test_the_live_display_shows_stage_bar_and_rewards() -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system=None)
    observer = RichObserver(total_steps=40, console=console)
    with observer:
        observer.on_stage("rollout", 64)
        observer.on_progress(16, "mean reward 0.5")
        for step, reward in enumerate((0.1, 0.5, 0.9), start=1):
            observer.on_step({"step": step, "reward_mean": reward})
        observer.on_message("saved [checkpoint]")
        shown = Console(file=io.StringIO(), width=160, color_system=None)
        shown.print(observer._render())
        text = shown.file.getvalue()
    assert "rollout" in text
    assert "16/64" in text
    assert "mean reward 0.5" in text
    assert "reward ▁▅█" in text
    lines = console.file.getvalue().splitlines()
    for step in ("step 1/40  reward 0.100", "step 2/40  reward 0.500", "step 3/40  reward 0.900"):
        assert sum(step in line for line in lines) == 1, (
            "each step's line is printed once and stays"
        )
    assert "saved [checkpoint]" in console.file.getvalue()


def test_the_live_display_is_safe_from_threads() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)

    def work(number: int) -> None:
        for index in range(200):
            observer.on_stage(f"stage {number}", 200)
            observer.on_progress(index)
            observer.on_step({"step": index, "reward_mean": 0.1})
            if index % 50 == 0:
                observer.on_message(f"message {number}.{index}")

    with RichObserver(console=console) as observer, ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4), timeout=60))
    text = console.file.getvalue()
    assert all(f"message {n}.{i}" in text for n in range(4) for i in (0, 50, 100, 150))


def test_sparklines() -> None:
    assert format_sparkline([]) == ""
    assert format_sparkline([math.nan]) == ""
    assert format_sparkline([0.0, 1.0]) == "▁█"
    assert format_sparkline([0.5, 0.5]) == "▅▅"
    assert format_sparkline([0.50, 0.52, 0.49]) == "▅▅▄", "noise looks as small as it is"
    assert format_sparkline([-1.0, 3.0]) == "▁█"
    assert format_sparkline([0.0, math.nan, 1.0]) == "▁ █"
    # 80 values in 40 bars, each the mean of two
    line = format_sparkline([float(i // 2) for i in range(80)])
    assert len(line) == 40
    assert line[0] == "▁"
    assert line[-1] == "█"
    assert list(line) == sorted(line)
