"""Runs whose ranks torchrun starts: two of its agents, which are two nodes on this machine."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.train.run_progress import count_steps, read_losses

NUM_STEPS = 6
ARGUMENTS = (
    *("train", "--config", "experiment.yaml", f"train.total_steps={NUM_STEPS}"),
    *("train.save_every_steps=2", "rollout.max_staleness=0"),
)

Command = subprocess.Popen[str]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def start_nodes(start_module: Callable[..., Command]) -> Callable[..., list[Command]]:
    """Types torchrun on two nodes, which find each other by ``c10d`` or ``static``."""

    def start(backend: str, *arguments: str) -> list[Command]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        found = []
        for number in range(2):
            place = [f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}"]
            if backend == "c10d":
                place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
            found.append(
                start_module(
                    *("torch.distributed.run", "--nnodes=2", *place),
                    *("--nproc-per-node=1", "--max-restarts=3", "-m", "agentrl_cli"),
                    *(*ARGUMENTS, "launcher.kind=torchrun", *arguments),
                )
            )
        return found

    return start


def kill_rank(nodes: Sequence[Command], index: int) -> None:
    [rank] = [
        process
        for node in nodes
        for process in psutil.Process(node.pid).children()
        if process.environ().get("RANK") == str(index)
    ]
    rank.kill()


def test_a_killed_rank_changes_nothing_of_what_is_learned(
    project: Path,
    start_nodes: Callable[..., list[Command]],
    agentrl: Callable[..., Command],
    finish: Callable[..., str],
    wait_until: Callable[..., Any],
    read_every_task_once: Callable[[Path, int], object],
) -> None:
    run_dir = project / "runs" / "small" / "spread"
    nodes = start_nodes("c10d", "trial_name=spread")
    wait_until(nodes[0], lambda: count_steps(run_dir) >= 3)
    kill_rank(nodes, 1)
    outputs = sorted((finish(node) for node in nodes), key=len)
    assert "another of the 2 processes that train together has ended" in outputs[1]
    assert "resuming after step 2" in outputs[1]
    # What the other prints is torchrun's.
    assert not any(word in outputs[0] for word in ("step", "error: ", "load model"))
    read_every_task_once(run_dir, NUM_STEPS)

    finish(agentrl(*ARGUMENTS, "train.num_processes=2", "trial_name=here"))
    assert read_losses(run_dir) == read_losses(run_dir.parent / "here")


@pytest.mark.long
def test_a_stopped_run_is_saved_and_resumes_even_if_rank_0_is_killed(
    project: Path,
    start_nodes: Callable[..., list[Command]],
    finish: Callable[..., str],
    wait_until: Callable[..., Any],
    read_every_task_once: Callable[[Path, int], object],
) -> None:
    run_dir = project / "runs" / "small" / "t0"
    # So that the step in progress is the last thing to be saved.
    nodes = start_nodes("static", "train.save_every_steps=100")
    wait_until(nodes[0], lambda: count_steps(run_dir) >= 2)
    nodes[0].send_signal(signal.SIGTERM)
    output, _ = nodes[0].communicate(timeout=100)
    # The other rank was told of the end: its node has nothing to complain of.
    nodes[1].communicate(timeout=100)
    assert nodes[0].returncode != 0
    assert "stopped before the last step; the same command resumes from here" in output
    num_done = count_steps(run_dir)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step-{num_done:06}"]

    nodes = start_nodes("static", "train.save_every_steps=100")
    wait_until(nodes[0], lambda: count_steps(run_dir) > num_done)
    kill_rank(nodes, 0)
    output = finish(nodes[0])
    finish(nodes[1])
    assert output.count(f"resuming after step {num_done}") == 2
    read_every_task_once(run_dir, NUM_STEPS)


def test_a_rank_without_torchrun_is_told_what_to_type(
    agentrl: Callable[..., Command], finish: Callable[..., str]
) -> None:
    output = finish(agentrl(*ARGUMENTS, "launcher.kind=torchrun"), 2)
    assert "torchrun --nnodes=NODES --node-rank=" in output
