"""Throughput of trajectories with rollout workers, and what one that is blocked costs the others.

    python -m benchmarks.rollout_workers

Agents of the OpenAI Agents SDK, three turns each, on a server that answers at once: all that is
left is the Python of agents, gateway and scheduling. ``in process`` is the trainer's process
itself. Rounds of the ways alternate; the figures are medians over the rounds, and a ratio is the
median of the ratios of the rounds. The CPU time beside them says what other programs on the machine
do not change: the trainer's share is what workers cannot take over. Then ``time.sleep`` blocks one
of two workers while trajectories come and go.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.engine.protocol import ServerEndpoint, WeightUpdate
from agentrl_cli.engine.router.engine_router import EngineRouter
from agentrl_cli.engine.router.server_clients import open_clients
from agentrl_cli.launch.processes.trainer_protocol import RunningServers
from agentrl_cli.launch.rollout_workers.rollout_pool import RemoteWorkflow, RolloutWorkers
from agentrl_cli.log import SilentObserver
from agentrl_cli.models.tokenizer_training import train_tokenizer
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.background_loop import BackgroundLoop
from agentrl_cli.rollout.dataset import build_eval_tasks
from agentrl_cli.rollout.scheduler import run_tasks
from agentrl_cli.rollout.workflow import RolloutWorkflow
from agentrl_cli.rollout.workflow_building import build_workflow

_QUESTION = "What is the sum of the numbers from one to ten? Answer with a number."
_NUM_TURNS = 3
_NUM_TOKENS = 24
_GOAL = 1.7
_SECONDS = 600.0


def build_agent() -> Any:
    """An agent that is asked three times, each time with all that was said before."""
    from agents import Agent, OpenAIProvider, RunConfig, Runner

    async def solve(data: Mapping[str, Any], client: Any, model: str) -> float:
        # A row that says so blocks its worker.
        time.sleep(data.get("sleep_seconds", 0))  # noqa: ASYNC251 - what is measured
        agent = Agent(name="solver", instructions="Answer in one sentence.", model=model)
        provider = OpenAIProvider(openai_client=client, use_responses=False)
        run_config = RunConfig(model_provider=provider, tracing_disabled=True)
        said: list[Any] = []
        for _ in range(_NUM_TURNS):
            said.append({"role": "user", "content": data["question"]})
            result = await Runner.run(agent, said, run_config=run_config)
            said = result.to_input_list()
        return 1.0

    return solve


class _NoTransfer:
    """There are no weights."""

    async def prepare(self, version: int, weights: Mapping[str, Any]) -> WeightUpdate:
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing is held."""


def configure(folder: Path, max_concurrent: int) -> ExperimentConfig:
    """A configuration of the agent above."""
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "benchmark",
            "model": {"path": str(folder)},
            "engine": {"kind": "vllm", "device": "cpu"},
            "train_dataset": {"path": "none.jsonl"},
            "agent_builder_path": "benchmarks.rollout_workers.build_agent",
            "gconfig": {"max_tokens": _NUM_TOKENS},
            "rollout": {"max_concurrent": max_concurrent},
        }
    )


@contextmanager
def null_servers(config: ExperimentConfig) -> Iterator[RunningServers]:
    """A server in a process of its own, which answers at once."""
    command = [sys.executable, "-m", "benchmarks.null_server", str(_NUM_TOKENS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        try:
            yield RunningServers(
                run=resolve_run(config, Machine(), purpose="eval"),
                endpoints=(ServerEndpoint(name="null", base_url=url, api_key="none"),),
            )
        finally:
            server.terminate()


async def open_router(config: ExperimentConfig, servers: RunningServers) -> EngineRouter:
    """The trainer's own engine."""
    clients = open_clients("vllm", servers.endpoints, config.engine)
    router = EngineRouter(
        clients, config.engine, model_name=config.model.path, transfer=_NoTransfer()
    )
    await router.start(0)
    return router


def start_workers(
    config: ExperimentConfig,
    num_workers: int,
    servers: RunningServers,
    background: BackgroundLoop,
    router: EngineRouter,
    tokenizer: Any,
    stack: ExitStack,
) -> RemoteWorkflow:
    """A workflow whose trajectories so many workers make."""
    workers = RolloutWorkers(config, num_workers, ["eval"], SilentObserver())
    stack.callback(workers.close)
    log_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    workers.start(background, servers, config.model.path, tokenizer, log_dir)
    workers.attach(router)
    # Its rows are known to be good.
    return RemoteWorkflow(workers, "eval", local=None)  # type: ignore[arg-type]


def roll(
    workflow: RolloutWorkflow,
    router: EngineRouter,
    background: BackgroundLoop,
    rows: list[dict[str, Any]],
    max_concurrent: int,
) -> tuple[float, list[Trajectory]]:
    """Seconds, and the trajectories."""
    tasks, started = build_eval_tasks(rows), time.perf_counter()
    rolling = run_tasks(workflow, router, tasks, n_samples=1, max_concurrent=max_concurrent)
    trajectories = background.run(rolling, _SECONDS)
    seconds = time.perf_counter() - started
    for trajectory in trajectories:
        assert trajectory.failure is None, trajectory.failure
        assert trajectory.num_turns == _NUM_TURNS
    return seconds, trajectories


def read_cpu_seconds() -> tuple[float, float]:
    """CPU time of this process, and of all that it has started and that still run."""
    others = 0.0
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        others += times.user + times.system
    return time.process_time(), others


def compare(
    ways: Mapping[str, RolloutWorkflow],
    router: EngineRouter,
    background: BackgroundLoop,
    options: argparse.Namespace,
) -> None:
    """Prints the throughput of every way."""
    rows = [{"question": _QUESTION}] * options.trajectories
    rates: dict[str, list[float]] = {way: [] for way in ways}
    costs: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(options.rounds + 1):
        for way, workflow in ways.items():
            before = read_cpu_seconds()
            seconds, _ = roll(workflow, router, background, rows, options.concurrent)
            if number:  # the first round warms up
                rates[way].append(len(rows) / seconds)
                spent = [b - a for a, b in zip(before, read_cpu_seconds(), strict=True)]
                costs[way].append((1e3 * spent[0] / len(rows), 1e3 * spent[1] / len(rows)))
    print(
        f"\n{options.trajectories} trajectories of {_NUM_TURNS} turns, {options.concurrent} at "
        f"once, {options.rounds} rounds"
    )
    print("| way | trajectories/s | of one worker | CPU ms each: trainer | all others |")
    print("|---|---|---|---|---|")
    for way, found in rates.items():
        ratio = statistics.median(
            rate / one for rate, one in zip(found, rates["1 worker"], strict=True)
        )
        own, others = (statistics.median(cost) for cost in zip(*costs[way], strict=True))
        rate = statistics.median(found)
        print(f"| {way} | {rate:,.1f} | {ratio:.2f} | {own:.1f} | {others:.1f} |")
    print(f"goal of 2 workers on 2 cores: {_GOAL}")


def block_one(
    workflow: RolloutWorkflow,
    router: EngineRouter,
    background: BackgroundLoop,
    options: argparse.Namespace,
) -> None:
    """Prints how long trajectories take while one of the workers is blocked."""
    rows = [{"question": _QUESTION}] * options.trajectories
    _, before = roll(workflow, router, background, rows, 4)
    blocking = [{"question": _QUESTION, "sleep_seconds": options.sleep}]
    task = run_tasks(workflow, router, build_eval_tasks(blocking), n_samples=1, max_concurrent=1)
    blocked = background.submit(task)
    background.run(asyncio.sleep(1.0), 10)
    _, during = roll(workflow, router, background, rows, 4)
    is_blocked = not blocked.done()
    blocked.result(_SECONDS)
    print(f"\none of two workers blocked by time.sleep({options.sleep:g}); 4 at once")
    print("| | trajectories | p50 s | p99 s | longest s |\n|---|---|---|---|---|")
    for name, trajectories in (("before", before), ("meanwhile", during)):
        seconds = sorted(t.seconds for t in trajectories)
        p99 = seconds[int(0.99 * (len(seconds) - 1))]
        print(
            f"| {name} | {len(seconds)} | {statistics.median(seconds):.2f} | {p99:.2f} "
            f"| {seconds[-1]:.2f} |"
        )
    print(f"still blocked when the last of them had ended: {'yes' if is_blocked else 'no'}")


def run(options: argparse.Namespace) -> None:
    """Both parts."""
    logging.getLogger("agentrl_cli").setLevel(logging.ERROR)
    tokenizer = train_tokenizer([_QUESTION, "The answer is fifty-five."], 512)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tokenizer.save_pretrained(folder)
        config = configure(folder, options.concurrent)
        background = stack.enter_context(BackgroundLoop())
        servers = stack.enter_context(null_servers(config))
        router = background.run(open_router(config, servers), 60)
        stack.callback(lambda: background.run(router.close(), 10))
        local = build_workflow(config, tokenizer)
        stack.callback(local.close)
        ways: dict[str, RolloutWorkflow] = {"in process": local}
        for num_workers, way in ((1, "1 worker"), (2, "2 workers")):
            ways[way] = start_workers(
                config, num_workers, servers, background, router, tokenizer, stack
            )
        compare(ways, router, background, options)
        if options.sleep:
            block_one(ways["2 workers"], router, background, options)


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=200)
    parser.add_argument("--concurrent", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sleep", type=float, default=60.0, help="seconds; 0: no second part")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
