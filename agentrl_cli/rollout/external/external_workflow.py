"""Trajectories made by programs elsewhere: each attempt goes to a program that asks for a task."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from agentrl_cli.agents.agent_runner import AgentOutcome
from agentrl_cli.config.experiment import RolloutConfig
from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.errors import DatasetError, RewardError, RewardSignatureError
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.agent_workflow import AgentRolloutWorkflow
from agentrl_cli.rollout.external.session_routes import PREFIX, AdminRoutes
from agentrl_cli.rollout.external.task_queue import ExternalSession, TaskQueue
from agentrl_cli.rollout.reward_process import Score
from agentrl_cli.rollout.workflow import Attempt
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.credit import TokenSequence
from agentrl_cli.tracking.gateway import BaseGateway
from agentrl_cli.tracking.gateway_socket import KEY_VARIABLE, check_binding, open_listener
from agentrl_cli.tracking.session import Budget


class ExternalWorkflow(AgentRolloutWorkflow):
    """Makes trajectories by offering them to programs elsewhere.

    Args:
        listener: gives them out; shared by the workflows of a run.
        split: what the tasks are for; shown to programs.
        options: those of :class:`AgentRolloutWorkflow`.
    """

    def __init__(self, listener: ExternalListener, *, split: str, **options: Any) -> None:
        super().__init__({}, **options)
        self._listener = listener
        self._split = split

    def check_rows(self, rows: list[dict[str, Any]], where: str) -> None:
        """Refuses rows without a field that the reward function needs.

        Raises:
            RewardSignatureError: naming it.
            DatasetError: naming the row.
        """
        for number, row in enumerate(rows, start=1):
            if not isinstance(row.get("agent_name"), str | None):
                raise DatasetError(
                    f"{where}: row {number} (counted from 1) has the agent_name "
                    f"{row['agent_name']!r}; allowed is text"
                )
        if self._reward is not None:
            self._reward.check_rows(rows, where)

    async def arun_episode(
        self, engine: InferenceEngine, data: Mapping[str, Any]
    ) -> dict[str, TokenSequence]:
        """Not used: an attempt may take several sessions, which one episode cannot."""
        raise NotImplementedError("an attempt of a program elsewhere is made by arun_trajectory")

    async def arun_trajectory(self, engine: InferenceEngine, attempt: Attempt) -> Trajectory:
        """The record of one attempt by whichever program took it and brought it to its end.

        Raises:
            RunError: nobody has asked for a task for too long.
        """
        if not self._listener.is_open:
            client = self._open_client(engine, Sampling(), Budget())
            try:
                await self._listener.open(client.gateway)
            finally:
                await client.close()
        queue, config = self._listener.queue, self._rollout.external
        for _ in range(config.max_sessions_per_attempt):
            session = ExternalSession(queue, attempt, self._split, config.idle_timeout_seconds)
            await queue.wait_for_program(session)
            try:
                trajectory = await self._make_trajectory(engine, session.attempt, session)
            finally:
                queue.fail(session)
            if not session.is_lost:
                break
        return trajectory

    async def _run_agent(
        self, engine: InferenceEngine, client: TrackingClient, row: Mapping[str, Any], worker: Any
    ) -> AgentOutcome:
        session: ExternalSession = worker
        return await session.run(client)

    async def _score(
        self,
        client: TrackingClient,
        row: Mapping[str, Any],
        outcome: AgentOutcome,
        answer: str | None,
    ) -> Score:
        try:
            return await super()._score(client, row, outcome, answer)
        except RewardSignatureError as error:
            # Of a program's own task, which nobody has checked: its failure, not the run's.
            raise RewardError(str(error)) from None


class ExternalListener:
    """Where programs ask for tasks; opens once a gateway is there.

    The key is the user's, or a random one that is shown once.

    Args:
        rollout: where to listen, and for how long tasks wait.
        announce: shows a text to the user, and keeps it nowhere.
        key: of the user's choice; None: that in AGENTRL_API_KEY, if there is one.
        random_key: that of the listener whose place this one takes; None: one is made.
        port: where that one listened, if the configuration names no port.
        waits: how long tasks wait for programs: ``max_wait_seconds``, or for ever.

    Raises:
        UserInputError: the port cannot be used, or other machines would get in without a key.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        announce: Callable[[str], None],
        *,
        key: str | None = None,
        random_key: str | None = None,
        port: int | None = None,
        waits: Literal["limited", "ever"] = "limited",
    ) -> None:
        self._config = config = rollout.external
        self._announce = announce
        given = key or os.environ.get(KEY_VARIABLE) or None
        check_binding(config.host, given, "rollout.external.host")
        # Said before a model is loaded for minutes.
        self.port = config.port or port or 0
        """Where it listens; 0: at any free port, once it is open."""
        open_listener(self.port, config.host).close()
        if given is None and random_key is None:
            random_key = f"sk-agentrl-admin-{secrets.token_urlsafe(24)}"
        self.random_key = None if given is not None else random_key
        """The key, where the user has chosen none."""
        self._key = given or random_key or ""
        self.queue = TaskQueue(
            max_wait_seconds=config.max_wait_seconds if waits == "limited" else None,
            max_sessions=rollout.max_concurrent,
        )
        self.is_open = False
        self._lock = asyncio.Lock()

    async def open(self, gateway: BaseGateway) -> None:
        """Serves programs' requests beside the gateway's protocols; the first time only."""
        async with self._lock:
            if self.is_open:
                return
            routes = AdminRoutes(self.queue, self._key, gateway.model_name, gateway.limits)
            gateway.add_routes(routes.list_routes(), routes.knows, self.queue.stop)
            base_url = await gateway.serve(self.port, self._config.host)
            self.port = urlsplit(base_url).port or self.port
            url = base_url.removesuffix("/v1")
            self._announce(format_listener_notice(url, self.random_key or ""))
            self.is_open = True


def format_listener_notice(url: str, key: str) -> str:
    """What a person types to get tasks; ``key`` is empty where the person has chosen it."""
    shown = f"  export {KEY_VARIABLE}={key}\n" if key else ""
    return (
        "programs elsewhere get tasks here (docs/external-agents.md):\n\n"
        f"  export AGENTRL_URL={url}\n{shown}"
        f"  curl -X POST $AGENTRL_URL{PREFIX}/sessions "
        f'-H "Authorization: Bearer ${KEY_VARIABLE}"\n'
    )
