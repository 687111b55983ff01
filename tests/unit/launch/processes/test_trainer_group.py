"""Several trainer processes as one: whoever dies, all end, and who died first is told."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.launch.plan import PlannedProcess
from agentrl_cli.launch.processes.trainer_events import TrainerReport
from agentrl_cli.launch.processes.trainer_group import TrainerGroup
from agentrl_cli.launch.processes.trainer_spec import RunningServers
from agentrl_cli.log import SilentObserver

#: What every rank of these tests begins with.
PREAMBLE = """
import os, signal, sys, time
from pathlib import Path
from agentrl_cli.launch.processes.trainer_events import TrainerEventWriter, TrainerReport
from agentrl_cli.launch.processes.trainer_spec import TrainerSpec
folder = Path(sys.argv[1])
spec, place = TrainerSpec.take(os.environ)
is_first = place.index == 0
events = TrainerEventWriter(spec.events_descriptor) if is_first else None
(folder / f"rank-{place.index}").write_text(f"{place.count} {place.path}")
def meet():
    while not all((folder / f"rank-{i}").exists() for i in range(place.count)):
        time.sleep(0.01)
def wait_for_others_to_fail():
    time.sleep(0.3)
    events.report(TrainerReport(crash="RankLostError: another has ended"))
    sys.exit(1)
meet()
"""


CONFIG = ExperimentConfig.model_validate(
    {
        "experiment_name": "exp",
        "model": {"path": "m"},
        "agent_builder_path": "a.b",
        "train_dataset": {"path": "d"},
        "engine": {"kind": "embedded"},
    }
)
SERVERS = RunningServers(run=resolve_run(CONFIG, Machine(), purpose="train"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., TrainerGroup]]:
    """Starts ranks that all run one script: ``start("...", count=3)``."""
    started: list[TrainerGroup] = []

    def start_ranks(script: str, count: int = 3) -> TrainerGroup:
        path = tmp_path / "rank.py"
        path.write_text(PREAMBLE + textwrap.dedent(script))
        planned = [
            PlannedProcess(
                name="trainer" if i == 0 else f"trainer-{i}",
                role="trainer",
                argv=(sys.executable, str(path), str(tmp_path)),
            )
            for i in range(count)
        ]
        trainer = TrainerGroup(planned, tmp_path, SERVERS, secrets=[], observer=SilentObserver())
        started.append(trainer)
        return trainer

    yield start_ranks
    for trainer in started:
        trainer.end()


def list_children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def wait(trainer: TrainerGroup) -> TrainerReport:
    deadline = time.monotonic() + 60
    while not trainer.has_ended():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return trainer.end()


def test_they_know_their_ranks_and_a_rendezvous_that_only_the_user_can_join(
    start: Any, tmp_path: Path
) -> None:
    trainer = start(
        """
        if is_first:
            mode = os.stat(os.path.dirname(place.path)).st_mode
            assert mode & 0o077 == 0, oct(mode)
            time.sleep(0.3)
            events.report(TrainerReport(is_complete=True))
        """
    )
    report = wait(trainer)
    assert report == TrainerReport(is_complete=True), (tmp_path / "trainer.log").read_text()
    places = [(tmp_path / f"rank-{i}").read_text().split() for i in range(3)]
    assert {count for count, _ in places} == {"3"}
    assert len({path for _, path in places}) == 1
    assert not Path(places[0][1]).parent.exists()


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_killed_rank_ends_all_and_is_the_one_that_is_named(start: Any, killed: int) -> None:
    """The others notice first, as exchanges with it fail at once."""
    # Of earlier tests there may be some that stay.
    children_before = list_children()
    trainer = start(
        f"""
        if place.index == {killed}:
            os.kill(os.getpid(), signal.SIGKILL)
        if is_first:
            wait_for_others_to_fail()
        time.sleep(0.1)
        sys.exit(1)
        """
    )
    report = wait(trainer)
    assert report == TrainerReport()
    assert "was killed by SIGKILL" in trainer.describe_end()
    assert (f"trainer-{killed}" in trainer.describe_end()) == (killed > 0)
    assert list_children() <= children_before


def test_a_rank_that_fails_is_named_with_the_end_of_its_log(start: Any) -> None:
    trainer = start(
        """
        if place.index == 2:
            sys.exit("CUDA out of memory")
        if is_first:
            wait_for_others_to_fail()
        time.sleep(60)
        """
    )
    assert wait(trainer).crash is None
    assert trainer.describe_end() == "ended with exit status 1 in rank 2 of 3 (trainer-2)"
    assert "CUDA out of memory" in trainer.tail()


def test_a_first_rank_that_does_not_notice_is_ended_too(start: Any) -> None:
    trainer = start("time.sleep(60) if is_first else sys.exit(3)", count=2)
    assert wait(trainer) == TrainerReport()
    assert trainer.describe_end() == "ended with exit status 3 in rank 1 of 2 (trainer-1)"


@pytest.mark.parametrize(
    ("crash", "end", "named"),
    [
        # Its exchange fails within a millisecond; whoever is killed takes longer to be reaped.
        (
            "RuntimeError: Connection closed by peer",
            "os.kill(os.getpid(), signal.SIGKILL)",
            "was killed by SIGKILL in rank 1 of 2 (trainer-1)",
        ),
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
    start: Any, crash: str, end: str, named: str
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


def test_a_first_rank_may_take_its_time_after_the_others_were_sent_home(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl_cli.launch.processes.trainer_group._NOTICE_SECONDS", 0.1)
    trainer = start(
        """
        if is_first:
            time.sleep(1.0)
            events.report(TrainerReport(is_complete=True))
        """
    )
    assert wait(trainer) == TrainerReport(is_complete=True)


#: A command with two ranks that would run for ever.
COMMAND = """
import sys, time
from pathlib import Path
from agentrl_cli.launch.processes.trainer_spec import RunningServers
from agentrl_cli.launch.plan import PlannedProcess
from agentrl_cli.launch.processes.trainer_group import TrainerGroup
from agentrl_cli.log import SilentObserver
folder = Path(sys.argv[1])
servers = RunningServers.parse((folder / "servers.json").read_text())
rank = (sys.executable, str(folder / "rank.py"), str(folder))
planned = [PlannedProcess(name=f"trainer-{i}", role="trainer", argv=rank) for i in range(2)]
trainer = TrainerGroup(planned, folder, servers, secrets=[], observer=SilentObserver())
while not trainer.has_ended():
    time.sleep(0.02)
"""


def test_no_rank_outlives_a_command_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(PREAMBLE + "time.sleep(600)")
    (tmp_path / "command.py").write_text(COMMAND)
    (tmp_path / "servers.json").write_text(SERVERS.format())
    argv = [sys.executable, str(tmp_path / "command.py"), str(tmp_path)]
    with subprocess.Popen(argv) as command:
        try:
            deadline = time.monotonic() + 180
            while not all((tmp_path / f"rank-{index}").exists() for index in range(2)):
                assert time.monotonic() < deadline
                assert command.poll() is None
                time.sleep(0.02)
            below = psutil.Process(command.pid).children(recursive=True)
        finally:
            command.kill()
    assert len(below) >= 4, "two ranks, each behind a process reaper"
    _, alive = psutil.wait_procs(below, timeout=20)
    assert alive == []
