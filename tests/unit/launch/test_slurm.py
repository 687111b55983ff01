"""The script of a Slurm job: it is valid, quotes what was typed, and passes signals on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import UserInputError
from agentrl_cli.launch.slurm import SlurmJob, format_sbatch

Write = Callable[..., str]

#: Stand for the programs of a node: each writes down what it was called with.
PROGRAM = '#!/bin/bash\nprintf "%s\\n" "${0##*/}" "$@" >> calls\n'
#: The run, which takes its time to end when it is asked to.
RUN = f"""{PROGRAM}
trap 'echo saved >> calls; is_ending=yes' TERM
touch up
until [ "$is_ending" ]; do sleep 0.05; done
sleep 0.3
exit 143
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """The script of a job in a folder with a space in its name."""
    folder = tmp_path / "my runs"
    folder.mkdir()

    def write_script(
        kind: str, num_nodes: int, gpus_per_node: int = 0, *, typed: Any = (), **changes: Any
    ) -> str:
        config = ExperimentConfig.model_validate(
            {
                "experiment_name": "exp",
                "model": {"path": "./tiny"},
                "agent_builder_path": "own_agent.py:build",
                "train_dataset": {"path": "rows.jsonl"},
                "launcher": {"kind": kind},
                **changes,
            }
        )
        job = SlurmJob(num_nodes=num_nodes, gpus_per_node=gpus_per_node, time="1:00:00")
        arguments = ["train", "--config", "it.yaml", *typed]
        script = format_sbatch(config, job, arguments, folder=folder, bin_dir=tmp_path / "bin")
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        return script

    return write_script


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a script where ``agentrl`` or ``torchrun`` is a run that takes its time."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    programs = {"agentrl": RUN, "torchrun": RUN, "srun": PROGRAM + "sleep 10\n"}
    for name, text in {**programs, "scontrol": PROGRAM}.items():
        (bin_dir / name).write_text(text)
        (bin_dir / name).chmod(0o755)

    def start_script(script: str) -> subprocess.Popen[str]:
        slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_CPUS_ON_NODE": "4"}
        process = subprocess.Popen(
            ["bash", "-c", script], env={**os.environ, **slurm}, text=True, start_new_session=True
        )
        deadline = time.monotonic() + 30
        while not (tmp_path / "my runs" / "up").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return process

    return start_script


@pytest.mark.parametrize("kind", ["local", "torchrun"])
@pytest.mark.parametrize(("number", "requeues"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_run_is_asked_to_end_and_goes_back_into_the_queue_only_for_want_of_time(
    write: Write, start: Any, tmp_path: Path, kind: str, number: signal.Signals, requeues: bool
) -> None:
    typed = ["agent_builder_kwargs={a: 'x $HOME y'}"]
    process = start(write(kind, 1 if kind == "local" else 2, typed=typed))
    # As Slurm does: USR1 goes to the script alone, TERM to all processes.
    (os.kill if requeues else os.killpg)(process.pid, number)
    assert process.wait(30) == 143
    with suppress(ProcessLookupError):
        # As Slurm ends what a script leaves behind.
        os.killpg(process.pid, signal.SIGKILL)
    calls = (tmp_path / "my runs" / "calls").read_text().splitlines()
    assert typed[0] in calls
    # Once: a second signal would end the run at once.
    assert (calls.count("saved"), "scontrol" in calls) == (1, requeues)
    if requeues:
        assert calls[-3:] == ["scontrol", "requeue", "7"]


def test_servers_leave_their_gpus_of_the_first_node(write: Write) -> None:
    engine = {"kind": "vllm", "num_servers": 2, "tensor_parallel_size": 2}
    script = write("torchrun", 3, 8, engine=engine)
    assert script.count("--nproc-per-node=4 ") == script.count("--nproc-per-node=8 ") == 1
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert "#SBATCH --job-name=exp-t0\n" in script


def test_ray_is_started_before_the_command(write: Write) -> None:
    script = write("ray", 2, 8)
    order = ["ray start --head", "ray start --address=", "until [", "agentrl train --config"]
    places = [script.index(text) for text in order]
    assert places == sorted(places)
    assert "ray start" not in write("ray", 1, 8)


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("local", {}, "launcher.kind=torchrun or launcher.kind=ray, or --nodes 1"),
        ("torchrun", {"train": {"num_processes": 5}}, "come to 3 ranks"),
        ("torchrun", {"engine": {"kind": "vllm", "num_servers": 3}}, "Type --gpus-per-node 4"),
    ],
)
def test_nodes_that_do_not_fit_are_refused(
    write: Write, kind: str, changes: Any, expected: str
) -> None:
    with pytest.raises(UserInputError) as caught:
        write(kind, 2, 2, **changes)
    assert expected in str(caught.value)
