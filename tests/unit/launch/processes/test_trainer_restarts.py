"""The supervisor against trainers that die in every way: real processes, tiny scripts.

The server group is made up: it stands there to fail.
"""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.errors import AgentrlError, DatasetError, EngineError, RunError
from agentrl_cli.launch.plan import PlannedProcess
from agentrl_cli.launch.processes.trainer_group import TrainerGroup, TrainerSupervisor
from agentrl_cli.launch.servers.server_group import ServerGroup

#: What every trainer of these tests begins with. ``life`` counts the trainers of a test.
PREAMBLE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from agentrl_cli.errors import DatasetError, EngineError
from agentrl_cli.launch.processes.trainer_events import TrainerEventWriter, TrainerReport
from agentrl_cli.launch.processes.trainer_spec import TrainerSpec
folder = Path(sys.argv[1])
spec, _ = TrainerSpec.take(os.environ)
os.set_inheritable(spec.events_descriptor, False)
events = TrainerEventWriter(spec.events_descriptor)
lives = folder / "lives"
with lives.open("a") as file:
    file.write(f"{os.getpid()}\\n")
life = len(lives.read_text().splitlines())
def done(is_complete=True):
    events.report(TrainerReport(is_complete=is_complete))
    sys.exit(0)
def die():
    events.close()
    os.kill(os.getpid(), signal.SIGKILL)
"""


class FakeServers(ServerGroup):
    """Servers whose faults the test decides."""

    def __init__(self) -> None:
        self.endpoints = [
            ServerEndpoint(name="vllm-0", base_url="http://127.0.0.1:1", api_key="the-key")
        ]
        self.on_failed = None
        self.trainers_at_stop: list[int] | None = None
        self._error = None

    def start(self) -> None:
        """There is nothing to start."""

    def stop(self) -> None:
        self.trainers_at_stop = find_children()

    def fail(self, error: AgentrlError) -> None:
        self._error = error


class Recorder:
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.steps: list[float] = []
        self.messages: list[str] = []

    def on_stage(self, stage: str, total: int | None = None) -> None:
        self.stages.append(stage)

    def on_progress(self, num_done: int, note: str = "") -> None: ...

    def on_step(self, metrics: Any) -> None:
        self.steps.append(metrics["step"])

    def on_message(self, text: str) -> None:
        self.messages.append(text)


class Run:
    """A supervised run of a script, and what can be seen of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server_group = FakeServers()
        self.shown = Recorder()
        self.stop = threading.Event()
        self.max_restarts = 3

    def __call__(self, script: str) -> bool:
        path = self.folder / "trainer.py"
        path.write_text(PREAMBLE + textwrap.dedent(script))
        config = ExperimentConfig.model_validate(
            {
                "experiment_name": "exp",
                "model": {"path": "m"},
                "agent_builder_path": "a.b",
                "train_dataset": {"path": "d"},
                "engine": {"kind": "vllm"},
                "launcher": {"max_trainer_restarts": self.max_restarts},
            }
        )
        self.server_group.run = resolve_run(config, Machine(), purpose="train")
        planned = PlannedProcess(
            name="trainer", role="trainer", argv=(sys.executable, str(path), str(self.folder))
        )
        start = partial(TrainerGroup, [planned], self.folder, secrets=[], observer=self.shown)
        with self.server_group as servers:
            return TrainerSupervisor(
                config=config,
                servers=servers,
                start_trainer=start,
                observer=self.shown,
                stop=self.stop,
            ).run()

    def when(self, stage: str, action: Callable[[], object]) -> None:
        """Does it, in a thread, once the trainer has shown the stage."""
        after(0.1, lambda: (wait_for(lambda: stage in self.shown.stages), action()))

    @property
    def num_lives(self) -> int:
        return len((self.folder / "lives").read_text().splitlines())


#: Of tests before: multiprocessing keeps a process of its own until the interpreter ends.
_OTHERS: set[int] = set()


def find_children() -> list[int]:
    return [
        p.pid
        for p in psutil.Process().children(recursive=True)
        if p.pid not in _OTHERS and p.is_running() and p.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    return Run(tmp_path)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    _OTHERS.clear()
    _OTHERS.update(find_children())
    yield
    assert find_children() == []


def after(seconds: float, action: Callable[[], object]) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_ends_and_its_servers_are_stopped_after_the_trainer(run: Run) -> None:
    assert run('events.on_step({"step": 1}); print("an agent prints"); done()')
    assert run.shown.steps == [1.0]
    assert run.server_group.trainers_at_stop == []
    assert "an agent prints" in (run.folder / "trainer.log").read_text()


def test_a_killed_trainer_is_started_again_with_the_same_servers(run: Run) -> None:
    assert run(
        """
        events.on_step({"step": life})
        assert spec.servers.endpoints[0].api_key == "the-key"
        assert not any("the-key" in value for value in os.environ.values())
        if life < 3: die()
        done()
        """
    )
    assert run.num_lives == 3
    assert run.shown.steps == [1.0, 2.0, 3.0]
    assert [m.split(";")[0] for m in run.shown.messages] == [
        "the trainer was killed by SIGKILL"
    ] * 2
    assert "restart 2 of 3" in run.shown.messages[1]


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
    with pytest.raises(
        RunError, match=r"TypeError: no \(a.py:1\), twice at the same place"
    ) as caught:
        run(
            """
            print("Traceback of the crash", file=sys.stderr)
            events.report(TrainerReport(crash="TypeError: no (a.py:1)"))
            sys.exit(1)
            """
        )
    assert run.num_lives == 2
    assert "Traceback of the crash" in str(caught.value)
    assert run.server_group.trainers_at_stop == []


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_the_budget_of_restarts_is_kept(run: Run, max_restarts: int) -> None:
    run.max_restarts = max_restarts
    with pytest.raises(RunError, match=f"max_trainer_restarts is {max_restarts}") as caught:
        run("print('last line', flush=True); die()")
    assert run.num_lives == max_restarts + 1
    for promised in ("killed by SIGKILL", "the same command resumes", "last line"):
        assert promised in str(caught.value)


def test_a_mistake_of_the_user_is_not_tried_again(run: Run) -> None:
    with pytest.raises(DatasetError, match=r"^row 3 has no question$") as caught:
        run(
            """
            events.report(TrainerReport(error=DatasetError("row 3 has no question")))
            sys.exit(2)
            """
        )
    assert caught.value.exit_code == 2
    assert run.num_lives == 1


def test_what_agent_code_does_to_the_process_is_no_end_of_the_run(run: Run) -> None:
    assert run("done() if life == 2 else os._exit(0)")
    assert "ended with exit status 0 and without a word" in run.shown.messages[0]


def test_children_of_a_killed_trainer_die_with_it(run: Run) -> None:
    assert run(
        """
        if life == 1:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            subprocess.Popen(["setsid", "sleep", "600"])
            time.sleep(0.3)
            die()
        done()
        """
    )


def test_a_stop_finishes_the_step_in_progress(run: Run) -> None:
    run.when("rollout", run.stop.set)
    assert not run(
        """
        told = []
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        events.on_stage("rollout", 4)
        while not told: time.sleep(0.01)
        time.sleep(0.3)
        events.on_step({"step": 1})
        done(is_complete=False)
        """
    )
    assert run.shown.steps == [1.0]
    assert run.num_lives == 1


def test_a_stop_before_the_first_step_is_at_once(run: Run) -> None:
    run.when("load model", run.stop.set)
    started = time.monotonic()
    assert not run('events.on_stage("load model"); time.sleep(600)')
    assert time.monotonic() - started < 20


def test_a_trainer_killed_while_it_stops_is_not_started_again(run: Run) -> None:
    run.when("rollout", run.stop.set)
    assert not run(
        """
        signal.signal(signal.SIGTERM, lambda *_: die())
        events.on_stage("rollout", 4)
        time.sleep(600)
        """
    )
    assert run.num_lives == 1


def test_a_trainer_that_ignores_the_stop_is_ended_at_the_deadline(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainerSupervisor, "_compute_step_deadline", lambda _: 0.5)
    run.when("rollout", run.stop.set)
    with pytest.raises(RunError, match="was asked to finish its step and did not in"):
        run(
            """
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            events.on_stage("rollout", 4)
            time.sleep(600)
            """
        )


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
    assert run.server_group.trainers_at_stop == []


def test_a_trainer_that_does_not_end_after_its_last_word_is_ended(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl_cli.launch.processes.trainer_group._EXIT_SECONDS", 0.3)
    assert run("events.report(TrainerReport(is_complete=True)); time.sleep(600)")


def test_servers_that_cannot_be_started_end_the_run_with_their_error(run: Run) -> None:
    run.server_group.fail(EngineError("vllm-0: the model does not fit"))
    with pytest.raises(EngineError, match="does not fit"):
        run("time.sleep(600)")


def test_servers_that_died_too_often_end_the_run_with_their_error(run: Run) -> None:
    run.when("rollout", lambda: run.server_group.fail(EngineError("vllm-0 died 4 times")))
    with pytest.raises(EngineError, match="died 4 times"):
        run('events.on_stage("rollout", 4); time.sleep(600)')
    assert run.server_group.trainers_at_stop == []


def test_a_trainer_that_lost_its_servers_is_explained_by_them(run: Run) -> None:
    """It may say so before the server group knows."""

    def fail() -> None:
        wait_for(lambda: (run.folder / "lives").exists())
        time.sleep(1.0)
        run.server_group.fail(EngineError("vllm-0 died 4 times: out of memory"))

    after(0.0, fail)
    with pytest.raises(EngineError, match="out of memory") as caught:
        run('events.report(TrainerReport(error=EngineError("no server answers"))); sys.exit(1)')
    assert "no server answers" in str(caught.value.__cause__)
    assert run.num_lives == 1
