"""What the command gives to the trainer processes that it starts: servers, secrets, a pipe."""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import ResolvedRun
from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.errors import UserInputError
from agentrl_cli.store.resume_check import load_saved_config
from agentrl_cli.train.ranks import Rendezvous

#: The environment variable of the spec. It holds keys, and an agent (a child of the trainer, or
#: code inside it) has no business with them: it is removed as it is read.
SPEC_VARIABLE = "AGENTRL_TRAINER_SPEC"
#: As torchrun sets them. Removed too: an agent's own torch would take itself for a rank.
_RANK, _LOCAL_RANK, _WORLD_SIZE = "RANK", "LOCAL_RANK", "WORLD_SIZE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServers:
    """A run as the command resolved it, and where its engine servers listen."""

    run: ResolvedRun
    endpoints: tuple[ServerEndpoint, ...] = ()
    """None with the embedded engine, which is in rank 0 itself."""

    def format(self) -> str:
        """As JSON text; it holds the servers' keys."""
        endpoints = [asdict(endpoint) for endpoint in self.endpoints]
        return json.dumps({"run": self.run.model_dump_json(), "endpoints": endpoints})

    @classmethod
    def parse(cls, text: str) -> Self:
        """From :meth:`format`'s text."""
        data = json.loads(text)
        endpoints = tuple(ServerEndpoint(**endpoint) for endpoint in data["endpoints"])
        return cls(run=ResolvedRun.model_validate_json(data["run"]), endpoints=endpoints)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """What every trainer process of a run is started with, besides the run folder."""

    owner_pid: int
    """The command, which holds the run folder."""
    events_descriptor: int
    """Where rank 0 reports what happens; other ranks do not have it."""
    servers: RunningServers
    secrets: Sequence[Sequence[Any]]
    """What is masked in the run folder's configuration."""
    rendezvous_path: str
    """Where several ranks meet; see :class:`Rendezvous`."""

    def environment(self, rank: int = 0, world_size: int = 1) -> dict[str, str]:
        """Additions to the environment of a trainer process."""
        spec = {field.name: getattr(self, field.name) for field in fields(self)}
        spec["servers"] = self.servers.format()
        return {
            SPEC_VARIABLE: json.dumps(spec),
            _RANK: str(rank),
            _LOCAL_RANK: str(rank),
            _WORLD_SIZE: str(world_size),
        }

    @classmethod
    def take(cls, environment: MutableMapping[str, str]) -> tuple[Self, Rendezvous | None]:
        """From a trainer's environment, in which nothing of it is left: the spec, and which of
        several ranks the process is.

        Raises:
            UserInputError: it was not started by a command.
        """
        text = environment.pop(SPEC_VARIABLE, None)
        if text is None:
            raise UserInputError(
                "a trainer process is started by the command, which gives it servers and a run "
                "folder. Type agentrl train --config FILE"
            )
        data = json.loads(text)
        spec = cls(servers=RunningServers.parse(data.pop("servers")), **data)
        rank, count = int(environment.pop(_RANK, "0")), int(environment.pop(_WORLD_SIZE, "1"))
        environment.pop(_LOCAL_RANK, None)
        if count == 1:
            return spec, None
        return spec, Rendezvous(index=rank, count=count, path=spec.rendezvous_path)

    def load_config(self, run_dir: Path) -> ExperimentConfig:
        """The run's configuration.

        Raises:
            StoreError: it is damaged.
        """
        return load_saved_config(run_dir, self.secrets)
