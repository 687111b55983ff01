"""What long conversations cost once they have ended: keeping, writing and reading trajectories.

    python -m benchmarks.growth --output docs/results/growth.md

Conversations of 100 turns are held with the engine and the agent of ``long_conversations.py`` and
stored in a run folder of their own; then a run of many steps of short ones is inspected. Run it
with ``PYTHONPATH`` naming another checkout, and this file by its path, to measure that one.

Times are medians of wall seconds, but for CPU, which counts all threads: "the caller" is what the
rollouts' event loop waits for, "all" what is spent until the bytes are with the system.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.inspector.inspect_run import inspect_run
from agentrl_cli.inspector.trajectory_query import TrajectoryQuery
from agentrl_cli.models.tokenizer_training import train_tokenizer
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.tracking.client import TrackingClient
from benchmarks import long_conversations

_MIB = 2**20
_NUM_KEPT = 16


def build_config(folder: Path) -> ExperimentConfig:
    """A configuration whose run lies in ``folder``."""
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "growth",
            "trial_name": "t0",
            "output_dir": str(folder),
            "model": {"path": "builtin:calculator"},
            "agent_builder_path": "a.b",
            "train_dataset": {"path": "tasks.jsonl"},
        }
    )


async def converse(num_turns: int) -> tuple[Trajectory, float]:
    """One finished conversation, and what it holds in memory while it lives, MiB."""
    long_conversations._NUM_TURNS = num_turns
    case = long_conversations.CASES[1]
    say = long_conversations._say
    tokenizer = train_tokenizer([say(n, 60) for n in range(40)], 500)
    tokenizer.chat_template = case.template
    engine: Any = long_conversations.InstantEngine(tokenizer, case.reasons)
    gateway = long_conversations._ClockedGateway(
        engine, tokenizer, tool_call_parser="hermes", reasoning_parser="qwen3"
    )
    held = 0.0
    client: Any = None
    for is_measured in (False, True):
        if client is not None:
            await client.close()
        engine.write(num_turns)
        gc.collect()
        if is_measured:
            tracemalloc.start()
        client = TrackingClient(gateway=gateway)
        await long_conversations.talk(client, case, [])
        gc.collect()
    held = tracemalloc.get_traced_memory()[0] / _MIB
    tracemalloc.stop()
    trajectory = Trajectory(
        id="000001.000/0",
        group_id="000001.000",
        task_id="0",
        step=1,
        task={"question": say(0, 60)},
        interactions=client.interactions,
        reward=1.0,
    )
    await client.close()
    await gateway.close()
    return trajectory, held


def rename(trajectory: Trajectory, step: int, number: int) -> Trajectory:
    """The same conversation as another trajectory of a step."""
    group_id = f"{step:06d}.{number // 8:03d}"
    return replace(
        trajectory,
        id=f"{group_id}/{number % 8}",
        group_id=group_id,
        sample_index=number % 8,
        step=step,
        reward=number % 10 / 10,
    )


def measure_stored(trajectory: Trajectory, num_written: int) -> list[tuple[str, str]]:
    """Keeping finished ones, and writing a step of them."""
    rows = []
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder.create_or_resume(build_config(Path(path)))
        made = [rename(trajectory, 1, n) for n in range(max(num_written, _NUM_KEPT))]
        folder.add_pending(rename(trajectory, 2, 0))
        callers = []
        cpu = time.process_time()
        for one in made[:_NUM_KEPT]:
            started = time.perf_counter()
            folder.add_pending(one)
            callers.append(time.perf_counter() - started)
        wait(folder)
        kept = (time.process_time() - cpu) / _NUM_KEPT
        pending = folder.path / "pending"
        size = sum(p.stat().st_size for p in pending.iterdir()) / (_NUM_KEPT + 1)
        rows.append(("keep one, the caller", f"{1e3 * statistics.median(callers):.2f} ms"))
        rows.append(("keep one, all CPU", f"{1e3 * kept:.2f} ms"))
        rows.append(("one in the pending file", f"{size / 1024:.0f} KiB"))
        started, cpu = time.perf_counter(), time.process_time()
        folder.write_trajectories(1, made)
        caller = time.perf_counter() - started
        wait(folder)
        spent = time.process_time() - cpu
        size = sum(p.stat().st_size for p in (folder.path / "trajectories").iterdir())
        rows.append((f"write a step of {len(made)}, the caller", f"{caller:.2f} s"))
        rows.append(("the same, all CPU, one trajectory", f"{1e3 * spent / len(made):.1f} ms"))
        rows.append(("one in Parquet", f"{size / len(made) / 1024:.1f} KiB"))
        rows.append(("read them all", f"{1e3 * clock(lambda: folder.read_trajectories(1)):.0f} ms"))
        name = made[len(made) // 2].id
        rows.append(("inspect one of them", f"{time_view(folder, name, {}):.2f} s"))
        folder.close()
    return rows


def wait(folder: RunFolder) -> None:
    """Returns when everything that was given to ``folder`` is written."""
    flush = getattr(folder, "flush", None)
    if flush is not None:
        flush()


def clock(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure_reading(num_steps: int, num_trajectories: int) -> list[tuple[str, str]]:
    """The inspector on a run of many steps."""
    call = Interaction(
        id="c",
        messages=({"role": "user", "content": "What is 17 + 25?"},),
        reply={"role": "assistant", "content": "42"},
        prompt_ids=tuple(range(40)),
        completion_ids=tuple(range(20)),
        rollout_logprobs=(-0.5,) * 20,
        versions=(0,) * 20,
    )
    short = Trajectory(
        id="", group_id="", task_id="0", task={"question": "What is 17 + 25?", "answer": "42"}
    )
    short = replace(short, interactions=(call,), final_answer="42")
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder.create_or_resume(build_config(Path(path)))
        batch = [rename(short, 1, n) for n in range(num_trajectories)]
        first = folder.write_trajectories(1, batch)
        wait(folder)
        folder.close()
        # Every step has the same: writing them is not what counts.
        for step in range(2, num_steps + 1):
            (first.parent / f"step-{step:06d}.parquet").write_bytes(first.read_bytes())
        queries: Sequence[tuple[str, str | None, dict[str, Any]]] = (
            ("overview", None, {}),
            ("list of all steps", None, {"steps": "all"}),
            ("sort by reward", None, {"steps": "all", "sort": "reward"}),
            ("filter and sort", None, {"steps": "all", "max_reward": 0.3, "sort": "tokens"}),
            ("filter by failure", None, {"steps": "all", "failure": "none"}),
            ("one trajectory", batch[-1].id, {}),
        )
        return [
            (f"{num_steps} x {num_trajectories}: {name}", f"{time_view(folder, one, given):.2f} s")
            for name, one, given in queries
        ]


def time_view(folder: RunFolder, trajectory: str | None, query: dict[str, Any]) -> float:
    """Wall seconds of what ``agentrl inspect-trajectories`` does once it is loaded."""
    console = Console(file=io.StringIO(), width=160)
    asked = TrajectoryQuery(limit=50, **query)
    return clock(lambda: inspect_run(folder.path, trajectory, asked, console=console))


def main() -> None:
    """Prints the tables, and writes them with ``--output``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--written", type=int, default=64, help="long trajectories of a step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--trajectories", type=int, default=1024, help="short ones of a step")
    parser.add_argument("--skip-reading", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    trajectory, held = asyncio.run(converse(options.turns))
    last = trajectory.interactions[-1]
    num_tokens = len(last.prompt_ids) + len(last.completion_ids)
    rows = [
        (f"a session of {options.turns} turns, {num_tokens:,} tokens, holds", f"{held:.2f} MiB"),
        *measure_stored(trajectory, options.written),
    ]
    if not options.skip_reading:
        rows += measure_reading(options.steps, options.trajectories)
    table = "\n".join(["| what | |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)])
    print(table)
    if options.output is not None:
        options.output.write_text(f"# Growth\n\n{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
