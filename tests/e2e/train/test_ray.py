"""A run on a Ray cluster of several nodes, which are raylets of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from tests.e2e.ray_nodes import RayNodes
from tests.e2e.train.run_progress import (
    count_steps,
    count_stored_steps,
    download,
    find_rank,
    read_losses,
)

NUM_STEPS = 6
ARGUMENTS = (
    *("train", "--config", "experiment.yaml", f"train.total_steps={NUM_STEPS}"),
    *("train.save_every_steps=2", "rollout.max_staleness=0", "train.num_processes=2"),
)
ON_RAY = ("launcher.kind=ray", "launcher.resources={trainer: {trains: 1.5}}")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def start_nodes(model_folder: Path) -> Iterator[Callable[..., RayNodes]]:
    """Starts clusters, which end with the test: a head, and so many nodes with room for ranks."""
    pytest.importorskip("ray", reason="needs Ray (extra ray)")
    with ExitStack() as stack:

        def start(num_nodes: int = 2, **head: Any) -> RayNodes:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            nodes = RayNodes({"num_cpus": 2, **head}, folder, [model_folder])
            stack.callback(nodes.close)
            for _ in range(num_nodes):
                nodes.add(num_cpus=2, resources={"trains": 2})
            return nodes

        yield start


@pytest.mark.long
def test_a_lost_node_changes_nothing_of_what_is_learned(
    start_nodes: Callable[..., RayNodes],
    project: Path,
    agentrl: Callable[..., subprocess.Popen[str]],
    finish: Callable[..., str],
    wait_until: Callable[..., Any],
    read_every_task_once: Callable[[Path, int], object],
) -> None:
    cluster = start_nodes()
    run_dir = project / "runs" / "small" / "spread"
    command = agentrl(
        *ARGUMENTS, *ON_RAY, f"launcher.address={cluster.address}", "trial_name=spread"
    )
    wait_until(command, lambda: count_steps(run_dir) >= 3)
    struck = wait_until(command, lambda: find_rank(psutil.process_iter(), 0))
    cluster.lose_node_of(struck)
    cluster.add(num_cpus=2, resources={"trains": 2})
    output = finish(command)
    assert "the trainer was lost: its node" in output
    assert "it is started again (restart 1 of 3)" in output
    read_every_task_once(run_dir, NUM_STEPS)
    assert "trainer starts" in (run_dir / "logs" / "trainer.log").read_text()

    finish(agentrl(*ARGUMENTS, "trial_name=here"))
    assert read_losses(run_dir) == read_losses(run_dir.parent / "here")


@pytest.mark.long
def test_the_head_and_the_command_are_lost_and_the_same_command_resumes_on_another_cluster(
    start_nodes: Callable[..., RayNodes],
    s3_bucket: str,
    project: Path,
    agentrl: Callable[..., subprocess.Popen[str]],
    finish: Callable[..., str],
    wait_until: Callable[..., Any],
    read_every_task_once: Callable[[Path, int], object],
) -> None:
    num_steps = 40
    steps = (f"train.total_steps={num_steps}", "train.save_every_steps=4")
    arguments = (*ARGUMENTS, *steps, *ON_RAY, f"output_dir={s3_bucket}/runs")
    url = f"{s3_bucket}/runs/small/t0"
    cluster = start_nodes()
    command = agentrl(*arguments, f"launcher.address={cluster.address}")
    wait_until(command, lambda: count_stored_steps(url) >= 3)
    cluster.lose_head()
    command.kill()
    command.communicate()
    # Trainers on the other nodes learn of it in seconds, and write no more from then on.
    assert count_stored_steps(url) < num_steps

    cluster = start_nodes()
    output = finish(agentrl(*arguments, f"launcher.address={cluster.address}"))
    assert "resuming after step" in output
    read_every_task_once(download(url, project / "runs" / "small" / "downloaded"), num_steps)
    finish(agentrl(*ARGUMENTS, *steps, "trial_name=here"))
    assert read_losses(url) == read_losses(project / "runs" / "small" / "here")


@pytest.mark.long
def test_from_a_machine_outside_the_cluster_it_is_a_job_that_outlives_the_command(
    start_nodes: Callable[..., RayNodes],
    monkeypatch: pytest.MonkeyPatch,
    project: Path,
    agentrl: Callable[..., subprocess.Popen[str]],
    finish: Callable[..., str],
    wait_until: Callable[..., Any],
    read_every_task_once: Callable[[Path, int], object],
) -> None:
    # Where ray start is typed, python is the one with agentrl.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start_nodes(0, include_dashboard=True, dashboard_port=port)
    run_dir = project / "runs" / "small" / "t0"
    arguments = (
        *("train", "--config", "experiment.yaml", "launcher.kind=ray", "train.save_every_steps=2"),
        f"launcher.address=http://127.0.0.1:{port}",
    )
    output = finish(agentrl(*arguments), 2)
    assert "output_dir: runs would be in a Ray job's copy" in output
    arguments = (*arguments, f"output_dir={project / 'runs'}", "train.total_steps=900")
    output = finish(agentrl(*arguments, "reward_fn_path=my_agent.count_vowel"), 2)
    assert "did you mean 'count_vowels'" in output

    command = agentrl(*arguments)
    wait_until(command, lambda: count_steps(run_dir) >= 2)
    command.kill()
    command.communicate()
    seen = count_steps(run_dir)
    command = agentrl(*arguments)
    assert command.stdout is not None
    assert "is in progress; this is what it has printed" in command.stdout.readline()
    wait_until(command, lambda: count_steps(run_dir) > seen + 1)
    command.send_signal(signal.SIGINT)
    output = finish(command, 130)
    assert "the same command resumes from here" in output

    num_steps = count_steps(run_dir) + 2
    output = finish(agentrl(*arguments, f"train.total_steps={num_steps}"))
    assert f"step {num_steps}/{num_steps}" in output
    read_every_task_once(run_dir, num_steps)


def test_a_run_is_placed_on_a_cluster_and_one_that_is_too_large_is_refused_in_time(
    start_nodes: Callable[..., RayNodes],
    project: Path,
    agentrl: Callable[..., subprocess.Popen[str]],
    finish: Callable[..., str],
    read_every_task_once: Callable[[Path, int], object],
) -> None:
    # Ray would copy it to the nodes, and wait for ever for something to read.
    os.mkfifo(project / "pipe")
    cluster = start_nodes(0)
    placed = ("launcher.kind=ray", f"launcher.address={cluster.address}", "train.num_processes=1")
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in finish(agentrl(*ARGUMENTS, *placed))
    read_every_task_once(project / "runs" / "small" / "t0", NUM_STEPS)
    launcher = f"{{kind: ray, address: '{cluster.address}', placement_timeout_seconds: 2}}"
    large = ("trial_name=large", "train.num_processes=64", f"launcher={launcher}")
    output = finish(agentrl(*ARGUMENTS, *large), 2)
    assert "waiting for room on the cluster for 64 x trainer with CPU: 1" in output
    assert "after 2 s (launcher.placement_timeout_seconds) the cluster has no room" in output
    assert "nodes:" in output
    assert "train.num_processes" in output


def test_a_cluster_that_does_not_answer_is_named(
    project: Path, agentrl: Callable[..., subprocess.Popen[str]], finish: Callable[..., str]
) -> None:
    pytest.importorskip("ray", reason="needs Ray (extra ray)")
    output = finish(agentrl(*ARGUMENTS, "launcher={kind: ray, address: '127.0.0.1:9'}"), 2)
    assert "launcher.address: nothing answers at 127.0.0.1:9" in output
    assert "ray start --head" in output
