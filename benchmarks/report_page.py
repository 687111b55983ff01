"""What the page of a large run costs: seconds and memory to make it, seconds until it is seen.

    python -m benchmarks.report_page                    # 100 steps of 1000 trajectories
    python -m benchmarks.report_page --steps 10 --per-step 80 --keep DIR

The run is synthetic: two turns with a tool call and about 300 sampled tokens a trajectory, some of
which fail, are cut off or malformed. The page is opened from its file in a system's Chromium
(playwright), five times: seconds until the first contentful paint, which shows curves and what to
look at first, until lists can be used, and until one trajectory is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.evaluate.eval_report import build_report
from agentrl_cli.records import (
    Boundary,
    Failure,
    FailureCause,
    Interaction,
    MismatchCause,
    StopReason,
    Trajectory,
)
from agentrl_cli.store.run_folder import RunFolder

_GROUP = 8
_NUM_TASKS = 2000
_NUM_OPENED = 5
_SENTENCE = (
    "the order has been checked against the table of prices and every line that was found "
    "differs by the discount so the total must be computed again before it is sent"
)
_WORDS = _SENTENCE.split()
_SYSTEM = {"role": "system", "content": "You check orders. Use the tool to look up prices."}


def write_run(folder: Path, num_steps: int, per_step: int, eval_every: int = 10) -> Path:
    """Writes a run whose policy gets better; the run's folder."""
    config = ExperimentConfig.model_validate(
        {
            "experiment_name": "orders",
            "trial_name": "t0",
            "output_dir": str(folder),
            "model": {"path": "builtin:calculator"},
            "agent_builder_path": "a.b",
            "train_dataset": {"path": "tasks.jsonl"},
        }
    )
    chance = random.Random(1)
    with RunFolder.create_or_resume(config) as run:
        for step in range(1, num_steps + 1):
            skill = 0.15 + 0.7 * step / num_steps
            groups = (
                _make_group(
                    chance, f"{step:06d}.{n:03d}", chance.randrange(_NUM_TASKS), step, skill
                )
                for n in range(-(-per_step // _GROUP))
            )
            batch = [trajectory for group in groups for trajectory in group][:per_step]
            run.write_trajectories(step, batch)
            run.append_metrics(_make_metrics(chance, step, num_steps, batch))
            if step == 1 or step % eval_every == 0:
                _write_eval(run, chance, 0 if step == 1 else step, skill)
        return run.path


def _write_eval(run: RunFolder, chance: random.Random, step: int, skill: float) -> None:
    tasks = [_make(chance, f"9{step:05d}.{task:03d}", 0, task, step, skill) for task in range(200)]
    run.write_eval(step, tasks, build_report(tasks).to_dict())


def _make_group(
    chance: random.Random, group: str, task: int, step: int, skill: float
) -> list[Trajectory]:
    return [_make(chance, group, n, task, step, skill) for n in range(_GROUP)]


def _say(chance: random.Random, num_words: int) -> str:
    return " ".join(chance.choices(_WORDS, k=num_words))


def _make(
    chance: random.Random, group: str, number: int, task: int, step: int, skill: float
) -> Trajectory:
    question = f"Order {task}: how much is owed for {task % 7 + 2} boxes at {task % 31 + 1}?"
    answer = str((task % 7 + 2) * (task % 31 + 1))
    hardness = (task * 7919 % 100) / 250
    is_right = chance.random() < skill - hardness + 0.1
    asked = {"role": "user", "content": question}
    call = {
        "role": "assistant",
        "content": _say(chance, 12),
        "tool_calls": [
            {
                "id": f"call_{chance.randrange(10**9)}",
                "type": "function",
                "function": {
                    "name": "look_up_price",
                    "arguments": json.dumps({"order": task, "line": chance.randrange(4)}),
                },
            }
        ],
    }
    result = {
        "role": "tool",
        "tool_call_id": call["tool_calls"][0]["id"],  # type: ignore[index]
        "content": f"price {task % 31 + 1}",
    }
    said = answer if is_right else str(chance.randrange(300))
    last = {"role": "assistant", "content": f"{_say(chance, 40)}. The total is {said}"}
    draw = chance.random()
    failure = _make_failure(draw) if draw < 0.01 else None
    reward = None if failure else float(is_right)
    calls = (
        _make_call(chance, "a", None, (_SYSTEM, asked), call, 120, step, reward, draw),
        _make_call(chance, "b", "a", (_SYSTEM, asked, call, result), last, 180, step, reward, draw),
    )
    is_cut = 0.02 < draw < 0.03
    return Trajectory(
        id=f"{group}/{number}",
        group_id=group,
        task_id=str(task),
        sample_index=number,
        step=step,
        task={"question": question, "answer": answer},
        agent_name="checker" if task % 2 else "clerk",
        interactions=calls[: 1 if failure else 2],
        reward=reward,
        reward_parts={} if reward is None else {"exact": reward, "format": 1.0},
        final_answer=None if failure else last["content"],
        stop_reason=StopReason.MAX_TURNS if is_cut else None,
        failure=failure,
        seconds=chance.lognormvariate(1, 0.4),
    )


def _make_failure(draw: float) -> Failure:
    return Failure(
        boundary=Boundary.TOOL if draw < 0.005 else Boundary.TIMEOUT,
        kind="ConnectionError",
        message="the price list does not answer",
        traceback='Traceback (most recent call last):\n  File "prices.py", line 12, in look_up',
        cause=FailureCause.SURROUNDINGS,
    )


def _make_call(
    chance: random.Random,
    name: str,
    parent: str | None,
    messages: Sequence[dict[str, object]],
    reply: dict[str, object],
    num_tokens: int,
    step: int,
    reward: float | None,
    draw: float,
) -> Interaction:
    is_last = parent is not None
    is_mismatch = is_last and 0.03 < draw < 0.04
    return Interaction(
        id=f"chatcmpl-{name}",
        parent_id=parent and f"chatcmpl-{parent}",
        extends_parent=is_last and not is_mismatch,
        mismatch_cause=MismatchCause.HISTORY_EDITED if is_mismatch else None,
        messages=tuple(messages),
        reply=reply,
        prompt_ids=tuple(chance.choices(range(400), k=100)),
        completion_ids=tuple(chance.choices(range(400), k=num_tokens)),
        rollout_logprobs=tuple(-min(chance.expovariate(2) ** 2, 9.0) for _ in range(num_tokens)),
        versions=(max(step - 1 - int(draw * 2), 0),) * num_tokens,
        has_malformed_call=not is_last and 0.015 < draw < 0.02,
        finish_reason="length" if is_last and 0.01 < draw < 0.015 else "stop",
        started=3 if is_last else 1,
        ended=4 if is_last else 2,
        turn_return=reward,
        reward=reward if is_last else None,
    )


def _make_metrics(
    chance: random.Random, step: int, num_steps: int, batch: Sequence[Trajectory]
) -> dict[str, float]:
    rewards = [t.reward for t in batch if t.reward is not None]
    num_failed = float(sum(t.failure is not None for t in batch))
    train = 8 + chance.random()
    rollout = 14 + 6 * chance.random()
    return {
        "step": float(step),
        "num_trajectories": float(len(batch)),
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "policy_failures": 0.0,
        "surroundings_failures": num_failed,
        "num_unscored": num_failed,
        "truncated_fraction": 0.005 + 0.002 * chance.random(),
        "entropy": 0.9 - 0.5 * step / num_steps + 0.05 * chance.random(),
        "logprob_gap_mean": 0.004 + 0.002 * chance.random(),
        "logprob_gap_max": 0.3 + 0.4 * chance.random(),
        "token_age_mean": 0.6 + 0.3 * chance.random(),
        "token_age_max": 2.0,
        "rollout_seconds": rollout,
        "train_seconds": train,
        "publish_seconds": 0.6,
        "probe_seconds": 0.3,
        "step_seconds": rollout + train + 1.4,
        "turns_mean": 2.0,
        "completion_tokens_mean": 300.0 + 20 * chance.random(),
        "alarm_truncated": float(num_steps // 2 < step < num_steps // 2 + 3),
    }


def _make_page(run: Path, page: Path) -> None:
    """Makes the page by the command, in a process of its own: its memory is counted alone."""
    command = [sys.executable, "-m", "agentrl_cli", "report", str(run), "--html", str(page)]
    started = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    print(done.stdout.strip())
    print(
        f"made in {seconds:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU, with at most "
        f"{used.ru_maxrss / 1024:.0f} MiB of memory (load of the machine: {load:.1f} a core)"
    )
    print(f"the page itself: {page.stat().st_size / 1e6:.1f} MB")


def _open_page(page: Path, chromium: str) -> None:
    from playwright.sync_api import sync_playwright

    times: dict[str, list[float]] = {"first paint": [], "lists usable": [], "a trajectory": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(_NUM_OPENED):
            tab = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
            tab.goto(f"{page.resolve().as_uri()}#/")
            tab.wait_for_selector(".plot canvas")
            paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
            times["first paint"].append(tab.wait_for_function(paint).json_value() / 1000)
            tab.wait_for_selector("html[data-columns=read]", state="attached")
            times["lists usable"].append(tab.evaluate("performance.now()") / 1000)
            started = time.perf_counter()
            tab.evaluate("location.hash = '#/trajectory/step-000001/3'")
            tab.wait_for_selector(".message.assistant")
            times["a trajectory"].append(time.perf_counter() - started)
            tab.context.close()
        browser.close()
    for name, seconds in times.items():
        print(f"{name}: {statistics.median(seconds):.2f} s (slowest {max(seconds):.2f} s)")


def main() -> None:
    """Prints what the page of a synthetic run costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--per-step", type=int, default=1000)
    parser.add_argument("--chromium", default=shutil.which("chromium") or "chromium")
    parser.add_argument("--keep", type=Path, help="a folder for the run, kept to be used again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        run = folder / "orders" / "t0"
        if not run.is_dir():
            run = write_run(folder, arguments.steps, arguments.per_step)
        page = folder / "report.html"
        _make_page(run, page)
        _open_page(page, arguments.chromium)


if __name__ == "__main__":
    main()
