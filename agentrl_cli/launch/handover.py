"""What the command hands to the trainer process that it starts: servers, secrets, a pipe."""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.server import ServerEndpoint
from agentrl_cli.errors import UserInputError
from agentrl_cli.store.config_check import load_saved_config
from agentrl_cli.train.rank_place import RankPlace

#: Environment variables of the trainer process. They hold keys, and an agent (a child of the
#: trainer, or code inside it) has no business with them: they are removed as they are read.
SERVERS_VARIABLE = "AGENTRL_SERVERS"
_NO_SERVERS = "none"
_SECRETS_VARIABLE = "AGENTRL_SECRETS"
#: Which of several trainer processes it is; taken away too, it would say nothing to an agent.
_RANK_VARIABLE = "AGENTRL_RANK"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServers:
    """The engine servers of a run, as whoever talks to them needs to know them."""

    kind: Literal["vllm", "sglang"]
    endpoints: tuple[ServerEndpoint, ...]
    untied_head: bool
    """True: they keep an output head of their own, which is then published too."""
    num_gpus: int
    """GPUs of this machine."""
    shares_gpu: bool = False
    """True: the trainer computes on a GPU of theirs."""

    def format(self) -> str:
        """As the text of ``AGENTRL_SERVERS``; it holds the servers' keys."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """From :meth:`format`'s text."""
        data = json.loads(text)
        endpoints = tuple(ServerEndpoint(**endpoint) for endpoint in data.pop("endpoints"))
        return cls(endpoints=endpoints, **data)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOrders:
    """What a trainer process is started with, besides the run folder."""

    owner_pid: int
    """The command, which holds the run folder."""
    events_descriptor: int
    """Where it tells what happens; of other ranks than the first, -1: they tell nothing."""
    servers: RunningServers | None
    """None: the engine is in the first rank itself."""
    secrets: Sequence[Sequence[Any]]
    """What is masked in the run folder's configuration."""
    place: RankPlace | None = None
    """None: it trains alone."""

    def arguments(self) -> tuple[str, ...]:
        """Of the trainer's command line, after the run folder."""
        return (str(self.owner_pid), str(self.events_descriptor))

    def environment(self) -> dict[str, str]:
        """Additions to the trainer's environment."""
        secrets = {_SECRETS_VARIABLE: json.dumps(self.secrets)} if self.secrets else {}
        rank = {_RANK_VARIABLE: self.place.format()} if self.place is not None else {}
        servers = self.servers.format() if self.servers is not None else _NO_SERVERS
        return {SERVERS_VARIABLE: servers, **secrets, **rank}

    @classmethod
    def take(cls, arguments: Sequence[str], environment: MutableMapping[str, str]) -> Self:
        """From a trainer's command line (after the run folder) and environment.

        The environment no longer holds keys afterwards.

        Raises:
            UserInputError: it was not started by a command.
        """
        servers = environment.pop(SERVERS_VARIABLE, None)
        secrets = environment.pop(_SECRETS_VARIABLE, "[]")
        place = environment.pop(_RANK_VARIABLE, None)
        if len(arguments) != 2 or servers is None:
            raise UserInputError(
                "a trainer process is started by the command, which gives it servers and a run "
                "folder. Type agentrl train --config FILE"
            )
        owner_pid, events_descriptor = arguments
        return cls(
            owner_pid=int(owner_pid),
            events_descriptor=int(events_descriptor),
            servers=None if servers == _NO_SERVERS else RunningServers.parse(servers),
            secrets=json.loads(secrets),
            place=None if place is None else RankPlace.parse(place),
        )


def resolve_config(run_dir: Path, orders: TrainerOrders) -> ExperimentConfig:
    """The run's configuration, for a trainer process.

    Raises:
        StoreError: it is damaged.
    """
    config = load_saved_config(run_dir, orders.secrets)
    # The engine's kind may have been chosen by GPUs that this process does not see.
    kind = orders.servers.kind if orders.servers is not None else "embedded"
    return config.model_copy(update={"engine": config.engine.model_copy(update={"kind": kind})})
