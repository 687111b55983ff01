"""A run on a Ray cluster of several nodes, which are raylets of this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl_cli.store.run_folder import RunFolder

NUM_STEPS = 6
ARGUMENTS = (
    *("train", "--config", "experiment.yaml", f"train.total_steps={NUM_STEPS}"),
    *("train.save_every_steps=2", "rollout.max_staleness=0", "train.num_processes=2"),
)
METRICS = ("loss", "grad_norm", "reward_mean", "completion_tokens_mean")
PROGRAM = "agentrl_cli.launch.processes.trainer_program"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


class NodesForTests:
    """A head, and two nodes on which trainers may be."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        common = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **common})
        self.address: str = self._cluster.address
        self._nodes = [
            self._cluster.add_node(num_cpus=2, resources={"trains": 2}, **common) for _ in range(2)
        ]

    def lose_node_of(self, process: psutil.Process) -> None:
        """Kills the node that a process is on, and all that is on it, at once."""
        above = {parent.pid for parent in process.parents()}
        [node] = [one for one in self._nodes if one.all_processes["raylet"][0].process.pid in above]
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[NodesForTests]:
    pytest.importorskip("ray", reason="needs Ray (extra ray)")
    # On two cores that do something else besides.
    os.environ |= {
        "RAY_raylet_start_wait_time_s": "240",
        "RAY_num_prestart_python_workers": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    nodes = NodesForTests()
    yield nodes
    nodes.close()


def count_steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def find_rank(index: int) -> psutil.Process | None:
    """The process of a rank, not the process reaper before it."""
    for process in psutil.process_iter():
        try:
            is_rank = process.cmdline()[2:3] == [PROGRAM]
            if is_rank and process.environ()["RANK"] == str(index):
                return process
        except psutil.Error:
            continue
    return None


def test_a_lost_node_changes_nothing_of_what_is_learned(
    cluster: NodesForTests,
    project: Path,
    agentrl: Callable[..., subprocess.Popen[str]],
    finish: Callable[..., str],
    wait_until: Callable[..., Any],
    read_every_task_once: Callable[[Path, int], object],
) -> None:
    on_ray = (
        *("launcher.kind=ray", f"launcher.address={cluster.address}"),
        "launcher.resources={trainer: {trains: 1}}",
    )
    run_dir = project / "runs" / "small" / "spread"
    command = agentrl(*ARGUMENTS, *on_ray, "trial_name=spread")
    wait_until(command, lambda: count_steps(run_dir) >= 3)
    struck = wait_until(command, lambda: find_rank(0))
    cluster.lose_node_of(struck)
    output = finish(command)
    assert "the trainer was lost: its node" in output
    assert "it is started again (restart 1 of 3)" in output
    read_every_task_once(run_dir, NUM_STEPS)
    assert "trainer starts" in (run_dir / "logs" / "trainer.log").read_text()

    finish(agentrl(*ARGUMENTS, "trial_name=here"))
    lines = [RunFolder.open(run_dir.parent / trial).read_metrics() for trial in ("spread", "here")]
    for found, expected in zip(*lines, strict=True):
        assert [found[name] for name in METRICS] == [expected[name] for name in METRICS]


def test_a_cluster_that_is_too_small_is_told_in_time(
    cluster: NodesForTests,
    project: Path,
    agentrl: Callable[..., subprocess.Popen[str]],
    finish: Callable[..., str],
) -> None:
    # Ray would copy it to the nodes, and wait for ever for something to read.
    os.mkfifo(project / "pipe")
    launcher = f"{{kind: ray, address: '{cluster.address}', placement_timeout_seconds: 2}}"
    output = finish(agentrl(*ARGUMENTS, "train.num_processes=64", f"launcher={launcher}"), 2)
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
