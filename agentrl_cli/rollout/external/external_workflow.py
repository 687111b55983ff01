"""Trajectories made by programs elsewhere: each attempt goes to a program that asks for a task."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from openai import AsyncOpenAI

from agentrl_cli.agents.agent_runner import AgentCall, AgentOutcome, AgentRunner
from agentrl_cli.config.experiment import ExternalConfig, GenerationConfig, RolloutConfig
from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.errors import DatasetError, RewardError, UserInputError
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.agent_workflow import AgentRolloutWorkflow, ClientFactory
from agentrl_cli.rollout.external.session_routes import PREFIX, AdminRoutes, SessionEnd
from agentrl_cli.rollout.external.task_queue import PendingTask, TaskQueue
from agentrl_cli.rollout.rewards import AsyncRewardWrapper
from agentrl_cli.rollout.workflow import Attempt, RolloutWorkflow
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.credit import TokenSequence
from agentrl_cli.tracking.gateway import BaseGateway
from agentrl_cli.tracking.gateway_socket import KEY_VARIABLE, check_binding, open_listener
from agentrl_cli.tracking.session import Budget, Session


class ExternalAgentError(Exception):
    """The program said that it failed."""


class SessionLostError(Exception):
    """The program gave its session back, or made no request for too long."""


class ExternalSession(AgentRunner):
    """One session in the hands of a program; runs an agent that is elsewhere.

    Args:
        queue: gives it to the program.
        pending: the attempt that it is for.
        idle_timeout_seconds: without a request for so long, it is lost.
    """

    framework = "a program elsewhere"
    gives_rewards = True
    input_fields = ()
    session: Session
    """Its live side; there once it runs."""

    def __init__(self, queue: TaskQueue, pending: PendingTask, idle_timeout_seconds: float) -> None:
        self._queue = queue
        self._pending = pending
        self._idle_timeout_seconds = idle_timeout_seconds
        self._reward: SessionEnd | None = None
        self._ended: asyncio.Future[SessionEnd | None] = asyncio.get_running_loop().create_future()
        self.is_lost = False
        """True: the program gave it back, or is gone."""

    @property
    def runner(self) -> ExternalSession:
        """Itself: there is nothing to build."""
        return self

    def get_runner(self, client: AsyncOpenAI, model: str) -> ExternalSession:
        """Itself."""
        return self

    async def run(self, call: AgentCall) -> AgentOutcome:
        """What the program says at the end.

        Raises:
            ExternalAgentError: it says that it failed.
            SessionLostError: it is gone.
        """
        self.session = cast("TrackingClient", call.client).session
        self._queue.open(self, self._pending)
        state = "expired"
        try:
            end = await self._wait()
            state = "abandoned" if end is None else "ended"
        finally:
            self._queue.close(self, state)
        if end is None:
            self.is_lost = True
            raise SessionLostError("the program gave the session back")
        if end.error is not None:
            raise ExternalAgentError(end.error)
        returned = None
        if end.is_rewarded:
            # None would ask the reward function; a reward that is not a number leaves it unscored.
            returned = float("nan") if end.reward is None else end.reward
        return AgentOutcome(final_answer=end.final_answer, returned=returned)

    async def _wait(self) -> SessionEnd | None:
        while not self._ended.done():
            left = self._idle_timeout_seconds - self.session.idle_seconds
            if left <= 0:
                self.is_lost = True
                raise SessionLostError(
                    f"the program made no request for {self._idle_timeout_seconds:g} s "
                    "(rollout.external.idle_timeout_seconds)"
                )
            await asyncio.wait({self._ended}, timeout=left)
        return self._ended.result()

    def describe(self) -> dict[str, Any]:
        """Its task and names, for the program."""
        attempt = self._pending.attempt
        return {
            "trajectory_id": attempt.id,
            "group_id": self._pending.shown_group_id,
            "task_id": attempt.task.task_id,
            "split": self._pending.split,
            "task": dict(attempt.task.row),
        }

    def keep_reward(self, reward: float | None) -> None:
        """Takes the outcome's reward, until the end."""
        self._reward = SessionEnd(is_rewarded=True, reward=reward)

    def end(self, end: SessionEnd | None) -> None:
        """Ends it, with the reward that was given before if there is none now; None: given back."""
        if self._ended.done():
            return
        if end is not None and not end.is_rewarded and self._reward is not None:
            end = replace(self._reward, final_answer=end.final_answer, error=end.error)
        self._ended.set_result(end)


class ExternalWorkflow(RolloutWorkflow):
    """Makes trajectories by offering them to programs elsewhere.

    Args:
        queue: where the attempts wait; shared by the workflows of a run.
        listener: the way to the queue.
        reward: judges what a program did not reward itself.
        gconfig: sampling, where requests do not say otherwise.
        rollout: budgets, deadlines and credit.
        open_client: makes the client of one trajectory.
        split: what the tasks are for; shown to programs.
        seed: see :class:`AgentRolloutWorkflow`.
    """

    def __init__(
        self,
        queue: TaskQueue,
        listener: ExternalListener,
        *,
        reward: AsyncRewardWrapper | None,
        gconfig: GenerationConfig,
        rollout: RolloutConfig,
        open_client: ClientFactory,
        split: str,
        seed: int | None = None,
    ) -> None:
        self._queue = queue
        self._listener = listener
        self._reward = reward
        self._gconfig = gconfig
        self._rollout = rollout
        self._open_client = open_client
        self._split = split
        self._seed = seed
        self.use(rollout)

    @property
    def _config(self) -> ExternalConfig:
        return self._rollout.external

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
        await self._open_listener(engine)
        for number in range(1, self._config.max_sessions_per_attempt + 1):
            pending = await self._queue.wait_for_program(attempt, self._split)
            session = ExternalSession(self._queue, pending, self._config.idle_timeout_seconds)
            try:
                trajectory = await self._run(engine, pending.attempt, session)
            finally:
                self._queue.fail(pending)
            if not session.is_lost or number == self._config.max_sessions_per_attempt:
                break
        return trajectory

    async def _run(
        self, engine: InferenceEngine, attempt: Attempt, session: ExternalSession
    ) -> Trajectory:
        row = attempt.task.row
        workflow = AgentRolloutWorkflow(
            {row.get("agent_name"): session},
            reward=self._find_judge(row),
            gconfig=self._gconfig,
            rollout=self._rollout,
            open_client=self._open_client,
            seed=self._seed,
        )
        return await workflow.arun_trajectory(engine, attempt)

    def _find_judge(self, row: Mapping[str, Any]) -> AsyncRewardWrapper | None:
        """The reward function; of a program's own task, which nobody has checked, maybe its
        refusal: that is the trajectory's failure, not the run's."""
        if self._reward is None:
            return None
        try:
            self._reward.check_rows([{**row}], "the program's task")
        except UserInputError as error:
            problem = str(error)
        else:
            return self._reward

        async def refuse() -> float:
            raise RewardError(problem)

        return AsyncRewardWrapper(refuse)

    async def _open_listener(self, engine: InferenceEngine) -> None:
        if self._listener.is_open:
            return
        client = self._open_client(engine, Sampling(), Budget())
        try:
            await self._listener.open(client.gateway, self._queue)
        finally:
            await client.close()

    def close(self) -> None:
        """Ends the reward processes."""
        if self._reward is not None:
            self._reward.close()


class ExternalListener:
    """Where programs ask for tasks; opens once a gateway is there.

    The key is the user's, or a random one that is shown once.

    Args:
        config: where to listen.
        announce: shows a text to the user, and keeps it nowhere.
        key: of the user's choice; None: that in AGENTRL_API_KEY, if there is one.

    Raises:
        UserInputError: the port cannot be used, or other machines would get in without a key.
    """

    def __init__(
        self, config: ExternalConfig, announce: Callable[[str], None], *, key: str | None = None
    ) -> None:
        self._config = config
        self._announce = announce
        given = key or os.environ.get(KEY_VARIABLE) or None
        check_binding(config.host, given, "rollout.external.host")
        # Said before a model is loaded for minutes.
        open_listener(config.port or 0, config.host).close()
        self._is_own = given is None
        self._key = given or f"sk-agentrl-admin-{secrets.token_urlsafe(24)}"
        self.is_open = False
        self._lock = asyncio.Lock()

    async def open(self, gateway: BaseGateway, queue: TaskQueue) -> None:
        """Serves the queue's requests beside the gateway's protocols; the first time only."""
        async with self._lock:
            if self.is_open:
                return
            routes = AdminRoutes(queue, self._key, gateway.model_name, gateway.limits)
            gateway.add_routes(routes.list_routes(), queue.stop)
            base_url = await gateway.serve(self._config.port or 0, self._config.host)
            shown_key = self._key if self._is_own else ""
            self._announce(format_listener_notice(base_url.removesuffix("/v1"), shown_key))
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
