"""Real vLLM servers, ranks and rollout workers on the nodes of a Ray cluster; a server is killed,
and a node lost."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl_cli.models.builtin_models import resolve_cache_folder
from agentrl_cli.store.run_folder import RunFolder
from tests.e2e.ray_nodes import RayNodes

ROOT = Path(__file__).parents[3]
BATCH_SIZE, NUM_SAMPLES = 4, 4
SERVER, TRAINER = "agentrl_vllm_start", "agentrl_cli.launch.processes.trainer_program"

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayNodes]:
    pytest.importorskip("ray", reason="needs Ray (extra ray)")
    # Its built-in model would be made anew on each node.
    cache = resolve_cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    (tmp_path / "nodes").mkdir()
    nodes = RayNodes({"num_cpus": 4}, tmp_path / "nodes", [cache])
    for _ in range(2):
        nodes.add(num_cpus=4, resources={"serves": 2, "samples": 2})
    yield nodes
    nodes.close()


def start(project: Path, cluster: RayNodes, *settings: str) -> subprocess.Popen[bytes]:
    config = ROOT / "configs" / "quickstart-vllm.yaml"
    with (project / "output.txt").open("a") as output:
        return subprocess.Popen(
            list_words(config, cluster, *settings), cwd=ROOT, stdout=output, stderr=output
        )


def list_words(config: Path, cluster: RayNodes, *settings: str) -> list[str]:
    return [
        *(sys.executable, "-m", "agentrl_cli", "train", "--config", str(config)),
        *("launcher.kind=ray", f"launcher.address={cluster.address}"),
        "launcher.resources={engine: {serves: 1}, rollout: {samples: 1}}",
        *(f"train_dataset.batch_size={BATCH_SIZE}", f"gconfig.n_samples={NUM_SAMPLES}"),
        *("valid_dataset=null", "rollout.max_staleness=0", "train.save_every_steps=5"),
        *("rollout.num_workers=2", "train.num_processes=2", "engine.num_threads=1"),
        *settings,
    ]


def find(word: str) -> list[psutil.Process]:
    """Processes started with this module, not the reapers before them."""
    return [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[2:3] == [word]]


def test_a_killed_server_and_one_of_a_lost_node_serve_again(
    cluster: RayNodes, tmp_path: Path
) -> None:
    run_dir, output = tmp_path / "runs" / "quickstart-vllm" / "t0", tmp_path / "output.txt"
    where = f"output_dir={tmp_path / 'runs'}"
    command = start(tmp_path, cluster, where, "train.total_steps=400")

    def wait_for(condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 600
        while not condition():
            assert command.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.2)

    def read_metrics() -> list[dict[str, float]]:
        return RunFolder.open(run_dir).read_metrics() if run_dir.is_dir() else []

    def count_recoveries() -> float:
        return sum(line["server_recoveries"] for line in read_metrics())

    try:
        wait_for(lambda: len(read_metrics()) >= 3)
        find(SERVER)[0].kill()
        wait_for(lambda: output.read_text().count("is ready after") == 3)
        wait_for(lambda: count_recoveries() >= 1)
        # With its server, and its rollout worker.
        cluster.lose_node_of(find(SERVER)[0])
        wait_for(lambda: output.read_text().count("is ready after") == 4)
        wait_for(lambda: count_recoveries() >= 2)
        command.send_signal(signal.SIGINT)
        assert command.wait(300) == 130
        text = output.read_text()
        assert re.search(r"vllm-\d is started again, on", text)
        assert re.search(r"rollout-\d is started again: ", text)
        num_steps = len(read_metrics())

        command = start(tmp_path, cluster, where, f"train.total_steps={num_steps + 2}")
        assert command.wait(600) == 0, output.read_text()
        assert f"resuming after step {num_steps}" in output.read_text()
        folder = RunFolder.open(run_dir)
        made = [folder.list_trajectories(step) for step in range(1, num_steps + 3)]
        assert {len(of_step) for of_step in made} == {BATCH_SIZE * NUM_SAMPLES}
        assert len({one.id for of_step in made for one in of_step}) == len(made) * len(made[0])
        assert not find(SERVER)
        assert not find(TRAINER)
    finally:
        command.kill()
        command.wait()
