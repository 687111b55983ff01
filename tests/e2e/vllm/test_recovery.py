"""SIGKILL for everything of a run on real vLLM: it goes on, nothing is lost, nothing done twice."""

from __future__ import annotations

import json
import os
import random
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
import yaml

from benchmarks.kills_and_stops import read_every_task_once

ROOT = Path(__file__).parents[3]
NUM_ROWS, BATCH_SIZE, NUM_SAMPLES, NUM_STEPS = 20, 4, 4, 40
#: ``rollout.max_trajectory_age``.
MAX_AGE = 8

#: Notes in a file which calls it has open, so that the test can strike in the middle of them, and
#: pauses for as long as another file says, so that the steps last longer than the strikes do.
AGENT = """
import asyncio
import os
from pathlib import Path

calls = Path(f"calls-{os.getpid()}").open("a")


async def answer(data, client):
    messages = [{"role": "user", "content": data["question"]}]
    for _ in range(data["num_turns"]):
        await asyncio.sleep(float(Path("pause").read_text()))
        calls.write("+")
        calls.flush()
        reply = await client.chat.completions.create(model="policy", messages=messages)
        calls.write("-")
        calls.flush()
        message = reply.choices[0].message
        messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "More."}]
    return message.content


def build():
    return answer


def count_vowels(completions, **kwargs):
    return sum(letter in "aeiou" for letter in completions) / max(len(completions), 1)
"""


class Command:
    """``agentrl train`` in a user's folder, and the processes below it."""

    def __init__(self, project: Path, *settings: str) -> None:
        self._project = project
        self._output = project / "output.txt"
        with self._output.open("ab") as output:
            self._command = subprocess.Popen(
                [sys.executable, "-m", "agentrl_cli", "train", "--config", "c.yaml", *settings],
                cwd=project,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
            )
        self.run_dir = project / "runs" / "small" / "t0"
        self.set_pause(0.0)

    def set_pause(self, seconds: float) -> None:
        """Agents wait so long before each call."""
        (self._project / "pause.new").write_text(str(seconds))
        (self._project / "pause.new").rename(self._project / "pause")

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def pid(self) -> int:
        return self._command.pid

    def processes(self) -> list[psutil.Process]:
        """Everything that the command has started and that lives."""
        try:
            found = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [p for p in found if is_alive(p)]

    def find(self, kind: str) -> list[psutil.Process]:
        """Processes of a kind: ``trainer``, ``rank`` (a further one), ``server``, ``core`` (of a
        server), ``reaper``."""
        return [p for p in self.processes() if classify(p) == kind]

    def count_steps(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.is_file() else 0

    def has_stepped_since(self, moment_ns: int) -> bool:
        """True when a line of metrics was added (a trainer that starts cuts lines off)."""
        path = self.run_dir / "metrics.jsonl"
        return path.stat().st_mtime_ns > moment_ns and self.count_steps() > self._count_saved()

    def _count_saved(self) -> int:
        """Steps of the last checkpoint, from which a trainer that starts resumes."""
        saved = (self.run_dir / "checkpoints").glob("step-*")
        return max((int(path.name[5:]) for path in saved), default=0)

    def wait_until(self, condition: Callable[[], Any], seconds: float = 400.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self._command.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def wait_for_calls(self, killed: psutil.Process, num_calls: int) -> None:
        """Returns while the agents in another trainer have at least so many calls open."""

        def has_calls(trainer: psutil.Process) -> bool:
            path = self._project / f"calls-{trainer.pid}"
            text = path.read_text() if path.is_file() else ""
            return text.count("+") - text.count("-") >= num_calls

        # What a killed trainer has just forked may pass for one, and has no calls.
        self.wait_until(lambda: any(has_calls(p) for p in self.find("trainer") if p != killed))

    def kill(self) -> None:
        self._command.kill()
        self._command.wait()

    def finish(self, seconds: float) -> int:
        try:
            return self._command.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds:g} s:\n{self.output}")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def classify(process: psutil.Process) -> str:
    try:
        command, parent = process.cmdline(), process.parent()
        if any(part.endswith("process_reaper.py") for part in command):
            return "reaper"
        if parent is not None and parent.cmdline() == command:
            # Just forked, to become something else.
            return "other"
        if "agentrl_cli.launch.processes.trainer_program" in command:
            return "trainer" if process.environ()["RANK"] == "0" else "rank"
    except psutil.NoSuchProcess:
        return "gone"
    if "agentrl_vllm_start" in command:
        return "server"
    # The engine's core has no command line of its own; beside it is a tracker of resources.
    is_tracker = any("resource_tracker" in part for part in command)
    is_below_server = parent is not None and classify(parent) == "server"
    return "core" if is_below_server and not is_tracker else "other"


def strike(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


@pytest.fixture
def project(tmp_path: Path, untied_folder: Path) -> Path:
    """The folder of a user who trains a tiny model on two servers."""
    (tmp_path / "my_agent.py").write_text(AGENT)
    rows = [{"question": f"Say {n}.", "num_turns": 1 + n % 3} for n in range(NUM_ROWS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {
        "experiment_name": "small",
        "model": {"path": str(untied_folder), "dtype": "float32"},
        "agent_builder_path": "my_agent.build",
        "reward_fn_path": "my_agent.count_vowels",
        "gconfig": {"n_samples": NUM_SAMPLES, "max_tokens": 48},
        "train_dataset": {"path": "rows.jsonl", "batch_size": BATCH_SIZE},
        "engine": {
            "kind": "vllm",
            "num_servers": 2,
            "device": "cpu",
            "max_model_len": 512,
            "max_num_seqs": 32,
            "num_threads": 1,
            "cpu_kv_cache_gib": 0.25,
            "max_restarts": 40,
        },
        "launcher": {"max_trainer_restarts": 40},
        "rollout": {"max_concurrent": 16, "max_staleness": 1, "timeout_seconds": 900},
        "train": {"total_steps": NUM_STEPS, "learning_rate": 1e-3, "save_every_steps": 3},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


@pytest.fixture
def start(project: Path) -> Iterator[Callable[..., Command]]:
    """Starts the command; nothing of it outlives the test."""
    commands: list[Command] = []

    def start_command(*settings: str) -> Command:
        commands.append(Command(project, *settings))
        return commands[-1]

    yield start_command
    for command in commands:
        command.kill()


def check_nothing_is_lost(run_dir: Path, num_steps: int = NUM_STEPS) -> None:
    """One line a step, every task of every step once, no failure, no version out of place."""
    steps = read_every_task_once(run_dir, num_steps, batch_size=BATCH_SIZE, num_samples=NUM_SAMPLES)
    for step, trajectories in enumerate(steps, start=1):
        assert [t.failure for t in trajectories] == [None] * len(trajectories)
        assert [len(t.interactions) for t in trajectories] == [
            1 + int(t.task_id) % 3 for t in trajectories
        ]
        versions = {v for t in trajectories for i in t.interactions for v in i.versions}
        assert versions <= set(range(step - 1 - MAX_AGE, step))


def kill_a_trainer_and_then_a_server_with_calls(command: Command) -> None:
    """Between them the servers live on, and the new trainer has calls open on them."""
    started = command.count_steps()
    command.wait_until(lambda: command.count_steps() >= started + 3)
    servers = {p.pid for p in command.find("server")}
    [trainer] = command.find("trainer")
    strike(trainer)
    command.wait_for_calls(trainer, 6)
    assert {p.pid for p in command.find("server")} == servers
    strike(command.find("server")[0])
    assert "the trainer was killed by SIGKILL; it is started again" in command.output
    log = command.run_dir / "logs" / "trainer.log"
    pattern = r"engine server vllm-\d is unhealthy \((\d+) calls were running on it\)"
    command.wait_until(lambda: re.search(pattern, log.read_text()))
    num_calls = re.findall(pattern, log.read_text())[0]
    assert int(num_calls) > 1, "no further call was open: the test shows nothing"


def kill_at_random(command: Command, num_rounds: int, num_steps: int) -> None:
    """Nine processes a round, trainers most of all: a server takes long to come back."""
    chance = random.Random(7)
    kinds = ["trainer"] * 4 + ["server"] * 2 + ["core"] + ["reaper"] * 2
    kinds *= num_rounds
    chance.shuffle(kinds)
    command.set_pause(2.0)
    killed: list[str] = []
    for number, kind in enumerate(kinds):
        if number % 3 == 2:
            # While the run works: a step is done since the last kill, and so the next goes on.
            seen = (command.run_dir / "metrics.jsonl").stat().st_mtime_ns
            command.wait_until(lambda seen=seen: command.has_stepped_since(seen))
            time.sleep(chance.uniform(0.0, 4.0))
        else:
            # Whatever it falls on: a trainer's imports, a server's start, a publication.
            time.sleep(chance.uniform(0.0, 12.0))
        command.wait_until(lambda kind=kind: command.find(kind))
        strike(chance.choice(command.find(kind)))
        killed.append(kind)
        assert command.count_steps() < num_steps, f"the run was over after {killed}"
    command.set_pause(0.0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("num_rounds", "num_steps"), [(1, NUM_STEPS), pytest.param(2, 60, marks=pytest.mark.long)]
)
def test_the_command_is_killed_and_then_many_of_its_processes_and_nothing_is_lost(
    num_rounds: int, num_steps: int, start: Callable[..., Command]
) -> None:
    total = f"train.total_steps={num_steps}"
    command = start(total)
    command.wait_until(lambda: command.count_steps() >= 1)
    everything = command.processes()
    assert {classify(p) for p in everything} >= {"trainer", "server", "core", "reaper"}
    command.kill()
    _, alive = psutil.wait_procs(everything, timeout=20)
    assert [p for p in alive if is_alive(p)] == []

    command = start(total)
    kill_a_trainer_and_then_a_server_with_calls(command)
    kill_at_random(command, num_rounds, num_steps)
    everything = command.processes()
    assert command.finish(1800) == 0, command.output
    assert [p for p in everything if is_alive(p)] == []
    check_nothing_is_lost(command.run_dir, num_steps)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_either_of_two_trainers_is_killed_and_nothing_is_lost(
    start: Callable[..., Command],
) -> None:
    command = start("train.num_processes=2", "engine.num_servers=1", "train.total_steps=8")
    for kind, num_steps in (("rank", 2), ("trainer", 5)):
        command.wait_until(lambda n=num_steps: command.count_steps() >= n)
        servers = {p.pid for p in command.find("server")}
        command.wait_until(lambda: command.find("rank") and command.find("trainer"))
        both = {p.pid for kind in ("rank", "trainer") for p in command.find(kind)}
        strike(command.find(kind)[0])
        command.wait_until(
            lambda both=both: not both & {p.pid for p in command.processes()}, seconds=60.0
        )
        assert {p.pid for p in command.find("server")} == servers
    everything = command.processes()
    command.set_pause(0.0)
    assert command.finish(600) == 0, command.output
    assert [p for p in everything if is_alive(p)] == []
    assert "SIGKILL in rank 1 of 2 (trainer-1); it is started again (restart 1" in command.output
    assert "the trainer was killed by SIGKILL; it is started again (restart 2" in command.output
    check_nothing_is_lost(command.run_dir, num_steps=8)
