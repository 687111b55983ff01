"""The trainer as a process of its own, beside engine servers.

    python -m agentrl_cli.launch.trainer_process RUN_DIR OWNER_PID EVENTS_DESCRIPTOR

Started by the command, which holds the run folder. SIGTERM finishes the step in progress and
saves. What agents print goes to this process's log.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from agentrl_cli.errors import AgentrlError
from agentrl_cli.launch.events import EventWriter, TrainerReport
from agentrl_cli.launch.handover import TrainerOrders, resolve_config
from agentrl_cli.launch.trainer import PPOTrainer
from agentrl_cli.launch.training import run_trainer


class SignalFlag:
    """A stop flag that a signal sets."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        """True once the signal has come."""
        return self._is_set

    def set(self, _number: int, _frame: FrameType | None) -> None:
        """The handler."""
        self._is_set = True


def main(argv: list[str]) -> int:
    """Trains; the exit code, which the last event on the pipe explains."""
    stop = SignalFlag()
    signal.signal(signal.SIGTERM, stop.set)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Otherwise what an agent printed last would be lost with a process that is killed.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        orders = TrainerOrders.take(argv[1:], os.environ)
    except AgentrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    # The agents' own processes have nothing to say there.
    os.set_inheritable(orders.events_descriptor, False)
    events = EventWriter(orders.events_descriptor)
    try:
        is_complete = _train(Path(argv[0]), orders, events, stop)
    except AgentrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        events.report(TrainerReport(error=error))
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        events.report(TrainerReport(crash=_describe(error)))
        return 1
    events.report(TrainerReport(is_complete=is_complete))
    return 0


def _train(run_dir: Path, orders: TrainerOrders, events: EventWriter, stop: SignalFlag) -> bool:
    trainer = PPOTrainer(
        resolve_config(run_dir, orders),
        observer=events,
        stop=stop,
        servers=orders.servers,
        owner_pid=orders.owner_pid,
        place=orders.place,
    )
    return run_trainer(trainer)


def _describe(error: Exception) -> str:
    """The exception in a line, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {text}{place}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
