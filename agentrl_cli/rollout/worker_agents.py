"""The agents of a configuration, run by worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_cli.agents.runner import AgentOutcome
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import ConfigError, DatasetError
from agentrl_cli.rollout.worker_lease import AgentTask, WorkerLease
from agentrl_cli.rollout.worker_pool import WorkerPool
from agentrl_cli.rollout.worker_process import AgentSpec
from agentrl_cli.tracking.client import TrackingClient

#: The log of what agents print, in the run's folder of logs.
LOG_NAME = "agent-workers.log"


@dataclass(frozen=True, slots=True)
class AgentTraits:
    """What is known of an agent that lives in other processes."""

    framework: str
    gives_rewards: bool
    input_fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RemoteAgent:
    """An agent that workers build and run."""

    spec: AgentSpec
    runner: AgentTraits
    """What it is."""

    async def run(
        self,
        worker: WorkerLease,
        client: TrackingClient,
        row: Mapping[str, Any],
        *,
        model: str,
        max_turns: int,
    ) -> AgentOutcome:
        """What it ended with on one row. Raises as :meth:`WorkerLease.run`."""
        task = AgentTask(
            agent=self.spec,
            row=row,
            model=model,
            base_url=await client.gateway.serve(),
            api_key=client.session_key,
            max_turns=max_turns,
        )
        return await worker.run(task, client)

    def check_row(self, row: Mapping[str, Any], place: str) -> None:
        """Refuses a row that would not reach a worker as it is.

        Raises:
            DatasetError: naming the field.
        """
        for where, value in _find_strange("", row):
            raise DatasetError(
                f"{place}: {where.lstrip('.')} is {type(value).__name__}, which does not reach an "
                "agent in another process as it is. Allowed: text, numbers, true, false, null, "
                "lists, and mappings with text as keys. Convert it, or type "
                "rollout.agent_mode=inline"
            )


class WorkerAgents:
    """All agents of a configuration and the workers that run them.

    Raises:
        UserInputError: an agent cannot be built; found out in a process of its own.
        RunError: no process can be started.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        specs = list_agent_specs(config)
        for spec in specs.values():
            _check_kwargs(spec)
        rollout = config.rollout
        self._pool = WorkerPool(
            rollout.count_parallel(),
            max_tasks=rollout.worker_max_tasks,
            max_memory_gib=rollout.worker_max_memory_gib,
        )
        try:
            traits = self._pool.prepare(list(specs.values()))
        except BaseException:
            self._pool.close()
            raise
        self.agents: dict[str | None, RemoteAgent] = {
            name: RemoteAgent(
                spec,
                AgentTraits(told["framework"], told["gives_rewards"], tuple(told["input_fields"])),
            )
            for (name, spec), told in zip(specs.items(), traits, strict=True)
        }

    def lease(self, label: str) -> AbstractAsyncContextManager[WorkerLease]:
        """A worker for one trajectory, as soon as there is one."""
        return self._pool.lease(label)

    def log_to(self, folder: Path) -> None:
        """Says where what agents print is kept."""
        self._pool.log_to(folder / LOG_NAME)

    def close(self) -> None:
        """Ends the workers; may be called twice."""
        self._pool.close()


def list_agent_specs(config: ExperimentConfig) -> dict[str | None, AgentSpec]:
    """The agents by name; None is the one for rows without ``agent_name``."""
    specs: dict[str | None, AgentSpec] = {}
    if config.agent_builder_path is not None:
        specs[None] = AgentSpec(
            path=config.agent_builder_path,
            kwargs=dict(config.agent_builder_kwargs),
            key="agent_builder_path",
        )
    for name, agent in config.agents.items():
        specs[name] = AgentSpec(
            path=agent.agent_builder_path,
            kwargs=dict(agent.agent_builder_kwargs),
            key=f"agents.{name}.agent_builder_path",
        )
    return specs


def _check_kwargs(spec: AgentSpec) -> None:
    key = spec.key.replace("agent_builder_path", "agent_builder_kwargs")
    for where, value in _find_strange("", spec.kwargs):
        raise ConfigError(
            f"{key}{where}: {value!r} is {type(value).__name__}, which does not reach an agent in "
            "another process as it is. Write it in quotes, so that it is text, or type "
            "rollout.agent_mode=inline"
        )


def _find_strange(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What JSON would change or refuse, and where it is."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if type(name) is not str:
                yield f"{where} (its key {name!r})", name
            yield from _find_strange(f"{where}.{name}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _find_strange(f"{where}[{index}]", item)
    elif not (value is None or isinstance(value, str | bool | int | float)):
        yield where, value
