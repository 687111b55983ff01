"""What random SIGKILLs and SIGSTOPs do to runs: ``python -m benchmarks.kills_and_stops``.

Writes docs/results/kills-and-stops.md. In each scenario ``agentrl train`` trains a tiny model while
processes of the run, any of them, are killed or stopped at random moments; the command is typed
again whenever it was struck. Runs follow each other until all strikes were made, and each is
checked when it has ended: every task once, no process left, no file left in the temporary
folders, a checkpoint that loads, and where that is promised the losses of a run that nobody struck.
``--scenario NAME`` runs one, and leaves what the page says of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from transformers import AutoModelForCausalLM

from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.dataset import TaskStream
from agentrl_cli.store.run_folder import RunFolder
from benchmarks.weight_verification import save_tiny_model

_PAGE = Path("docs/results/kills-and-stops.md")
_ROOT = Path(__file__).parents[1]
_NUM_STEPS = 12
#: Longer than a run of any scenario takes that nobody strikes.
_MAX_RUN_SECONDS = 900.0
#: A stopped process is let go on after so long at most.
_MAX_STOP_SECONDS = 15.0
#: How long a strike waits for a command that was just typed to have processes.
_MAX_START_SECONDS = 20.0
_METRICS = ("loss", "grad_norm", "reward_mean", "completion_tokens_mean")
_AGENT = '''\
async def answer(data, client):
    messages = [{"role": "user", "content": data["question"]}]
    for _ in range(data["num_turns"]):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        message = reply.choices[0].message
        messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "More."}]
    return message.content


def build():
    return answer


def score(completions, **kwargs):
    """Blocking: it runs in a reward worker."""
    return sum(letter in "aeiou" for letter in completions) / max(len(completions), 1)


async def score_here(completions, **kwargs):
    return score(completions)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A kind of run, and what of it is struck how often."""

    settings: Mapping[str, Any]
    num_kills: int
    num_stops: int
    command_share: float
    """Of the strikes, so many fall on the command itself; the others on any process below it."""
    tolerance: float | None = None
    """How far the losses may be from those of a run that nobody struck, relatively; None: what is
    sampled depends on the machine's timing."""
    max_pause_seconds: float = 12.0
    """Between two strikes."""


_IN_ORDER = {"rollout.max_concurrent": 1, "train.num_threads": 1, "engine.num_threads": 1}
_SCENARIOS = {
    "embedded": Scenario(
        settings={"reward_fn_path": "my_agent.score_here", **_IN_ORDER},
        num_kills=40,
        num_stops=4,
        command_share=1.0,
        tolerance=0.0,
    ),
    "reward workers": Scenario(settings={}, num_kills=15, num_stops=4, command_share=0.2),
    "subprocess agents": Scenario(
        settings={"rollout.agent_mode": "subprocess", "rollout.subprocess.max_processes": 2},
        num_kills=15,
        num_stops=4,
        command_share=0.2,
    ),
    "two ranks": Scenario(
        settings={"train.num_processes": 2, **_IN_ORDER},
        num_kills=15,
        num_stops=4,
        command_share=0.2,
        tolerance=1e-3,
        max_pause_seconds=20.0,
    ),
    "vLLM": Scenario(
        settings={"engine.kind": "vllm", "engine.num_servers": 2, "engine.device": "cpu"},
        num_kills=15,
        num_stops=4,
        command_share=0.2,
        max_pause_seconds=40.0,
    ),
}


@dataclass(slots=True)
class Findings:
    """What a scenario showed."""

    struck: Counter[str] = field(default_factory=Counter)
    """How often, by what was done to which program."""
    num_runs: int = 0
    num_trajectories: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Of trajectories whose agent or reward function was killed, by boundary and cause."""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def write_project(folder: Path, settings: Mapping[str, Any]) -> None:
    """The user's folder."""
    save_tiny_model(folder / "model")
    (folder / "my_agent.py").write_text(_AGENT)
    rows = [{"question": f"Say {n}.", "num_turns": 1 + n % 3} for n in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config: dict[str, Any] = {
        "experiment_name": "struck",
        "model": {"path": "model", "dtype": "float32"},
        "agent_builder_path": "my_agent.build",
        "reward_fn_path": "my_agent.score",
        "gconfig": {"n_samples": 3, "max_tokens": 16},
        "train_dataset": {"path": "rows.jsonl", "batch_size": 2},
        "engine": {"kind": "embedded", "max_model_len": 512, "max_restarts": 1000},
        "launcher": {"max_trainer_restarts": 1000},
        "rollout": {"max_staleness": 0},
        "train": {"total_steps": _NUM_STEPS, "learning_rate": 1e-3, "save_every_steps": 3},
    }
    if settings.get("engine.kind") == "vllm":
        config["engine"] |= {"cpu_kv_cache_gib": 0.25, "num_threads": 1, "max_num_seqs": 32}
    for key, value in settings.items():
        *path, last = key.split(".")
        place = config
        for name in path:
            place = place[name]
        place[last] = value
    (folder / "c.yaml").write_text(yaml.safe_dump(config))


class StruckRun:
    """``agentrl train`` of one trial, typed again whenever it ended by a strike."""

    def __init__(self, project: Path, trial: str) -> None:
        self._project, self._trial = project, trial
        self.run_dir = project / "runs" / "struck" / trial
        self._output = project / f"{trial}.txt"
        self._seen: dict[tuple[int, float], psutil.Process] = {}
        self._was_struck = False
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "agentrl_cli", "train", "--config", "c.yaml"]
        scratch = self._project / "tmp"
        scratch.mkdir(exist_ok=True)
        environment = {"PYTHONPATH": str(_ROOT), "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
        with self._output.open("ab") as output:
            self._command = psutil.Popen(
                [*command, f"trial_name={self._trial}"],
                cwd=self._project,
                env=os.environ | environment,
                stdout=output,
                stderr=output,
            )
        self._was_struck = False

    @property
    def output(self) -> str:
        return self._output.read_text()

    def find_processes(self) -> list[psutil.Process]:
        """All that the command has started and that lives."""
        try:
            found = [p for p in self._command.children(recursive=True) if is_alive(p)]
        except psutil.NoSuchProcess:
            return []
        self._seen |= {(p.pid, p.create_time()): p for p in found if is_alive(p)}
        return found

    def has_ended(self) -> bool:
        """True when it is done, or cannot go on; a command that was killed is typed again."""
        if self._command.poll() is None:
            return False
        if self._was_struck and self._command.returncode:
            self._start()
            return False
        return True

    def strike(self, chance: random.Random, signal_number: int, command_share: float) -> str:
        """Kills or stops one of its processes; what it was."""
        self._was_struck = True
        victim, name = self._command, "the command"
        if chance.random() >= command_share and (kinds := self._wait_for_processes()):
            name = chance.choice(sorted(kinds))
            victim = chance.choice(kinds[name])
        if not is_alive(victim):
            victim, name = self._command, "the command"
        try:
            victim.send_signal(signal_number)
        except psutil.NoSuchProcess:
            return "a process that had just ended"
        if signal_number == signal.SIGSTOP:
            time.sleep(chance.uniform(0.5, _MAX_STOP_SECONDS))
            if is_alive(victim):
                victim.send_signal(signal.SIGCONT)
        return name

    def _wait_for_processes(self) -> dict[str, list[psutil.Process]]:
        """The processes below the command by their names; a command just typed has none yet."""
        kinds: dict[str, list[psutil.Process]] = {}
        ends = time.monotonic() + _MAX_START_SECONDS
        while not kinds and self._command.poll() is None and time.monotonic() < ends:
            for process in self.find_processes():
                kinds.setdefault(name_program(process), []).append(process)
            time.sleep(0.05)
        kinds.pop("gone", None)
        return kinds

    def wait(self) -> int:
        """The exit code of the last command.

        Raises:
            TimeoutError: it is still running.
        """
        ends = time.monotonic() + _MAX_RUN_SECONDS
        while not self.has_ended():
            if time.monotonic() > ends:
                raise TimeoutError(f"{self._trial} is still running:\n{self.output}")
            self.find_processes()
            time.sleep(0.1)
        return int(self._command.returncode)

    def find_orphans(self) -> list[str]:
        """Its processes that live on; a moment is theirs to notice that it ended."""
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=15)
        return [name_program(p) for p in alive if is_alive(p)]

    def kill(self) -> None:
        for process in [self._command, *self._seen.values()]:
            if is_alive(process):
                process.kill()


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def name_program(process: psutil.Process) -> str:
    """What the process is, by the words of its command line."""
    try:
        words = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "gone"
    for part, name in (
        ("process_reaper.py", "process reaper"),
        ("trainer_program", "trainer"),
        ("agentrl_vllm_start", "vLLM server"),
        ("worker_program", "agent worker"),
        ("resource_tracker", "resource tracker"),
        ("forkserver", "fork server"),
        ("multiprocessing", "reward worker"),
        ("VLLM", "vLLM engine core"),
    ):
        if part in words:
            return name
    return "another process"


def find_shared_memory() -> set[str]:
    """Names in /dev/shm of this user."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.lstat().st_uid == os.getuid()}


def read_every_task_once(
    run_dir: Path, num_steps: int, *, batch_size: int, num_samples: int
) -> list[list[Trajectory]]:
    """The trajectories of each step of a finished run of ``rows.jsonl``, with the default seed.

    Raises:
        ValueError: a step, or one of its tasks, is missing or there twice, or the checkpoint of the
            last step is missing.
    """
    folder, steps = RunFolder.open(run_dir), list(range(1, num_steps + 1))
    recorded = [line["step"] for line in folder.read_metrics()]
    if recorded != steps or folder.trajectory_steps() != steps:
        raise ValueError(f"steps: {recorded} and {folder.trajectory_steps()} of {num_steps}")
    lines = (run_dir.parents[2] / "rows.jsonl").read_text().splitlines()
    stream = TaskStream(
        [json.loads(line) for line in lines], batch_size=batch_size, shuffle=True, seed=1
    )
    read_steps = [folder.read_trajectories(step) for step in steps]
    for step, trajectories in zip(steps, read_steps, strict=True):
        groups = Counter(t.group_id for t in trajectories)
        if [*groups.values()] != [num_samples] * batch_size:
            raise ValueError(f"step {step} has so many trajectories of each group: {groups}")
    expected = Counter(
        (t.group_id, t.task_id, n)
        for k in steps
        for t in stream.batch(k)
        for n in range(num_samples)
    )
    found = Counter((t.group_id, t.task_id, t.sample_index) for s in read_steps for t in s)
    if found != expected:
        raise ValueError(f"too many: {found - expected}; missing: {expected - found}")
    latest = folder.latest_checkpoint()
    if latest is None or latest[0] != num_steps:
        raise ValueError(f"the last checkpoint is {latest}, the last step {num_steps}")
    return read_steps


def read_losses(run_dir: Path) -> list[list[float]]:
    return [[line[name] for name in _METRICS] for line in RunFolder.open(run_dir).read_metrics()]


def find_differences(
    found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]], tolerance: float
) -> list[str]:
    """Steps and metrics that are further apart than ``tolerance`` of the expected number."""
    return [
        f"step {step}: {name} is {one!r}, undisturbed {other!r}"
        for step, (row, wanted) in enumerate(zip(found, expected, strict=True), start=1)
        for name, one, other in zip(_METRICS, row, wanted, strict=True)
        if not abs(one - other) <= tolerance * max(abs(other), 1e-2)
    ]


def check_run(run: StruckRun, findings: Findings) -> None:
    """Adds what is wrong with a run that has ended."""
    findings.problems += [f"lives on: {name}" for name in run.find_orphans()]
    try:
        steps = read_every_task_once(run.run_dir, _NUM_STEPS, batch_size=2, num_samples=3)
    except ValueError as error:
        findings.problems.append(str(error))
        return
    trajectories = [trajectory for step in steps for trajectory in step]
    findings.num_trajectories += len(trajectories)
    for trajectory in trajectories:
        if trajectory.failure is not None:
            failure = trajectory.failure
            findings.failures[f"{failure.boundary}: {failure.cause}"] += 1
    latest = RunFolder.open(run.run_dir).latest_checkpoint()
    assert latest is not None
    AutoModelForCausalLM.from_pretrained(latest[1])
    litter = [p for p in (run.run_dir / "pending", run.run_dir.parents[2] / "tmp") if p.is_dir()]
    findings.problems += [
        f"left behind: {path}"
        for one in litter
        for path in one.iterdir()
        # What torch has compiled is kept for the next run.
        if not path.name.startswith("torchinductor_")
    ]


def run_scenario(name: str, scenario: Scenario, seed: int) -> Findings:
    """Strikes until all was struck; prints each strike."""
    chance = random.Random(f"{seed} {name}")
    strikes = [signal.SIGKILL] * scenario.num_kills + [signal.SIGSTOP] * scenario.num_stops
    chance.shuffle(strikes)
    findings, started, in_memory = Findings(), time.monotonic(), find_shared_memory()
    project = Path(tempfile.mkdtemp(prefix="kills-"))
    run = None
    try:
        write_project(project, scenario.settings)
        expected = None
        if scenario.tolerance is not None:
            run = StruckRun(project, "undisturbed")
            run.wait()
            expected = read_losses(run.run_dir)
        while strikes:
            findings.num_runs += 1
            run = StruckRun(project, f"t{findings.num_runs}")
            while strikes:
                time.sleep(chance.uniform(0.0, scenario.max_pause_seconds))
                if run.has_ended():
                    break
                number = strikes.pop()
                victim = run.strike(chance, number, scenario.command_share)
                findings.struck[f"{number.name} {victim}"] += 1
                print(f"{name}: {number.name} {victim}, {len(strikes)} to come", file=sys.stderr)
            if code := run.wait():
                findings.problems.append(f"exit code {code}: {run.output[-2000:]}")
            else:
                check_run(run, findings)
                if expected is not None and scenario.tolerance is not None:
                    findings.problems += find_differences(
                        read_losses(run.run_dir), expected, scenario.tolerance
                    )
        findings.problems += [f"left in /dev/shm: {x}" for x in find_shared_memory() - in_memory]
    except TimeoutError as error:
        findings.problems.append(str(error))
    finally:
        if run is not None:
            run.kill()
        if findings.problems:
            print(f"{name}: kept for a look: {project}", file=sys.stderr)
        else:
            shutil.rmtree(project)
    findings.seconds = time.monotonic() - started
    return findings


def format_page(results: Mapping[str, Findings], old_page: str) -> str:
    """The page; of scenarios that were not run now, with what it said before."""
    lines = [
        "# Kills and stops",
        "",
        "Measured by `python -m benchmarks.kills_and_stops`: runs of a tiny model of which any "
        "process is killed (SIGKILL) or stopped for up to "
        f"{_MAX_STOP_SECONDS:g} s (SIGSTOP) at random moments. A command that was struck is typed "
        "again. When a run has ended, every task of every step must be there once, nothing of it "
        "may live on or lie in temporary folders or shared memory, and its last checkpoint must "
        "load. With the embedded engine, and in order, its losses must be those of a run that "
        "nobody struck: to the last bit, with two ranks to one part in a thousand. A trajectory "
        "whose agent or reward function was killed has failed; it is no problem.",
        "",
        "| runs | kills | stops | finished runs | trajectories | of them failed | problems |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in _SCENARIOS:
        if name not in results:
            lines += [line for line in old_page.splitlines() if line.startswith(f"| {name} |")]
            continue
        found = results[name]
        kills, stops = (
            sum(n for what, n in found.struck.items() if what.startswith(kind))
            for kind in ("SIGKILL", "SIGSTOP")
        )
        cells = [name, kills, stops, found.num_runs, found.num_trajectories]
        cells += [found.failures.total(), len(found.problems)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "What was struck:", ""]
    for name in _SCENARIOS:
        if name not in results:
            lines += [line for line in old_page.splitlines() if line.startswith(f"- {name}: ")]
            continue
        found = results[name]
        struck = ", ".join(f"{what} {n}" for what, n in sorted(found.struck.items()))
        failures = ", ".join(f"{what} {n}" for what, n in sorted(found.failures.items()))
        lines.append(f"- {name}: {struck}. Failed trajectories: {failures or 'none'}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", choices=list(_SCENARIOS), action="append")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    results = {}
    for name in arguments.scenario or _SCENARIOS:
        results[name] = run_scenario(name, _SCENARIOS[name], arguments.seed)
        print(f"{name}: {results[name].problems or 'no problem'}")
    page = format_page(results, _PAGE.read_text() if _PAGE.is_file() else "")
    print(page)
    _PAGE.write_text(page)
    sys.exit(any(found.problems for found in results.values()))


if __name__ == "__main__":
    main()
