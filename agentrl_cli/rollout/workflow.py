"""Workflows: how one trajectory is made. Yours derive from ``RolloutWorkflow``."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agentrl_cli.config.experiment import GenerationConfig, RolloutConfig
from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.errors import UserInputError
from agentrl_cli.records import (
    Boundary,
    ExportStyle,
    Failure,
    FailureCause,
    Interaction,
    InteractionStatus,
    Trajectory,
)
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.reward_process import Score
from agentrl_cli.rollout.rewards import AsyncRewardWrapper, collect_arguments
from agentrl_cli.rollout.rollout_failures import describe_failure, run_with_deadline
from agentrl_cli.tracking.credit import TokenSequence, compute_turn_returns
from agentrl_cli.tracking.session import (
    Budget,
    collect_sessions,
    list_interactions,
    raise_user_errors,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One of the trajectories of a task's group."""

    task: Task
    sample_index: int = 0
    step: int = 0
    """The round of its task, until a step takes the trajectory; of an evaluation, the step after
    which it is made."""
    earlier: tuple[Interaction, ...] = ()
    """The calls of the try before this one, which failed."""

    @property
    def id(self) -> str:
        """``<group_id>/<sample_index>``, the trajectory's id."""
        return f"{self.task.group_id}/{self.sample_index}"

    def begin_trajectory(self, **fields: Any) -> Trajectory:
        """The attempt's record, with further fields filled in."""
        return Trajectory(
            id=self.id,
            group_id=self.task.group_id,
            task_id=self.task.task_id,
            sample_index=self.sample_index,
            step=self.step,
            task=self.task.row,
            **fields,
        )


class RolloutWorkflow(ABC):
    """Makes trajectories. Write ``arun_episode``; agentrl calls ``arun_trajectory``.

    Inside ``arun_episode``: make a ``TrackingClient`` (one per trajectory), run anything on
    it, set rewards, return ``client.export_interactions(...)``. One workflow object makes
    many trajectories at once, so keep what belongs to one of them in local variables.
    """

    timeout_seconds: float = 600.0
    """Deadline of one trajectory."""
    turn_discount: float = 1.0
    """For episodes that set rewards and hand out no credit themselves."""
    policy_failure_reward: float | None = 0.0
    """Of a trajectory that failed through what the policy sampled; None: unscored."""

    retry_from: Literal["start", "finished_turns"] = "start"
    """What an attempt uses of its ``earlier`` calls."""

    _sampling: Sampling | None = None
    _budget: Budget | None = None
    _reward: AsyncRewardWrapper | None = None

    def use(
        self,
        rollout: RolloutConfig,
        gconfig: GenerationConfig | None = None,
        reward: AsyncRewardWrapper | None = None,
    ) -> None:
        """Takes deadline, turn discount and the reward of failures from a configuration, what
        holds for a ``TrackingClient`` that is made without ``sampling`` or ``budget``, and what
        judges an episode that sets no reward (None: what did so before)."""
        self._reward = reward or self._reward
        self.timeout_seconds = rollout.timeout_seconds
        self.turn_discount = rollout.turn_discount
        self.retry_from = rollout.retry_from
        self.policy_failure_reward = rollout.policy_failure_reward
        self._budget = Budget(
            max_turns=rollout.max_turns,
            max_tokens=rollout.max_tokens_per_trajectory,
            max_seconds=rollout.timeout_seconds,
        )
        if gconfig is not None:
            self._sampling = Sampling(
                max_tokens=gconfig.max_tokens,
                temperature=gconfig.temperature,
                top_p=gconfig.top_p,
            )

    @abstractmethod
    async def arun_episode(
        self, engine: InferenceEngine, data: Mapping[str, Any]
    ) -> dict[str, TokenSequence]:
        """The interactions of one attempt at the row ``data``, by id."""

    async def arun_trajectory(self, engine: InferenceEngine, attempt: Attempt) -> Trajectory:
        """The record of one attempt; whatever goes wrong in it is a failure on the record.

        Raises:
            UserInputError: a mistake that would repeat itself in every trajectory.
        """
        started, started_at = time.perf_counter(), time.time()
        earlier = self.find_finished_turns(attempt)
        with collect_sessions(self._sampling, self._budget, earlier) as sessions:
            failure = style = boundary = None
            score = Score(reward=None)
            try:
                exported = await run_with_deadline(
                    self.arun_episode(engine, dict(attempt.task.row)),
                    self.timeout_seconds,
                    f"trajectory {attempt.id}",
                )
                # A client that was exported early knows nothing of later rewards.
                latest = {i.id: i for i in list_interactions(sessions)}
                found = collect_interactions(exported)
                interactions = tuple(latest.get(i.id, i) for i in found)
                style, boundary = find_style(exported.values()), Boundary.REWARD
                if self._reward is not None and all(i.reward is None for i in interactions):
                    interactions, score = await self._judge(attempt.task.row, interactions)
                interactions = self._with_returns(interactions)
            except UserInputError:
                raise
            except Exception as error:
                failure = describe_failure(error, boundary=boundary, sessions=sessions)
                interactions = list_interactions(sessions)
                if failure.cause is FailureCause.POLICY:
                    scored = reward_failure(interactions, self.policy_failure_reward)
                    interactions = self._with_returns(scored)
            raise_user_errors(sessions)
        return attempt.begin_trajectory(
            interactions=interactions,
            reward=find_outcome(interactions, failure, find_last_reward(interactions)),
            reward_parts=score.parts,
            reward_seconds=score.seconds,
            export_style=style,
            final_answer=find_last_answer(interactions) if failure is None else None,
            failure=failure,
            started_at=started_at,
            seconds=time.perf_counter() - started,
        )

    def find_finished_turns(self, attempt: Attempt) -> tuple[Interaction, ...]:
        """The calls whose replies the attempt's own calls get again."""
        return attempt.earlier if self.retry_from == "finished_turns" else ()

    async def _judge(
        self, row: Mapping[str, Any], interactions: tuple[Interaction, ...]
    ) -> tuple[tuple[Interaction, ...], Score]:
        """The interactions with the reward function's reward on the call that ended last."""
        completed = [i for i in interactions if i.status is InteractionStatus.COMPLETED]
        if self._reward is None or not completed:
            return interactions, Score(reward=None)
        last = max(completed, key=_ended_at)
        arguments = collect_arguments(row, last, find_last_answer(interactions))
        score = await self._reward.score(**arguments)
        # Credit that the episode handed out was of no reward.
        judged = replace(last, reward=score.reward)
        return (
            tuple(replace(judged if i is last else i, turn_return=None) for i in interactions),
            score,
        )

    def _with_returns(self, interactions: tuple[Interaction, ...]) -> tuple[Interaction, ...]:
        """The interactions with their returns, handed out here if the episode did not."""
        if any(i.turn_return is not None for i in interactions):
            return interactions
        returns = compute_turn_returns(interactions, self.turn_discount)
        return tuple(replace(i, turn_return=returns.get(i.id)) for i in interactions)

    def check_rows(self, rows: list[dict[str, Any]], where: str) -> None:
        """Refuses a dataset (``where``: its config key) that this workflow cannot run on.

        Raises:
            UserInputError: naming the row and the field.
        """
        if self._reward is not None:
            self._reward.check_rows(rows, where)

    def log_to(self, folder: Path) -> None:  # noqa: B027 - optional
        """Tells where processes that this workflow starts may write their logs."""

    def close(self) -> None:
        """Ends what the workflow started; called once after the last trajectory."""
        if self._reward is not None:
            self._reward.close()


def reward_failure(
    interactions: tuple[Interaction, ...], reward: float | None
) -> tuple[Interaction, ...]:
    """The interactions of a policy's failure, with its reward on the completed call that ended
    last; one that the agent has rewarded itself keeps its own."""
    completed = [i for i in interactions if i.status is InteractionStatus.COMPLETED]
    last = max(completed, key=_ended_at)
    own = reward if last.reward is None else last.reward
    return tuple(replace(i, reward=own) if i is last else i for i in interactions)


def find_outcome(
    interactions: tuple[Interaction, ...], failure: Failure | None, reward: float | None
) -> float | None:
    """The trajectory's reward: ``reward`` if it ended by itself, that of its last call if the
    policy failed, None if its surroundings did, and without any completed call."""
    completed = [i for i in interactions if i.status is InteractionStatus.COMPLETED]
    if not completed or (failure is not None and failure.cause is not FailureCause.POLICY):
        return None
    return reward if failure is None else max(completed, key=_ended_at).reward


class AgentWorkflow(ABC):
    """The typed base of agents that are objects: a builder may return one.

    ``extra_kwargs`` holds ``client``, ``base_url``, ``api_key``, ``http_client``, ``model``
    and ``max_turns``; a signature that names some of them gets only those.
    """

    @abstractmethod
    async def run(
        self, data: Mapping[str, Any], **extra_kwargs: Any
    ) -> float | int | bool | str | Mapping[str, float] | None:
        """Runs the agent on one row.

        Returns:
            A reward; a dict {interaction id: reward}; or, for the reward function to
            judge, the final answer as text or None (the last reply's text is judged).
        """


def collect_interactions(exported: Any) -> tuple[Interaction, ...]:
    """The interactions inside a workflow's result, in the order in which the calls arrived.

    Raises:
        TypeError: the result is not what ``export_interactions`` gives.
    """
    if not isinstance(exported, Mapping):
        hint = ": is there a return?" if exported is None else ""
        raise TypeError(
            f"arun_episode returned {type(exported).__name__}{hint}. Allowed: the dict of "
            "client.export_interactions(style)"
        )
    found: dict[str, Interaction] = {}
    for key, item in exported.items():
        if not isinstance(item, TokenSequence):
            raise TypeError(
                f"arun_episode returned {type(item).__name__} under {key!r}. Allowed: the dict "
                "of client.export_interactions(style), as it is"
            )
        for span in item.spans:
            found[span.interaction.id] = span.interaction
    return tuple(sorted(found.values(), key=lambda i: (i.started_at, i.started, i.id)))


def find_style(exported: Collection[TokenSequence]) -> ExportStyle | None:
    """The style in which a workflow exported; None: it exported nothing.

    Raises:
        ValueError: there are both.
    """
    styles = {sequence.style for sequence in exported}
    if len(styles) > 1:
        raise ValueError(
            "arun_episode returned interactions of both export styles. Allowed: all of one "
            "trajectory as 'concat', or all as 'individual'"
        )
    return next(iter(styles), None)


def find_last_reward(interactions: tuple[Interaction, ...]) -> float | None:
    """The reward of the rewarded interaction that ended last; None: nothing was rewarded."""
    rewarded = [i for i in interactions if i.reward is not None]
    return max(rewarded, key=_ended_at).reward if rewarded else None


def find_last_answer(interactions: tuple[Interaction, ...]) -> str | None:
    """The text of the reply that ended last; None: there is none, or it has no text."""
    replied = [i for i in interactions if i.reply is not None]
    content = (max(replied, key=_ended_at).reply or {}).get("content") if replied else None
    return content if isinstance(content, str) else None


def _ended_at(interaction: Interaction) -> tuple[float, int]:
    # Wall time first: a workflow may use several clients, each with its own logical clock.
    return interaction.started_at + interaction.seconds, interaction.ended or interaction.started
