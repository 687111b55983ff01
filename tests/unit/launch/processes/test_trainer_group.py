"""Trainers that die in every way: real processes that run tiny scripts, beside made-up servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import TypeAdapter

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.errors import AgentrlError, DatasetError, EngineError, RunError
from agentrl_cli.launch.placement import LocalPlacement
from agentrl_cli.launch.plan import PlannedProcess
from agentrl_cli.launch.processes.trainer_group import TrainerGroup, TrainerSupervisor
from agentrl_cli.launch.processes.trainer_protocol import RunningServers, TrainerReport
from agentrl_cli.log import SilentObserver
from agentrl_cli.store.working_copy import FolderOwner

#: What every rank of these tests begins with. ``life`` counts the trainers of a test.
PREAMBLE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from agentrl_cli.errors import DatasetError, EngineError
from agentrl_cli.launch.processes.trainer_protocol import *
folder = Path(sys.argv[1])
spec, place = TrainerSpec.take(os.environ)
is_first = place is None or place.index == 0
if is_first:
    os.set_inheritable(int(sys.argv[2]), False)
    events = TrainerEventWriter(int(sys.argv[2]))
    lives = folder / "lives"
    with lives.open("a") as file:
        file.write(f"{os.getpid()}\\n")
    life = len(lives.read_text().splitlines())
if place is not None:
    (folder / f"rank-{place.index}").write_text(f"{place.count} {place.address}")
    while not all((folder / f"rank-{i}").exists() for i in range(place.count)):
        time.sleep(0.01)
def done(is_complete=True):
    events.report(TrainerReport(is_complete=is_complete))
    sys.exit(0)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def wait_for_others_to_fail():
    events.report(TrainerReport(crash="RankLostError: another has ended"))
    sys.exit(1)
"""


def make_config(max_restarts: int = 3) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "exp",
            "model": {"path": "m"},
            "agent_builder_path": "a.b",
            "train_dataset": {"path": "d"},
            "engine": {"kind": "vllm"},
            "launcher": {"max_trainer_restarts": max_restarts},
        }
    )


SERVERS = RunningServers(
    run=resolve_run(make_config(), Machine(), purpose="train"),
    endpoints=(ServerEndpoint(name="vllm-0", base_url="http://127.0.0.1:1", api_key="the-key"),),
)


class Recorder(SilentObserver):
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.steps: list[float] = []
        self.messages: list[str] = []

    def on_stage(self, stage: str, total: int | None = None) -> None:
        self.stages.append(stage)

    def on_step(self, metrics: Any) -> None:
        self.steps.append(metrics["step"])

    def on_message(self, text: str) -> None:
        self.messages.append(text)


#: Of tests before: multiprocessing keeps a process of its own until the interpreter ends.
_OTHERS: set[int] = set()


def find_children() -> list[int]:
    return [
        p.pid
        for p in psutil.Process().children(recursive=True)
        if p.pid not in _OTHERS and p.is_running() and p.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    _OTHERS.clear()
    _OTHERS.update(find_children())
    yield
    assert find_children() == []


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


Start = Callable[..., TrainerGroup]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ranks that all run one script: ``start("...", count=3)``."""
    started: list[TrainerGroup] = []

    def start_ranks(script: str, count: int = 3, observer: Any = None) -> TrainerGroup:
        path = tmp_path / "rank.py"
        path.write_text(PREAMBLE + textwrap.dedent(script))
        argv = (sys.executable, str(path), str(tmp_path))
        names = ["trainer", *(f"trainer-{rank}" for rank in range(1, count))]
        planned = [PlannedProcess(name=name, role="trainer", argv=argv) for name in names]
        observer = observer or SilentObserver()
        owner = FolderOwner(os.getpid(), str(tmp_path))
        options: Any = {"owner": lambda: owner, "secrets": [], "observer": observer}
        options["placement"] = LocalPlacement()
        started.append(TrainerGroup(planned, tmp_path, SERVERS, **options))
        return started[-1]

    yield start_ranks
    for trainer in started:
        trainer.end()


class Run:
    """A supervised run of a script, and what can be seen of it."""

    def __init__(self, folder: Path, start: Start) -> None:
        self.folder = folder
        self.server_error: AgentrlError | None = None
        self.shown = Recorder()
        self.stop = threading.Event()
        self.max_restarts = 3
        self._start = start

    def __call__(self, script: str) -> bool:
        return TrainerSupervisor(
            config=make_config(self.max_restarts),
            start_trainer=lambda: self._start(script, count=1, observer=self.shown),
            check_servers=self._check_servers,
            observer=self.shown,
            stop=self.stop,
        ).run()

    def _check_servers(self) -> None:
        if self.server_error is not None:
            raise self.server_error

    def when(self, stage: str, action: Callable[[], object]) -> None:
        """Does it, in a thread, once the trainer has shown the stage."""

        def act() -> None:
            wait_for(lambda: stage in self.shown.stages)
            action()

        threading.Thread(target=act, daemon=True).start()

    @property
    def num_lives(self) -> int:
        return len((self.folder / "lives").read_text().splitlines())


@pytest.fixture
def run(tmp_path: Path, start: Start) -> Run:
    return Run(tmp_path, start)


def test_a_run_ends_with_its_trainer(run: Run) -> None:
    assert run('events.on_step({"step": 1}); print("an agent prints"); done()')
    assert run.shown.steps == [1.0]
    assert find_children() == []
    assert "an agent prints" in (run.folder / "trainer.log").read_text()


def test_a_killed_trainer_is_started_again_with_the_same_servers(run: Run) -> None:
    assert run(
        """
        events.on_step({"step": life})
        assert spec.servers.endpoints[0].api_key == "the-key"
        assert not any("the-key" in value for value in os.environ.values())
        if life == 1: os._exit(0)
        if life == 2: die()
        done()
        """
    )
    assert run.num_lives == 3
    assert run.shown.steps == [1.0, 2.0, 3.0]
    assert [m.split(";")[0] for m in run.shown.messages] == [
        "the trainer ended with exit status 0 and without a word",
        "the trainer was killed by SIGKILL",
    ]
    assert "restart 2 of 3" in run.shown.messages[1]


@pytest.mark.slow
def test_a_crash_is_tried_again_as_long_as_it_makes_progress(run: Run) -> None:
    assert run(
        """
        if life == 4: done()
        events.on_step({"step": life})
        events.report(TrainerReport(crash="TimeoutError: publish (loop.py:9)"))
        sys.exit(1)
        """
    )
    assert run.num_lives == 4
    assert "crashed: TimeoutError" in run.shown.messages[0]


def test_the_same_crash_twice_without_a_step_ends_the_run(run: Run) -> None:
    crash = r"TypeError: no \(a.py:1\), twice at the same place"
    with pytest.raises(RunError, match=crash) as caught:
        run(
            """
            print("Traceback of the crash", file=sys.stderr)
            events.report(TrainerReport(crash="TypeError: no (a.py:1)"))
            sys.exit(1)
            """
        )
    assert run.num_lives == 2
    assert "Traceback of the crash" in str(caught.value)
    assert find_children() == []


@pytest.mark.slow
@pytest.mark.parametrize("max_restarts", [0, 2])
def test_the_budget_of_restarts_is_kept(run: Run, max_restarts: int) -> None:
    run.max_restarts = max_restarts
    with pytest.raises(RunError, match=f"max_trainer_restarts is {max_restarts}") as caught:
        run("print('last line', flush=True); die()")
    assert run.num_lives == max_restarts + 1
    for promised in ("killed by SIGKILL", "the same command resumes", "last line"):
        assert promised in str(caught.value)


def test_a_mistake_of_the_user_is_not_tried_again(run: Run) -> None:
    with pytest.raises(DatasetError, match=r"^row 3 is empty$"):
        run('events.report(TrainerReport(error=DatasetError("row 3 is empty"))); sys.exit(2)')
    assert run.num_lives == 1


@pytest.mark.parametrize(
    ("stage", "script", "steps"),
    [
        (
            "rollout",
            """
            told = []
            signal.signal(signal.SIGTERM, lambda *_: told.append(1))
            events.on_stage("rollout", 4)
            while not told: time.sleep(0.01)
            time.sleep(0.3)
            events.on_step({"step": 1})
            done(is_complete=False)
            """,
            [1.0],
        ),
        ("load model", 'events.on_stage("load model"); time.sleep(600)', []),
        (
            "rollout",
            """
            signal.signal(signal.SIGTERM, lambda *_: die())
            events.on_stage("rollout", 4)
            time.sleep(600)
            """,
            [],
        ),
    ],
    ids=["finishes its step", "before its first step", "killed meanwhile"],
)
def test_a_run_that_is_stopped_is_not_started_again(
    run: Run, stage: str, script: str, steps: list[float]
) -> None:
    run.when(stage, run.stop.set)
    assert not run(script)
    assert run.shown.steps == steps
    assert run.num_lives == 1


def test_a_trainer_that_ignores_the_stop_is_ended_at_the_deadline(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainerSupervisor, "_compute_step_deadline", lambda _: 0.5)
    run.when("rollout", run.stop.set)
    with pytest.raises(RunError, match="was asked to finish its step and did not in"):
        run('signal.signal(15, signal.SIG_IGN); events.on_stage("rollout", 4); time.sleep(600)')


def test_ctrl_c_twice_stops_at_once(run: Run) -> None:
    """The second one is a KeyboardInterrupt in the main thread, wherever that is."""
    # A job that a shell has started in the background ignores it otherwise.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run.when("rollout", lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            run('events.on_stage("rollout", 4); signal.signal(15, signal.SIG_IGN); time.sleep(600)')
    finally:
        signal.signal(signal.SIGINT, previous)
    assert find_children() == []


def test_a_trainer_that_does_not_end_after_its_last_word_is_ended(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl_cli.launch.processes.trainer_group._EXIT_SECONDS", 0.3)
    assert run("events.report(TrainerReport(is_complete=True)); time.sleep(600)")


def test_servers_that_died_too_often_end_the_run_with_their_error(run: Run) -> None:
    error = EngineError("vllm-0 died 4 times")
    run.when("rollout", lambda: setattr(run, "server_error", error))
    with pytest.raises(EngineError, match="died 4 times"):
        run('events.on_stage("rollout", 4); time.sleep(600)')
    assert find_children() == []


def wait(trainer: TrainerGroup) -> TrainerReport:
    wait_for(trainer.has_ended)
    return trainer.end()


def test_ranks_know_a_rendezvous_that_only_the_user_can_join(start: Start, tmp_path: Path) -> None:
    trainer = start(
        """
        if is_first:
            mode = os.stat(os.path.dirname(place.address.removeprefix("file://"))).st_mode
            assert mode & 0o077 == 0, oct(mode)
            time.sleep(0.3)
            done()
        """
    )
    report = wait(trainer)
    assert report == TrainerReport(is_complete=True), (tmp_path / "trainer.log").read_text()
    places = [(tmp_path / f"rank-{i}").read_text().split() for i in range(3)]
    assert {count for count, _ in places} == {"3"}
    assert len({path for _, path in places}) == 1
    assert not Path(places[0][1]).parent.exists()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_killed_rank_ends_all_and_is_the_one_that_is_named(start: Start, killed: int) -> None:
    """The others notice first, as exchanges with it fail at once."""
    trainer = start(
        f"""
        if place.index == {killed}:
            die()
        if is_first:
            wait_for_others_to_fail()
        time.sleep(0.1)
        sys.exit(1)
        """
    )
    assert wait(trainer) == TrainerReport()
    assert "was killed by SIGKILL" in trainer.describe_end()
    assert (f"trainer-{killed}" in trainer.describe_end()) == (killed > 0)
    assert find_children() == []


@pytest.mark.slow
@pytest.mark.parametrize("first", ["wait_for_others_to_fail()", "time.sleep(60)"])
def test_a_rank_that_fails_is_named_with_the_end_of_its_log(start: Start, first: str) -> None:
    trainer = start(f'{first} if is_first else sys.exit("CUDA out of memory")', count=2)
    assert wait(trainer) == TrainerReport()
    assert trainer.describe_end() == "ended with exit status 1 in rank 1 of 2 (trainer-1)"
    assert "CUDA out of memory" in trainer.quote_log()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("crash", "end", "named"),
    [
        # Its exchange fails within a millisecond; whoever is killed takes longer to be reaped.
        ("RuntimeError: Connection closed", "die()", "was killed by SIGKILL in rank 1 of 2"),
        (
            "RankLostError: another one has ended",
            "sys.exit(1)",
            "ended with exit status 1 in rank 1 of 2",
        ),
        (
            "ValueError: a bug that all ranks have",
            "sys.exit(1)",
            "ended with exit status 1 and without a word",
        ),
    ],
)
def test_a_first_rank_that_speaks_sooner_is_to_blame_unless_it_speaks_of_others(
    start: Start, crash: str, end: str, named: str
) -> None:
    trainer = start(
        f"""
        if is_first:
            events.report(TrainerReport(crash={crash!r}))
            time.sleep(0.6)
            sys.exit(1)
        time.sleep(0.3)
        {end}
        """,
        count=2,
    )
    report = TrainerReport() if "rank 1" in named else TrainerReport(crash=crash)
    assert wait(trainer) == report
    assert trainer.describe_end().startswith(named)


@pytest.mark.slow
def test_a_first_rank_may_take_its_time_after_the_others_were_sent_home(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl_cli.launch.processes.trainer_group._NOTICE_SECONDS", 0.1)
    trainer = start("if is_first: time.sleep(1.0); done()")
    assert wait(trainer) == TrainerReport(is_complete=True)


#: A command with two ranks that would run for ever.
COMMAND = """
import os, sys, time
from pathlib import Path
from pydantic import TypeAdapter
from agentrl_cli.launch.placement import LocalPlacement
from agentrl_cli.launch.plan import PlannedProcess
from agentrl_cli.launch.processes.trainer_group import TrainerGroup
from agentrl_cli.launch.processes.trainer_protocol import RunningServers
from agentrl_cli.log import SilentObserver
from agentrl_cli.store.working_copy import FolderOwner
folder = Path(sys.argv[1])
servers = TypeAdapter(RunningServers).validate_json((folder / "servers.json").read_text())
rank = (sys.executable, str(folder / "rank.py"), str(folder))
planned = [PlannedProcess(name=f"trainer-{i}", role="trainer", argv=rank) for i in range(2)]
given = {"observer": SilentObserver(), "placement": LocalPlacement()}
owner = lambda: FolderOwner(os.getpid(), str(folder))
trainer = TrainerGroup(planned, folder, servers, owner=owner, secrets=[], **given)
while not trainer.has_ended():
    time.sleep(0.02)
"""


@pytest.mark.slow
def test_no_rank_outlives_a_command_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(PREAMBLE + "time.sleep(600)")
    (tmp_path / "command.py").write_text(COMMAND)
    (tmp_path / "servers.json").write_bytes(TypeAdapter(RunningServers).dump_json(SERVERS))
    argv = [sys.executable, str(tmp_path / "command.py"), str(tmp_path)]
    with subprocess.Popen(argv) as command:
        try:
            wait_for(
                lambda: (
                    all((tmp_path / f"rank-{index}").exists() for index in range(2))
                    or command.poll() is not None
                ),
                seconds=180,
            )
            below = psutil.Process(command.pid).children(recursive=True)
        finally:
            command.kill()
    assert len(below) >= 4, "two ranks, each behind a process reaper"
    _, alive = psutil.wait_procs(below, timeout=20)
    assert alive == []
