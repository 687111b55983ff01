"""Trajectories made by programs elsewhere: an attempt is leased to whoever asks for one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from openai import AsyncOpenAI

from agentrl_cli.agents.runner import AgentOutcome
from agentrl_cli.config.experiment import ExternalConfig, GenerationConfig, RolloutConfig
from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.errors import DatasetError, RewardError, UserInputError
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.agent_workflow import AgentRolloutWorkflow, ClientFactory
from agentrl_cli.rollout.external_board import TaskBoard, TaskOffer
from agentrl_cli.rollout.external_door import ExternalDoor
from agentrl_cli.rollout.rewards import AsyncRewardWrapper
from agentrl_cli.rollout.workflow import Attempt, RolloutWorkflow
from agentrl_cli.tracking.admin import SessionEnd
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.export import ExportedInteraction
from agentrl_cli.tracking.session import Budget, Session


class ExternalAgentError(Exception):
    """The program said that it failed."""


class LeaseLostError(Exception):
    """The program gave its session back, or gave no sign of life for too long."""


class ExternalLease:
    """One session in the hands of a program."""

    def __init__(self, session: Session, offer: TaskOffer) -> None:
        self._session = session
        self._offer = offer
        self._final: SessionEnd | None = None
        self.ended: asyncio.Future[SessionEnd | None] = asyncio.get_running_loop().create_future()
        """What it ended with; None: it was given back."""

    @property
    def session(self) -> Session:
        """Its live side."""
        return self._session

    def describe(self) -> dict[str, Any]:
        """Its task and names."""
        attempt = self._offer.attempt
        return {
            "trajectory_id": attempt.id,
            "group_id": self._offer.shown_group_id,
            "task_id": attempt.task.task_id,
            "split": self._offer.split,
            "task": dict(attempt.task.row),
        }

    def keep_reward(self, reward: float | None) -> None:
        """Takes the outcome's reward, until the end."""
        self._final = SessionEnd(is_rewarded=True, reward=reward)

    def end(self, end: SessionEnd | None) -> None:
        """Ends it, with the reward that was given before if there is none now."""
        if self.ended.done():
            return
        if end is not None and not end.is_rewarded and self._final is not None:
            end = SessionEnd(
                is_rewarded=True,
                reward=self._final.reward,
                final_answer=end.final_answer,
                error=end.error,
            )
        self.ended.set_result(end)


@dataclass(slots=True)
class _LeaseRunner:
    """Runs an agent that is elsewhere: opens the door to its session and waits for the end."""

    board: TaskBoard
    offer: TaskOffer
    idle_timeout_seconds: float
    is_lost: bool = False
    framework: str = "a program elsewhere"
    gives_rewards: bool = True
    needs_base_url: bool = False
    needs_client: bool = False
    input_fields: tuple[str, ...] = ()

    @property
    def runner(self) -> _LeaseRunner:
        """Itself: there is nothing to build."""
        return self

    def get_runner(self, client: AsyncOpenAI, model: str) -> _LeaseRunner:
        """Itself."""
        return self

    async def run(
        self,
        data: Mapping[str, Any],
        client: AsyncOpenAI,
        *,
        model: str,
        base_url: str,
        api_key: str,
        http_client: Any,
        max_turns: int,
    ) -> AgentOutcome:
        """What the program says at the end.

        Raises:
            ExternalAgentError: it says that it failed.
            LeaseLostError: it is gone.
        """
        lease = ExternalLease(cast("TrackingClient", client).session, self.offer)
        self.board.open(lease, self.offer)
        state = "expired"
        try:
            end = await self._wait(lease)
            state = "abandoned" if end is None else "ended"
        finally:
            self.board.close(lease, state)
        if end is None:
            self.is_lost = True
            raise LeaseLostError("the program gave the session back")
        if end.error is not None:
            raise ExternalAgentError(end.error)
        return AgentOutcome(
            final_answer=end.final_answer,
            returned=_as_returned(end) if end.is_rewarded else None,
        )

    async def _wait(self, lease: ExternalLease) -> SessionEnd | None:
        while not lease.ended.done():
            left = self.idle_timeout_seconds - lease.session.idle_seconds
            if left <= 0:
                self.is_lost = True
                raise LeaseLostError(
                    f"the program gave no sign of life for {self.idle_timeout_seconds:g} s "
                    "(rollout.external.idle_timeout_seconds)"
                )
            await asyncio.wait({lease.ended}, timeout=left)
        return lease.ended.result()


class ExternalWorkflow(RolloutWorkflow):
    """Makes trajectories by offering them to programs elsewhere.

    Args:
        board: where the attempts wait; shared by the workflows of a run.
        door: the way to the board.
        reward: judges what a program did not reward itself.
        gconfig: sampling, where requests do not say otherwise.
        rollout: budgets, deadlines and credit.
        open_client: makes the client of one trajectory.
        split: what programs are told that the tasks are for.
        seed: see :class:`AgentRolloutWorkflow`.
    """

    def __init__(
        self,
        board: TaskBoard,
        door: ExternalDoor,
        *,
        reward: AsyncRewardWrapper | None,
        gconfig: GenerationConfig,
        rollout: RolloutConfig,
        open_client: ClientFactory,
        split: str,
        seed: int | None = None,
    ) -> None:
        self._board = board
        self._door = door
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
    ) -> dict[str, ExportedInteraction]:
        """Not used: a lease may be given out several times, which one episode cannot be."""
        raise NotImplementedError("an attempt of a program elsewhere is made by arun_trajectory")

    async def arun_trajectory(self, engine: InferenceEngine, attempt: Attempt) -> Trajectory:
        """The record of one attempt by whichever program took it and brought it to its end.

        Raises:
            RunError: nobody has asked for a task for too long.
        """
        await self._open_door(engine)
        for number in range(1, self._config.max_leases + 1):
            offer = await self._board.wait_for_taker(attempt, self._split)
            runner = _LeaseRunner(self._board, offer, self._config.idle_timeout_seconds)
            try:
                trajectory = await self._run(engine, offer, runner)
            finally:
                self._board.fail(offer)
            if not runner.is_lost or number == self._config.max_leases:
                break
        return trajectory

    async def _run(
        self, engine: InferenceEngine, offer: TaskOffer, runner: _LeaseRunner
    ) -> Trajectory:
        row = offer.attempt.task.row
        workflow = AgentRolloutWorkflow(
            {row.get("agent_name"): runner},
            reward=self._find_judge(row),
            gconfig=self._gconfig,
            rollout=self._rollout,
            open_client=self._open_client,
            seed=self._seed,
        )
        return await workflow.arun_trajectory(engine, offer.attempt)

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

    async def _open_door(self, engine: InferenceEngine) -> None:
        if self._door.is_open:
            return
        client = self._open_client(engine, Sampling(), Budget())
        try:
            await self._door.open(client.gateway, self._board)
        finally:
            await client.close()

    def close(self) -> None:
        """Ends the reward processes."""
        if self._reward is not None:
            self._reward.close()


def _as_returned(end: SessionEnd) -> Any:
    # None would ask the reward function; a reward that is not a number leaves it unscored.
    return float("nan") if end.reward is None else end.reward
