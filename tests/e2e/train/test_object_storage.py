"""A run whose folder is on object storage: killed, cut off from it, and resumed elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl_cli.store.run_folder import RunFolder
from tests.e2e.train.run_progress import count_stored_steps, download, find_rank, read_losses

NUM_STEPS = 8
ARGUMENTS = (
    "train",
    "--config",
    "experiment.yaml",
    f"train.total_steps={NUM_STEPS}",
    "train.save_every_steps=3",
    "rollout.max_staleness=0",
)
IN_ORDER = ("rollout.max_concurrent=1", "train.num_threads=1", "engine.num_threads=1")
#: ``agentrl``, with less patience.
PROGRAM = """
import sys
from agentrl_cli.store.remote import lease, remote_files
lease.RENEW_SECONDS, lease.TRUST_SECONDS, lease.TAKEOVER_SECONDS = 0.5, 6.0, 8.0
remote_files.PATIENCE_SECONDS = float(sys.argv.pop(1))
from agentrl_cli.__main__ import main
sys.exit(main())
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def start(project: Path, s3_bucket: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``agentrl ARGS`` in a folder of its own, as another machine would have it."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, patience: float = 60.0) -> subprocess.Popen[str]:
        folder = project / f"machine-{len(started)}"
        (folder / "tmp").mkdir(parents=True)
        for name in ("my_agent.py", "rows.jsonl", "experiment.yaml"):
            shutil.copy(project / name, folder)
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(patience), *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_killed_and_cut_off_it_is_the_run_that_nobody_disturbed(
    project: Path,
    s3_bucket: str,
    s3_server: Any,
    start: Callable[..., subprocess.Popen[str]],
    finish: Callable[..., str],
    wait_until: Callable[..., Any],
    read_every_task_once: Callable[[Path, int], object],
) -> None:
    arguments = (*ARGUMENTS, *IN_ORDER, f"output_dir={s3_bucket}/runs")
    url = f"{s3_bucket}/runs/small/t0"
    killed = start(*arguments)
    wait_until(killed, lambda: count_stored_steps(url) >= 1)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert 1 <= count_stored_steps(url) < NUM_STEPS

    cut_off = start(*arguments, patience=3.0)
    seen = count_stored_steps(url)
    wait_until(cut_off, lambda: count_stored_steps(url) > seen)
    s3_server.stop()
    try:
        output = finish(cut_off, 1)
    finally:
        s3_server.start()
    assert f"error: {url}: " in output
    assert "type the same command: the run resumes from its last checkpoint" in output

    output = finish(start(*arguments))
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in output
    assert f"agentrl inspect-trajectories {url}" in output
    assert f"--checkpoint {url}/checkpoints/step-{NUM_STEPS:06d}" in output
    assert "agentrl-run" not in output
    copy = download(url, project / "runs" / "small" / "downloaded")
    read_every_task_once(copy, NUM_STEPS)
    assert not (copy / "pending").exists()
    assert not (copy / ".lock").exists()
    log = (copy / "logs" / "trainer.log").read_text()
    assert "cannot be" not in log

    finish(start(*ARGUMENTS, *IN_ORDER, f"output_dir={project}/local"))
    assert read_losses(url) == read_losses(project / "local" / "small" / "t0")

    look = json.loads(finish(start("inspect-trajectories", url, "--json")))
    assert look["run"] == url
    assert [step["step"] for step in look["steps"]] == list(range(1, NUM_STEPS + 1))
    finish(start("export", url, "--to", str(project / "model")))
    assert (project / "model" / "config.json").is_file()
    finish(start("export-trajectories", url, "--to", str(project / "best.jsonl")))
    checkpoint = f"{url}/checkpoints/step-{NUM_STEPS:06d}"
    measure = ("eval", "--config", "experiment.yaml", "--checkpoint", checkpoint, "--limit", "2")
    finish(start(*measure, f"output_dir={s3_bucket}/runs"))
    assert RunFolder.open(url).list_evals() == [(0, f"checkpoint-step-{NUM_STEPS:06d}")]

    compare = ("compare", "base", url, "--limit", "2", "--html", "page.html")
    assert "was evaluated before" not in finish(start(*compare))
    labels = [label for _, label in RunFolder.open(url).list_evals()]
    again = finish(start(*compare, f"{url}/{labels[0]}"))
    assert again.count("was evaluated before") == 2
    assert "written: page.html" in again


@pytest.mark.long
def test_trainer_processes_write_there_for_their_command(
    project: Path,
    s3_bucket: str,
    start: Callable[..., subprocess.Popen[str]],
    finish: Callable[..., str],
    wait_until: Callable[..., Any],
    read_every_task_once: Callable[[Path, int], object],
) -> None:
    url = f"{s3_bucket}/runs/small/t0"
    command = start(*ARGUMENTS, f"output_dir={s3_bucket}/runs", "train.num_processes=2")
    wait_until(command, lambda: count_stored_steps(url) >= 1)
    below = psutil.Process(command.pid).children
    wait_until(command, lambda: find_rank(below(recursive=True), 0)).kill()
    assert "it is started again (restart 1" in finish(command)
    copy = download(url, project / "runs" / "small" / "downloaded")
    read_every_task_once(copy, NUM_STEPS)
    assert {"command.log", "trainer.log", "trainer-1.log"} <= {
        path.name for path in (copy / "logs").iterdir()
    }


def test_what_cannot_be_used_is_refused_before_anything_is_started(
    start: Callable[..., subprocess.Popen[str]], finish: Callable[..., str]
) -> None:
    for output_dir in ("s3://no-such-bucket/runs", "s5://bucket/runs"):
        output = finish(start(*ARGUMENTS, f"output_dir={output_dir}"), 2)
        assert "error: " in output
        assert "s3://BUCKET/FOLDER" in output
