"""Steps a second where tools are sometimes very slow, by how far rollouts run ahead.

    python -m benchmarks.longtail

Agents call the model three times, and after each call a tool sleeps for a log-normal time (median
0.2 s, p99 5 s); a step has 8 groups of 4 of their trajectories. Which tool sleeps how long is a
function of the task and of how often it was attempted, so all settings have the same delays. Ten
steps after the first are timed, in rounds that alternate the settings.

``vllm``: ``agentrl train`` as it is, with a tiny model on one server. ``null``: the scheduler, the
gateway and the agents over an engine that answers at once, and a trainer that sleeps half a second:
what is left is waiting. ``--simulate`` prints what the planner alone gives, on a clock of its own.
Writes docs/results/longtail.md and its pictures, after every round.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import Generation, Sampling
from agentrl_cli.models.tokenizer_training import train_tokenizer
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.dataset import TaskStream
from agentrl_cli.rollout.scheduler import RolloutScheduler
from agentrl_cli.rollout.step_planner import StepPlanner
from agentrl_cli.rollout.workflow_building import build_workflow
from agentrl_cli.store.run_folder import RunFolder

_PAGE = Path("docs/results/longtail.md")
_BATCH_SIZE, _N_SAMPLES, _NUM_ROWS, _NUM_TURNS = 8, 4, 400, 3
_MAX_AGE = 8
_STALENESS = (0, 1, 2, 4)
_NUM_TIMED = 10
#: Of these the first is not timed, and the last ones wait for all that is left.
_NUM_STEPS = 1 + _NUM_TIMED + max(_STALENESS)
_LEARN_SECONDS = 0.5
_GOAL = 2.77

_attempts: Counter[str] = Counter()


def draw_delays(name: str) -> list[float]:
    """Seconds for each of an attempt's tools."""
    chance = random.Random(name)
    sigma = math.log(5 / 0.2) / statistics.NormalDist().inv_cdf(0.99)
    return [chance.lognormvariate(math.log(0.2), sigma) for _ in range(_NUM_TURNS)]


def build_agent() -> Any:
    """An agent with slow tools."""

    async def solve(data: dict[str, Any], client: Any, model: str) -> float:
        number = _attempts[data["question"]] = _attempts[data["question"]] + 1
        messages = [{"role": "user", "content": data["question"]}]
        for seconds in draw_delays(f"{data['question']} {number}"):
            reply = await client.chat.completions.create(model=model, messages=messages)
            content = reply.choices[0].message.content
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": "Go on."},
            ]
            await asyncio.sleep(seconds)
        # Different in a group, so that there is something to learn.
        return float(number % 2)

    return solve


@dataclass(frozen=True, slots=True)
class Run:
    """What one run showed."""

    seconds: float
    """Of the timed steps."""
    trajectories: list[Trajectory]
    """Those that the steps were made of."""
    learning: list[tuple[float, float]]
    """Unix times of the trainer's beginning and end with each step."""

    def count_slow(self) -> tuple[float, float]:
        """The share of slow trajectories in the timed steps, and in all steps."""
        drawn = (math.fsum(draw_delays(f"drawn {number}")) for number in range(20_000))
        limit = statistics.quantiles(drawn, n=10)[8]
        timed = [t for t in self.trajectories if 1 < t.step <= 1 + _NUM_TIMED]
        shares = []
        for some in (timed, self.trajectories):
            tools = (t.seconds - sum(i.seconds for i in t.interactions) for t in some)
            shares.append(sum(seconds > limit for seconds in tools) / len(some))
        return shares[0], shares[1]

    def measure_age(self) -> tuple[float, int]:
        """Mean and largest age of the trained tokens of the timed steps, in weight updates."""
        ages = [
            t.step - 1 - version
            for t in self.trajectories
            if 1 < t.step <= 1 + _NUM_TIMED
            for i in t.interactions
            for version in i.versions
        ]
        return statistics.mean(ages), max(ages)


class NullEngine:
    """Answers at once, as the version that it is told."""

    model_name, max_model_len, replicas = "null", 8192, ()

    def __init__(self) -> None:
        self.version = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> Generation:
        """Two tokens."""
        return Generation(
            completion_ids=(5, 0),
            rollout_logprobs=(-1.0, -1.0),
            versions=(self.version,) * 2,
            finish_reason="stop",
        )

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> AsyncIterator[Generation]:
        """The same in one piece."""
        yield await self.generate(prompt_ids, sampling, session_id=session_id)

    async def read_load(self) -> None:
        """Nothing is known of it."""


def configure(max_staleness: int, folder: Path) -> dict[str, Any]:
    """A run with that staleness."""
    return {
        "experiment_name": "longtail",
        "trial_name": f"staleness-{max_staleness}",
        "output_dir": str(folder),
        "model": {"path": "builtin:calculator", "dtype": "float32"},
        "agent_builder_path": "benchmarks.longtail.build_agent",
        "gconfig": {"n_samples": _N_SAMPLES, "max_tokens": 16},
        "train_dataset": {"path": str(folder / "rows.jsonl"), "batch_size": _BATCH_SIZE},
        "engine": {"kind": "vllm", "device": "cpu", "num_servers": 1, "max_model_len": 512},
        "rollout": {
            "max_concurrent": 256,
            "max_staleness": max_staleness,
            "max_trajectory_age": _MAX_AGE,
            "num_workers": 0,
        },
        "train": {"total_steps": _NUM_STEPS, "learning_rate": 1e-5},
    }


def write_rows(folder: Path) -> list[dict[str, Any]]:
    """The dataset."""
    rows = [{"question": f"Say {n}."} for n in range(_NUM_ROWS)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return rows


def run_vllm(max_staleness: int, folder: Path) -> Run:
    """Runs the command."""
    write_rows(folder)
    config = configure(max_staleness, folder)
    (folder / "longtail.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "agentrl_cli", "train", "--config"]
    metrics = folder / "longtail" / config["trial_name"] / "metrics.jsonl"
    said = folder / "said.txt"
    with (
        said.open("w") as output,
        subprocess.Popen(
            [*command, str(folder / "longtail.yaml")], stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        ends: list[float] = []
        while process.poll() is None:
            num_lines = metrics.read_text().count("\n") if metrics.exists() else 0
            ends += [time.time()] * (num_lines - len(ends))
            time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"the run failed:\n{said.read_text()[-5000:]}")
    run = RunFolder.open(metrics.parent)
    lines = run.read_metrics()
    if not all(line["train_tokens"] for line in lines):
        raise RuntimeError(f"a step had nothing to learn: {metrics}")
    seconds = sum(line["step_seconds"] for line in lines[1 : 1 + _NUM_TIMED])
    learning = [
        (end - line["step_seconds"] + line["rollout_seconds"], end)
        for end, line in zip(ends, lines, strict=True)
    ]
    steps = range(1, _NUM_STEPS + 1)
    return Run(seconds, [t for step in steps for t in run.read_trajectories(step)], learning)


async def run_null(max_staleness: int, folder: Path, tokenizer: Any) -> Run:
    """Runs scheduler, gateway and agents in this process."""
    rows, engine = write_rows(folder), NullEngine()
    _attempts.clear()
    config = ExperimentConfig.model_validate(configure(max_staleness, folder))
    planner = StepPlanner(
        TaskStream(rows, batch_size=_BATCH_SIZE, shuffle=True, seed=1),
        n_samples=_N_SAMPLES,
        max_staleness=max_staleness,
        max_trajectory_age=_MAX_AGE,
        first_step=1,
        last_step=_NUM_STEPS,
    )
    workflow = build_workflow(config, tokenizer)
    scheduler = RolloutScheduler(
        workflow,
        engine,  # type: ignore[arg-type]
        planner,
        max_concurrent=config.rollout.max_concurrent,
    )
    scheduler.set_policy_version(0)
    trajectories, learning, ends = [], [], []
    for step in range(1, _NUM_STEPS + 1):
        trajectories += await scheduler.next_batch(step)
        began = time.time()
        await asyncio.sleep(_LEARN_SECONDS)
        engine.version = step
        scheduler.set_policy_version(step)
        learning.append((began, time.time()))
        ends.append(time.perf_counter())
    await scheduler.close()
    return Run(ends[_NUM_TIMED] - ends[0], trajectories, learning)


def simulate(max_staleness: int, max_age: int, num_steps: int) -> float:
    """Seconds a step of the planner alone, where nothing but tools and the trainer takes time."""
    planner = StepPlanner(
        TaskStream([{}] * _NUM_ROWS, batch_size=_BATCH_SIZE, shuffle=True, seed=1),
        n_samples=_N_SAMPLES,
        max_staleness=max_staleness,
        max_trajectory_age=max_age,
        first_step=1,
        last_step=num_steps + max_staleness,
    )
    planner.publish(0)
    now, is_learning, order = 0.0, False, itertools.count()
    events: list[tuple[float, int, Trajectory | None]] = []
    while planner.next_step <= num_steps:
        while (attempt := planner.start()) is not None:
            ended = now + math.fsum(draw_delays(f"{attempt.id} simulated"))
            trajectory = attempt.begin_trajectory(reward=float(attempt.sample_index % 2))
            heapq.heappush(events, (ended, next(order), trajectory))
        if not is_learning and planner.take_step() is not None:
            is_learning = True
            heapq.heappush(events, (now + _LEARN_SECONDS, next(order), None))
        now, _, finished = heapq.heappop(events)
        if finished is None:
            is_learning = False
            planner.publish(planner.next_step - 1)
        else:
            planner.finish(finished)
    return now / num_steps


def format_simulation(num_steps: int) -> str:
    """The table of what scheduling alone gives."""
    base = simulate(0, _MAX_AGE, num_steps)
    lines = [
        "| `max_staleness` | `max_trajectory_age` | seconds a step | times as fast |",
        "|---|---|---|---|",
    ]
    settings = [(0, 0), *((s, a) for s in _STALENESS[1:] for a in (s, _MAX_AGE, 4 * _MAX_AGE))]
    for staleness, age in settings:
        seconds = simulate(staleness, age, num_steps)
        lines.append(f"| {staleness} | {age} | {seconds:.2f} | {base / seconds:.2f} |")
    return "\n".join(lines)


def draw_timeline(run: Run, title: str) -> str:
    """An SVG picture of the timed steps: calls in flight, the trainer, trajectories that wait."""
    begin, end = run.learning[0][1], run.learning[_NUM_TIMED][1]
    width, height, left = 900, 60, 150
    taken = {step: began for step, (began, _) in enumerate(run.learning, start=1)}
    calls = [
        (i.started_at, i.started_at + i.seconds) for t in run.trajectories for i in t.interactions
    ]
    starts = [t.interactions[0].started_at for t in run.trajectories]
    agents = [(at, at + t.seconds) for at, t in zip(starts, run.trajectories, strict=True)]
    waiting = [
        (at + t.seconds, taken[t.step]) for at, t in zip(starts, run.trajectories, strict=True)
    ]
    lanes = {
        "calls at the engine": calls,
        "trainer": run.learning,
        "trajectories in progress": agents,
        "trajectories that wait": waiting,
    }
    parts = [f'<text x="4" y="16" font-weight="bold">{title}</text>']
    for lane, (name, spans) in enumerate(lanes.items()):
        top = 24 + lane * (height + 14)
        counts = [0] * (width + 1)
        for a, b in spans:
            first, last = (round(width * (x - begin) / (end - begin)) for x in (a, b))
            for x in range(max(first, 0), min(max(last, first + 1), width + 1)):
                counts[x] += 1
        highest = max(1, *counts)
        points = " ".join(
            f"{left + x},{top + height - height * n / highest:.1f}" for x, n in enumerate(counts)
        )
        base = top + height
        parts += [
            f'<text x="4" y="{top + 28}">{name}</text>',
            f'<text x="4" y="{top + 44}">0 to {highest}</text>',
            f'<polygon points="{left},{base} {points} {left + width},{base}" fill="#4a78b5"/>',
        ]
    bottom = 24 + len(lanes) * (height + 14)
    parts.append(f'<text x="{left}" y="{bottom + 8}">0 s</text>')
    parts.append(f'<text x="{left + width - 50}" y="{bottom + 8}">{end - begin:.0f} s</text>')
    size = f'width="{left + width + 10}" height="{bottom + 16}"'
    font = 'font-family="sans-serif" font-size="12"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
    return "\n".join([svg, *parts, "</svg>\n"])


def format_table(runs: dict[int, list[Run]]) -> str:
    """Seconds a step and what was trained, by staleness."""
    lines = [
        "| `max_staleness` | seconds a step | times as fast | slow ones trained | in all steps "
        "| age of tokens: mean | largest |",
        "|---|---|---|---|---|---|---|",
    ]
    for staleness, found in runs.items():
        ratios = [base.seconds / run.seconds for base, run in zip(runs[0], found, strict=False)]
        shares = [
            statistics.mean(share) for share in zip(*(r.count_slow() for r in found), strict=True)
        ]
        ages = [run.measure_age() for run in found]
        cells = [
            str(staleness),
            f"{statistics.median(run.seconds for run in found) / _NUM_TIMED:.2f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{100 * shares[0]:.1f} %",
            f"{100 * shares[1]:.1f} %",
            f"{statistics.mean(mean for mean, _ in ages):.2f}",
            str(max(largest for _, largest in ages)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_page(results: dict[str, dict[int, list[Run]]], num_rounds: int) -> None:
    """The page and its pictures, of the rounds that are done."""
    parts = [
        f"""# Slow tools

Made by `python -m benchmarks.longtail`: three calls of the model, each followed by a tool that
sleeps for a log-normal time (median 0.2 s, p99 5 s); {_BATCH_SIZE} groups of {_N_SAMPLES}
trajectories a step; `rollout.max_trajectory_age` {_MAX_AGE}. Seconds of the {_NUM_TIMED} steps
after the first, medians over {num_rounds} rounds that alternate the settings, and the ratio to
`max_staleness` 0 of the same round (goal: {_GOAL} at 1 or 2). Slow is a trajectory among the
slowest tenth of all that may be drawn: what is trained should hold 10 % of them. A window of ten
steps shows less of what the age limit costs than the planner alone does below; the steps at a
run's end wait for all that was begun.
"""
    ]
    for engine, runs in results.items():
        done = {staleness: found for staleness, found in runs.items() if found}
        if 0 not in done:
            continue
        parts.append(f"## {engine}\n\n{format_table(done)}\n")
        for staleness in (s for s in (0, 2) if done.get(s)):
            name = f"longtail-{engine}-{staleness}.svg"
            title = f"{engine}, max_staleness {staleness}"
            _PAGE.with_name(name).write_text(draw_timeline(done[staleness][-1], title))
            parts.append(f"![{title}]({name})\n")
    parts.append(
        "## The planner alone\n\nOn a clock of its own, 2,000 steps: what scheduling can give "
        "where nothing takes time but\ntools and half a second of learning.\n\n"
        f"{format_simulation(2000)}\n"
    )
    _PAGE.write_text("\n".join(parts), encoding="utf-8")


def main() -> None:
    """Runs the rounds, and writes the page after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", choices=["vllm", "null"], default=["vllm", "null"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args()
    if options.simulate:
        print(format_simulation(2000))
        return
    results: dict[str, dict[int, list[Run]]] = {
        engine: {staleness: [] for staleness in _STALENESS} for engine in options.engines
    }
    tokenizer = train_tokenizer(["Say 1.", "Go on."], 512)
    with tempfile.TemporaryDirectory() as scratch:
        for number, (engine, runs) in itertools.product(range(options.rounds), results.items()):
            for staleness, found in runs.items():
                place = Path(scratch) / f"{engine}-{staleness}-{number}"
                place.mkdir()
                if engine == "vllm":
                    found.append(run_vllm(staleness, place))
                else:
                    found.append(asyncio.run(run_null(staleness, place, tokenizer)))
                seconds = found[-1].seconds / _NUM_TIMED
                print(f"{engine}, max_staleness {staleness}: {seconds:.2f} s a step", flush=True)
            write_page(results, number + 1)
    print(f"wrote {_PAGE}")


if __name__ == "__main__":
    main()
