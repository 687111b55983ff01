"""The workflow that a YAML file names by its agent and its reward function."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl_cli.agents.agent_building import AgentSource
from agentrl_cli.agents.agent_environment import running_environment
from agentrl_cli.agents.agent_runner import AgentCall, AgentOutcome, run_in_thread
from agentrl_cli.config.experiment import GenerationConfig, RolloutConfig
from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.errors import (
    DatasetError,
    InlineLimitError,
    RewardError,
    UserInputError,
    format_nearest,
)
from agentrl_cli.log import get_logger
from agentrl_cli.records import (
    Boundary,
    Failure,
    FailureCause,
    Interaction,
    InteractionStatus,
    StopReason,
    Trajectory,
)
from agentrl_cli.rollout.reward_process import Score, parse_reward_result
from agentrl_cli.rollout.rewards import AsyncRewardWrapper, collect_arguments
from agentrl_cli.rollout.rollout_failures import describe_failure, run_with_deadline
from agentrl_cli.rollout.workers.worker_pool import RemoteAgent, WorkerAgents
from agentrl_cli.rollout.workers.worker_process import AgentWorker
from agentrl_cli.rollout.workflow import (
    Attempt,
    RolloutWorkflow,
    find_last_answer,
    find_last_reward,
    find_outcome,
)
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.credit import TokenSequence
from agentrl_cli.tracking.session import Budget, raise_user_errors

_log = get_logger(__name__)

#: After the deadline calls are refused; an agent may return with what it has.
_WIND_DOWN_SECONDS = 5.0

#: Opens the client of one trajectory; anything with TrackingClient's methods will do.
ClientFactory = Callable[[InferenceEngine, Sampling, Budget], TrackingClient]


class AgentRolloutWorkflow(RolloutWorkflow):
    """Runs an agent of any framework on a row, and rewards what it did.

    Args:
        agents: those that run here, by name; None is the one for rows without ``agent_name``.
        workers: run the agents once they are started, which is done when one cannot run here;
            None: agents run here, come what may.
        reward: judges what an agent did not reward itself.
        gconfig: sampling, where the agent's requests do not say otherwise.
        rollout: budgets, deadline, credit and export style.
        open_client: makes the client of one trajectory.
        seed: with one, a trajectory samples the same whenever it is made again with the
            same weights; None: free-running.
    """

    def __init__(
        self,
        agents: Mapping[str | None, AgentSource],
        *,
        workers: WorkerAgents | None = None,
        reward: AsyncRewardWrapper | None,
        gconfig: GenerationConfig,
        rollout: RolloutConfig,
        open_client: ClientFactory,
        seed: int | None = None,
    ) -> None:
        self._sources = {**agents}
        self._workers = workers
        self._rollout = rollout
        self._open_client = open_client
        self._seed = seed
        self.use(rollout, gconfig, reward)

    def check_rows(self, rows: list[dict[str, Any]], where: str) -> None:
        """Refuses rows without an agent, without anything to ask it, or without a reward's field.

        Raises:
            DatasetError: with the number of the row.
            RewardSignatureError: the reward function needs a field that no row has.
        """
        for number, row in enumerate(rows, start=1):
            place = f"{where}: row {number} (counted from 1)"
            source = self._find_source(row, is_inline=self._is_inline, place=place)
            if isinstance(source, RemoteAgent):
                source.check_row(row, place)
            fields = source.runner.input_fields
            if fields and not any(row.get(name) is not None for name in fields):
                raise DatasetError(
                    f"{place} has nothing to ask the agent: its fields are "
                    f"{', '.join(map(repr, row))}; one of {', '.join(fields)} is needed"
                )
        super().check_rows(rows, where)

    async def arun_episode(
        self, engine: InferenceEngine, data: Mapping[str, Any]
    ) -> dict[str, TokenSequence]:
        """The interactions of one run on the row ``data``. Raises what the run raises."""
        async with self._admit("the agent") as worker:
            client = self._open(engine, seed=None)
            try:
                outcome = await run_with_deadline(
                    self._run_agent(engine, client, data, worker), self.timeout_seconds, "the agent"
                )
                await self._score(client, data, outcome, _find_answer(outcome, client))
                client.apply_reward_discount(self._rollout.turn_discount)
                return client.export_interactions(self._rollout.export_style)
            finally:
                await client.close()

    async def arun_trajectory(self, engine: InferenceEngine, attempt: Attempt) -> Trajectory:
        """The record of one attempt, its partial interactions kept when it fails.

        Raises:
            UserInputError: a mistake that would repeat itself in every trajectory.
        """
        is_inline, num_limits = self._is_inline, InlineLimitError.num_raised
        # Outside of every limit of time: it is not the agent that waits for a worker.
        async with self._admit(attempt.id) as worker:
            trajectory = await self._make_trajectory(engine, attempt, worker)
        # Of agents that ran meanwhile nobody knows which one met the limit.
        if not is_inline or InlineLimitError.num_raised == num_limits:
            return trajectory
        if not await self._start_workers():
            return trajectory
        async with self._admit(attempt.id) as worker:
            return await self._make_trajectory(engine, attempt, worker)

    async def _start_workers(self) -> bool:
        """Has agents run in workers from now on; False: they cannot."""
        if self._workers is None:
            return False
        try:
            is_first = await run_in_thread(self._workers.start, "agent workers")
        except UserInputError as error:
            _log.warning("rollout.agent_mode: subprocess was tried too: %s", error)
            return False
        if is_first:
            _log.warning(
                "the agent cannot run inline, so it runs as with rollout.agent_mode: subprocess "
                "from now on (set that to start so): %s",
                InlineLimitError.last_message,
            )
        return True

    async def _make_trajectory(
        self, engine: InferenceEngine, attempt: Attempt, worker: Any
    ) -> Trajectory:
        row, started, started_at = attempt.task.row, time.perf_counter(), time.time()
        client = self._open(engine, None if self._seed is None else f"{self._seed}/{attempt.id}")
        client.session.resume_from(self.find_finished_turns(attempt))
        score, answer, failure, boundary = Score(reward=None), None, None, None
        try:
            outcome = await self._run_to_its_end(engine, client, attempt, worker)
            answer, boundary = _find_answer(outcome, client), Boundary.REWARD
            score = await self._score(client, row, outcome, answer)
        except UserInputError:
            raise
        except Exception as error:
            failure = _describe(error, client, boundary)
        finally:
            await client.close()
        raise_user_errors([client.session])
        if failure is not None and failure.cause is FailureCause.POLICY:
            last = _find_last(client)
            if last is not None and last.reward is None:
                client.set_final_reward(self.policy_failure_reward)
        client.apply_reward_discount(self._rollout.turn_discount)
        interactions = client.interactions
        is_late = failure is not None and failure.boundary is Boundary.TIMEOUT
        return attempt.begin_trajectory(
            agent_name=row.get("agent_name"),
            interactions=interactions,
            reward=find_outcome(interactions, failure, score.reward),
            reward_parts=score.parts,
            final_answer=answer,
            stop_reason=StopReason.MAX_SECONDS if is_late else client.session.stop_reason,
            failure=failure,
            started_at=started_at,
            seconds=time.perf_counter() - started,
            reward_seconds=score.seconds,
        )

    def log_to(self, folder: Path) -> None:
        """Says where what agents in other processes print is kept."""
        if self._workers is not None:
            self._workers.log_to(folder)

    def _open(self, engine: InferenceEngine, seed: str | None) -> TrackingClient:
        assert self._sampling is not None
        assert self._budget is not None
        number = None if seed is None else _derive_seed(seed)
        return self._open_client(engine, replace(self._sampling, seed=number), self._budget)

    @property
    def _is_inline(self) -> bool:
        return self._workers is None or not self._workers.agents

    def _find_source(
        self, row: Mapping[str, Any], *, is_inline: bool, place: str = "the row"
    ) -> AgentSource | RemoteAgent:
        agents: Mapping[str | None, Any] = self._sources
        if self._workers is not None and not is_inline:
            agents = self._workers.agents
        if len(agents) == 1:
            # There is nothing for rows to choose.
            agents = {None: next(iter(agents.values())), **agents}
        name = row.get("agent_name")
        if name not in agents:
            names = [n for n in agents if n is not None]
            problem = (
                f"names the agent {name!r}, which is not in agents"
                if name is not None
                else "has no agent_name, and there is no agent_builder_path for such rows"
            )
            raise DatasetError(f"{place} {problem}; {format_nearest(str(name), names)}")
        found: AgentSource | RemoteAgent = agents[name]
        return found

    def _admit(self, label: str) -> AbstractAsyncContextManager[AgentWorker | None]:
        """A worker for one trajectory, as soon as there is one; None where agents run here."""
        if self._workers is None or self._is_inline:
            return nullcontext()
        return self._workers.take(label)

    async def _run_to_its_end(
        self, engine: InferenceEngine, client: TrackingClient, attempt: Attempt, worker: Any
    ) -> AgentOutcome:
        """What the agent ended with. Raises what it raised.

        An agent that its turns, its tokens or the context ended, and that had no answer to that,
        is judged by what it has said. One that ran out of time is not: the machine may have been
        slow, not the agent.
        """
        try:
            return await run_with_deadline(
                self._run_agent(engine, client, attempt.task.row, worker),
                self.timeout_seconds,
                f"trajectory {attempt.id}",
                grace=min(_WIND_DOWN_SECONDS, 0.2 + self.timeout_seconds / 10),
                describe_late=worker.describe_late if isinstance(worker, AgentWorker) else None,
            )
        except UserInputError:
            raise
        except Exception as error:
            if _describe(error, client).boundary is not Boundary.BUDGET:
                raise
            if client.session.stop_reason is None:
                # The framework counted the turns itself.
                client.session.stop_reason = StopReason.MAX_TURNS
            is_rewarded = any(i.reward is not None for i in client.interactions)
            if _find_last(client) is None or (self._reward is None and not is_rewarded):
                raise
            return AgentOutcome()

    async def _run_agent(
        self, engine: InferenceEngine, client: TrackingClient, row: Mapping[str, Any], worker: Any
    ) -> AgentOutcome:
        source = self._find_source(row, is_inline=worker is None)
        options: dict[str, Any] = {
            "row": row,
            "client": client,
            "model": engine.model_name,
            "api_key": client.session_key,
            "http_client": client.gateway.http_client,
            "max_turns": self._rollout.max_turns,
        }
        if isinstance(source, AgentSource):
            with running_environment(client.gateway, client.session_key):
                source.check_inline()
                runner = source.get_runner(client, engine.model_name)
                base_url = str(client.base_url)
                if runner.needs_base_url:
                    base_url = await client.gateway.serve()
                return await runner.run(AgentCall(base_url=base_url, **options))
        assert self._workers is not None
        source.check_row(row, "the row")
        try:
            call = AgentCall(base_url=await client.gateway.serve(), **options)
            outcome: AgentOutcome = await worker.run(source.spec, call)
            return outcome
        finally:
            # It is free while the trajectory is judged.
            self._workers.give_back(worker)

    async def _score(
        self,
        client: TrackingClient,
        row: Mapping[str, Any],
        outcome: AgentOutcome,
        answer: str | None,
    ) -> Score:
        """The trajectory's reward, laid on the interactions that it is for."""
        if isinstance(outcome.returned, Mapping):
            _set_rewards(client, outcome.returned)
            return Score(reward=find_last_reward(client.interactions))
        last = _find_last(client)
        if outcome.returned is not None:
            reward, _ = parse_reward_result(outcome.returned)
            score = Score(reward=reward)
        elif last is not None and last.reward is not None:
            # The agent has rewarded its last call through the client: nothing is left to judge.
            return Score(reward=last.reward)
        elif self._reward is not None:
            supplied = collect_arguments(row, last, answer)
            score = await self._reward.score(**supplied)
        elif any(i.reward is not None for i in client.interactions):
            return Score(reward=find_last_reward(client.interactions))
        else:
            raise RewardError(
                "nothing gave a reward: the agent returned "
                f"{'text' if outcome.final_answer is not None else 'None'} and no reward function "
                "is set. Set reward_fn_path, or return a number from the agent"
            )
        if last is not None:
            client.set_final_reward(score.reward)
        return score


def _describe(
    error: Exception, client: TrackingClient, boundary: Boundary | None = None
) -> Failure:
    own_urls = (str(client.base_url), *client.gateway.socket_urls)
    return describe_failure(error, boundary=boundary, sessions=(client.session,), own_urls=own_urls)


def _find_answer(outcome: AgentOutcome, client: TrackingClient) -> str | None:
    if outcome.final_answer is not None:
        return outcome.final_answer
    return find_last_answer(client.interactions)


def _find_last(client: TrackingClient) -> Interaction | None:
    """The completed call that ended last: the one that a final reward is laid on."""
    completed = [i for i in client.interactions if i.status is InteractionStatus.COMPLETED]
    return max(completed, key=lambda i: i.ended or 0) if completed else None


def _set_rewards(client: TrackingClient, rewards: Mapping[Any, Any]) -> None:
    """Lays every reward of a dict on its interaction, or none of them."""
    known = {i.id for i in client.interactions if i.status is InteractionStatus.COMPLETED}
    for interaction_id, reward in rewards.items():
        if interaction_id not in known:
            raise RewardError(
                f"the agent returned a reward for {interaction_id!r}, which is no completed "
                f"interaction of this trajectory; {format_nearest(str(interaction_id), known)}. "
                "Use the id of the completion: response.id"
            )
        parse_reward_result(reward)
    for interaction_id, reward in rewards.items():
        client.set_reward(interaction_id, reward)


def _derive_seed(text: str) -> int:
    """A seed from a text, the same in every process and version."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
