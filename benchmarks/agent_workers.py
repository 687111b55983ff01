"""What worker processes cost: trajectories of the same agent inline and in workers.

    python -m benchmarks.agent_workers

The engine answers at once, so that only the agent, the gateway and the way between them are
left. Rounds of the ways alternate, and the figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.models.tokenizer_training import train_tokenizer
from agentrl_cli.rollout.dataset import build_eval_tasks
from agentrl_cli.rollout.scheduler import run_tasks
from agentrl_cli.rollout.workflow import RolloutWorkflow
from agentrl_cli.rollout.workflow_building import build_workflow, open_workers
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway import Gateway
from agentrl_cli.tracking.session import Budget
from benchmarks.gateway import InstantEngine

_QUESTION = "What is the sum of the numbers from one to ten? Answer with a number."
_NUM_TURNS = 3
#: Name, and what is set in ``rollout``.
_WAYS: dict[str, dict[str, Any]] = {
    "inline": {"agent_mode": "inline"},
    "workers, one trajectory each": {"agent_mode": "subprocess", "subprocess": {"max_tasks": 1}},
    "workers, 100 trajectories each": {
        "agent_mode": "subprocess",
        "subprocess": {"max_tasks": 100},
    },
}


def build_agent() -> Callable[..., Any]:
    """Three turns of one conversation."""

    async def solve(data: dict[str, Any], client: Any, model: str) -> float:
        messages: list[Any] = []
        for _ in range(_NUM_TURNS):
            messages.append({"role": "user", "content": data["question"]})
            reply = await client.chat.completions.create(model=model, messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        return 1.0

    return solve


def configure(rollout: dict[str, Any], num_workers: int) -> ExperimentConfig:
    """A configuration of the agent above."""
    return ExperimentConfig(
        experiment_name="benchmark",
        model={"path": "builtin:calculator"},
        train_dataset={"path": "none.jsonl"},
        agent_builder_path="benchmarks.agent_workers.build_agent",
        rollout={
            **rollout,
            "max_concurrent": num_workers,
            "subprocess": {**rollout.get("subprocess", {}), "max_processes": num_workers},
        },
    )


async def measure(
    workflow: RolloutWorkflow, engine: InferenceEngine, num_trajectories: int, num_workers: int
) -> float:
    """Trajectories a second."""
    tasks = build_eval_tasks([{"question": _QUESTION}] * num_trajectories)
    started = time.perf_counter()
    trajectories = await run_tasks(workflow, engine, tasks, n_samples=1, max_concurrent=num_workers)
    seconds = time.perf_counter() - started
    failed = [t.failure for t in trajectories if t.failure is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} trajectories failed: {failed[0]}")
    return num_trajectories / seconds


async def compare(num_trajectories: int, num_workers: int, rounds: int) -> None:
    """Measures the ways in turns and prints a table."""
    tokenizer = train_tokenizer([_QUESTION, "The answer is fifty-five."], 512)
    reply_ids = [*tokenizer.encode("The answer is 55."), tokenizer.eos_token_id]
    engine: Any = InstantEngine(reply_ids)
    gateway = Gateway(engine, tokenizer)

    def open_client(_: InferenceEngine, sampling: Sampling, budget: Budget) -> TrackingClient:
        session = gateway.open_session(sampling=sampling, budget=budget)
        return TrackingClient(gateway=gateway, session=session)

    rates: dict[str, list[float]] = {name: [] for name in _WAYS}
    opening: dict[str, float] = {}
    with ExitStack() as stack:
        workflows = {}
        for name, rollout in _WAYS.items():
            config = configure(rollout, num_workers)
            started = time.perf_counter()
            workers = stack.enter_context(open_workers(config))
            opening[name] = time.perf_counter() - started
            workflows[name] = build_workflow(
                config, tokenizer, open_client=open_client, workers=workers
            )
        for number in range(rounds + 1):
            for name, workflow in workflows.items():
                rate = await measure(workflow, engine, num_trajectories, num_workers)
                if number:  # the first round warms up
                    rates[name].append(rate)
    await gateway.close()
    print(
        f"\n{num_trajectories} trajectories of {_NUM_TURNS} turns, {num_workers} at once, "
        f"{rounds} rounds"
    )
    print("| way | trajectories/s | of inline | ready after s |")
    print("|---|---|---|---|")
    base = statistics.median(rates["inline"])
    for name, measured in rates.items():
        rate = statistics.median(measured)
        print(f"| {name} | {rate:.1f} | {rate / base:.2f} | {opening[name]:.1f} |")


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    asyncio.run(compare(arguments.trajectories, arguments.workers, arguments.rounds))


if __name__ == "__main__":
    main()
