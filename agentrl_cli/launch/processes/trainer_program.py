"""The program of each trainer process ("rank").

    RANK=0 WORLD_SIZE=1 python -m agentrl_cli.launch.processes.trainer_program DESCRIPTOR

Started by the command, which holds the run folder and gives the rest in the environment (see
``trainer_protocol.py``). Rank 0 has the rollouts, and reports to the command; what goes wrong in
another rank is in its log, and the command sees that it has ended. SIGTERM to rank 0 finishes the
step in progress and saves. What agents print goes to rank 0's log.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

from agentrl_cli.errors import AgentrlError, NotFiniteError
from agentrl_cli.launch.placement import LocalPlacement, Placement
from agentrl_cli.launch.processes.trainer_protocol import (
    TrainerEventWriter,
    TrainerReport,
    TrainerSpec,
)
from agentrl_cli.launch.trainer import (
    PPOTrainer,
    load_trainer_config,
    run_trainer,
    train_beside,
)
from agentrl_cli.train.rendezvous import Rendezvous


class _SignalFlag:
    """A stop flag that a signal sets; the lock of an Event may be held where the signal comes."""

    _is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self, *_: object) -> None:
        self._is_set = True


def main(argv: list[str]) -> int:
    """Trains as one of the ranks; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Otherwise what an agent printed last would be lost with a process that is killed.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        spec, rendezvous = TrainerSpec.take(os.environ)
        if rendezvous is None or rendezvous.index == 0:
            return _train_first(int(argv[0]), spec, rendezvous)
        _find_placement(spec)
        config = load_trainer_config(spec)
        train_beside(config, spec.servers.run, rendezvous, spec.owner.location)
    except NotFiniteError as error:
        # Raised on every rank: rank 0 reports it.
        print(error, file=sys.stderr)
    except AgentrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _find_placement(spec: TrainerSpec) -> Placement:
    if spec.cluster is None:
        return LocalPlacement()
    from agentrl_cli.launch.ray.ray_placement import join_cluster

    return join_cluster(spec.cluster, spec.servers.run)


def _train_first(descriptor: int, spec: TrainerSpec, rendezvous: Rendezvous | None) -> int:
    """Rank 0; the last event explains its exit code."""
    stop = _SignalFlag()
    # The agents' own processes have nothing to report there.
    os.set_inheritable(descriptor, False)
    events = TrainerEventWriter(descriptor)
    try:
        placement = _find_placement(spec)
        # After a cluster was joined, which sets handlers of its own.
        signal.signal(signal.SIGTERM, stop.set)
        trainer = PPOTrainer(
            load_trainer_config(spec),
            observer=events,
            stop=stop,
            servers=spec.servers,
            owner=spec.owner,
            rendezvous=rendezvous,
            placement=placement,
        )
        is_complete = run_trainer(trainer)
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


def _describe(error: Exception) -> str:
    """The exception in a line, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {text}{place}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
