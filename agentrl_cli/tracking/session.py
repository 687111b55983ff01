"""The live side of a trajectory: one secret key, one conversation tree, its budgets."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import operator
import secrets
import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from agentrl_cli.engine.protocol import Generation, Sampling
from agentrl_cli.errors import ContextLengthError, EngineError, UserInputError, format_nearest
from agentrl_cli.records import (
    ExportStyle,
    Interaction,
    InteractionStatus,
    Message,
    SharedSequence,
    StopReason,
)
from agentrl_cli.tracking.credit import (
    TokenSequence,
    build_sequences,
    compute_turn_returns,
    parse_reward,
)
from agentrl_cli.tracking.message_meaning import share_texts
from agentrl_cli.tracking.template import TemplateInputs
from agentrl_cli.tracking.tree import ConversationTree, PromptPlan, pack_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one session; None: no limit."""

    max_turns: int | None = None
    """Maximum number of model calls, failed ones included."""
    max_tokens: int | None = None
    """Maximum number of sampled tokens over all calls."""
    max_seconds: float | None = None
    """Maximum number of seconds from the session's start to the end of its last call."""


@dataclass(frozen=True, slots=True, eq=False)
class CollectedSessions:
    """What the sessions of one trajectory share: credit flows by time across them."""

    sampling: Sampling | None = None
    """Holds where a session is opened without one."""
    budget: Budget | None = None
    """Likewise."""
    finished_turns: list[Interaction] = field(default_factory=list)
    """Completed calls of an earlier try at the trajectory, whose replies calls may get again."""
    sessions: list[Session] = field(default_factory=list)
    clock: Iterator[int] = field(default_factory=lambda: itertools.count(1))


def list_completed(interactions: Iterable[Interaction]) -> list[Interaction]:
    """Those that completed, in the same order."""
    return [i for i in interactions if i.status is InteractionStatus.COMPLETED]


def list_interactions(sessions: Iterable[Session]) -> tuple[Interaction, ...]:
    """Those of all sessions as they are now, session by session."""
    return tuple(i for session in sessions for i in session.interactions)


_COLLECTED: ContextVar[CollectedSessions | None] = ContextVar("collected sessions", default=None)


@contextmanager
def collect_sessions(
    sampling: Sampling | None = None,
    budget: Budget | None = None,
    earlier: Iterable[Interaction] = (),
) -> Iterator[list[Session]]:
    """The sessions that are opened inside the block, by this task and those it starts; the list is
    empty after it. A session without ``sampling`` or ``budget`` of its own has these; ``earlier``:
    see :meth:`Session.resume_from`.

    A rollout that fails leaves nothing behind but these: they hold what was sampled.
    """
    collected = CollectedSessions(sampling, budget, list_completed(earlier))
    token = _COLLECTED.set(collected)
    try:
        yield collected.sessions
    finally:
        _COLLECTED.reset(token)
        # Else each session would hold itself.
        collected.sessions.clear()


def raise_user_errors(sessions: Iterable[Session]) -> None:
    """Raises a mistake of the user's that refused a call of a session: it ends the run.

    The agent was told of it in its own protocol, and may have made do.
    """
    for session in sessions:
        if session.user_error is not None:
            raise session.user_error


class BudgetExceededError(Exception):
    """A call came after its session's budget was used up, or was in flight at that time."""


@dataclass(slots=True)
class OpenCall:
    """A model call in progress: one choice of one request."""

    asked: Interaction
    """What is known before the reply."""
    plan: PromptPlan
    sampling: Sampling
    clock: float


class Session:
    """Records the calls of one trajectory; every method is for the gateway's event loop.

    Args:
        build_tree: makes an empty one.
        sampling: holds where a request does not say otherwise.
        budget: its limits.
        key: its secret; None: a random one.
        max_kept: maximum number of calls on record: then all of them are forgotten, for a session
            that never ends. None: every call is kept.
    """

    def __init__(
        self,
        build_tree: Callable[[], ConversationTree],
        *,
        sampling: Sampling | None = None,
        budget: Budget | None = None,
        key: str | None = None,
        max_kept: int | None = None,
    ) -> None:
        self.id = uuid.uuid4().hex
        """Names it to engines."""
        self.key = key or f"sk-agentrl-{secrets.token_urlsafe(24)}"
        self._build_tree = build_tree
        self.tree = build_tree()
        collected = _COLLECTED.get()
        if collected is not None:
            collected.sessions.append(self)
        self._trajectory = collected or CollectedSessions()
        self.sampling = sampling or self._trajectory.sampling or Sampling()
        self.budget = budget or self._trajectory.budget or Budget()
        self.budget_exceeded: str | None = None
        """Which limit refused a call, in words; None: none did."""
        self.stop_reason: StopReason | None = None
        """The same as a name; also the model's context, which a shorter call may still fit."""
        self.num_requests = 0
        """Requests with its key, those that were refused or repeated too."""
        self.num_retries = 0
        """Of these, those that an SDK says it has sent before."""
        self.is_closed = False
        """True: its key is no longer valid."""
        self.engine_error: EngineError | None = None
        """The last engine error that a call of this session crossed."""
        self.user_error: UserInputError | None = None
        """A mistake of the user's that refused a call: it would repeat itself in every session,
        whatever the model does."""
        self._interactions: dict[str, Interaction] = {}
        self._num_calls = 0
        self._num_tokens = 0
        self._opened = self._last_active = read_clock()
        self._max_kept = max_kept
        self._open_calls: dict[int, OpenCall] = {}
        self._call_ended = asyncio.Event()

    @property
    def interactions(self) -> tuple[Interaction, ...]:
        """All recorded calls, failed ones too, in order of arrival."""
        return tuple(sorted(self._interactions.values(), key=lambda i: (i.started, i.id)))

    def find_completed(self, interaction_id: str) -> Interaction | None:
        """The completed interaction of that id."""
        found = self._interactions.get(interaction_id)
        return found if found and found.status is InteractionStatus.COMPLETED else None

    def _list_completed(self) -> list[Interaction]:
        return list_completed(self.interactions)

    async def wait_for_tokens(self, sampling: Sampling, num_choices: int) -> None:
        """Returns when the budget has the tokens that a request may need, or no call is in flight.

        Calls at the same time would otherwise sample more than the budget holds; and a call that
        was cut to what those in flight might leave would be cut for nothing.
        """
        while self._open_calls and not self._has_tokens(sampling, num_choices):
            await self._call_ended.wait()

    def _has_tokens(self, sampling: Sampling, num_choices: int) -> bool:
        if self.budget.max_tokens is None:
            return True
        left = self.budget.max_tokens - self._num_tokens
        wanted = left if sampling.max_tokens is None else sampling.max_tokens * num_choices
        # With a budget every call has a limit.
        reserved = sum(call.sampling.max_tokens or 0 for call in self._open_calls.values())
        return reserved + min(wanted, left) <= left

    def begin_calls(
        self,
        completion_id: str,
        messages: Sequence[Message],
        inputs: TemplateInputs,
        sampling: Sampling,
        num_choices: int,
    ) -> list[OpenCall]:
        """Admits one request and plans its prompt: one call per choice.

        Raises:
            BudgetExceededError: the session may make no further call.
            TemplateError: the chat template refuses the messages.
        """
        sampling = self._apply_budget(sampling, num_choices)
        plan = self.tree.plan(messages, inputs)
        started, now, clock = self._tick(), time.time(), time.perf_counter()
        self._num_calls += num_choices
        calls = []
        for index in range(num_choices):
            asked = Interaction(
                id=completion_id if index == 0 else f"{completion_id}-{index}",
                parent_id=plan.parent_id,
                extends_parent=plan.extends_parent,
                mismatch_cause=plan.mismatch_cause,
                messages=plan.history,
                tools=plan.inputs.tools,
                prompt_ids=plan.prompt_ids,
                structural_tag=sampling.structural_tag,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                started=started,
                started_at=now,
            )
            seed = self._derive_seed(sampling.seed, started, index)
            calls.append(OpenCall(asked, plan, replace(sampling, seed=seed), clock))
        self._open_calls.update((id(call), call) for call in calls)
        self.touch()
        return calls

    def resume_from(self, earlier: Iterable[Interaction]) -> None:
        """Lets the trajectory's calls get the replies that an earlier try at it got."""
        self._trajectory.finished_turns.extend(list_completed(earlier))

    def take_finished_turn(self, call: OpenCall) -> Generation | None:
        """What an earlier try sampled for this very call, each only once; None: nothing.

        It is what the model says to that prompt, with the logprobs and versions of its time.
        """
        turns = self._trajectory.finished_turns
        for turn in turns:
            if _answers(turn, call):
                turns.remove(turn)
                return Generation(
                    completion_ids=tuple(turn.completion_ids),
                    rollout_logprobs=tuple(turn.rollout_logprobs),
                    versions=tuple(turn.versions),
                    finish_reason="length" if turn.finish_reason == "length" else "stop",
                )
        return None

    def complete_call(
        self,
        call: OpenCall,
        generation: Generation,
        reply: Message,
        finish_reason: str,
        *,
        num_reported_tokens: int = 0,
        has_malformed_call: bool = False,
    ) -> Interaction:
        """Records a reply; from now on it can be continued."""
        interaction = replace(
            call.asked,
            seconds=time.perf_counter() - call.clock,
            reply=share_texts(reply),
            # As arrays: Python's own numbers take five times as much memory.
            completion_ids=pack_ids(generation.completion_ids),
            rollout_logprobs=SharedSequence(array("d", generation.rollout_logprobs)),
            versions=SharedSequence(array("i", generation.versions)),
            num_reported_tokens=num_reported_tokens,
            has_malformed_call=has_malformed_call,
            finish_reason=finish_reason,
            ended=self._tick(),
        )
        self._num_tokens += interaction.num_completion_tokens
        self._keep(call, interaction)
        self.tree.add(call.plan, interaction)
        return interaction

    def fail_call(self, call: OpenCall, error: BaseException) -> None:
        """Records a call that ended without a reply: it is no parent and earns nothing.

        A call that was recorded before stays as it is.
        """
        if id(call) not in self._open_calls:
            return
        cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
        self.note_error(error)
        failed = replace(
            call.asked,
            seconds=time.perf_counter() - call.clock,
            status=InteractionStatus.CANCELLED if cancelled else InteractionStatus.FAILED,
            error=f"{type(error).__name__}: {error}".removesuffix(": "),
            ended=self._tick(),
        )
        self._keep(call, failed)

    def note_error(self, error: BaseException) -> None:
        """Keeps what an error that ended a call tells of the trajectory."""
        if isinstance(error, EngineError):
            self.engine_error = error
        if isinstance(error, ContextLengthError) and self._list_completed():
            # Before any reply it is the task that is too long.
            self.stop_reason = self.stop_reason or StopReason.MAX_MODEL_LEN

    def set_reward(self, interaction_id: str, reward: Any) -> None:
        """Gives one interaction its own reward; None or NaN: unscored."""
        completed = {i.id: i for i in self._list_completed()}
        if interaction_id not in completed:
            raise KeyError(
                f"no completed interaction {interaction_id!r} in this session; it has "
                f"{list(completed)}"
            )
        changed = replace(completed[interaction_id], reward=parse_reward(reward))
        self._interactions[interaction_id] = changed
        # What was handed out before knew nothing of it.
        self._hand_out({})

    def set_final_reward(self, reward: Any) -> None:
        """Gives the reward to the interaction that ended last."""
        completed = self._list_completed()
        if not completed:
            raise ValueError("no model call was completed, so there is nothing to reward")
        self.set_reward(max(completed, key=lambda i: i.ended or 0).id, reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Hands credit down the tree: sets every interaction's ``turn_return``, in all sessions of
        the trajectory."""
        self._hand_out(
            compute_turn_returns(list_interactions(self._list_siblings()), turn_discount)
        )

    def _hand_out(self, returns: Mapping[str, float]) -> None:
        for session in self._list_siblings():
            session._set_returns(returns)

    def _list_siblings(self) -> list[Session]:
        """The sessions of the trajectory, with this one; one outside of a rollout is alone."""
        return self._trajectory.sessions or [self]

    def _set_returns(self, returns: Mapping[str, float]) -> None:
        for interaction in tuple(self._interactions.values()):
            turn_return = returns.get(interaction.id)
            if turn_return != interaction.turn_return:
                self._interactions[interaction.id] = replace(interaction, turn_return=turn_return)

    def export_interactions(self, style: ExportStyle = "concat") -> dict[str, TokenSequence]:
        """Completed interactions as training material, by id; with ``concat``, merged sequences by
        the id of their last interaction.

        Raises:
            ValueError: there is no such style.
        """
        if style not in get_args(ExportStyle):
            nearest = format_nearest(str(style), get_args(ExportStyle))
            raise ValueError(f"export_interactions: there is no style {style!r}; {nearest}")
        sequences = build_sequences(self._interactions.values(), style)
        return {sequence.id: sequence for sequence in sequences}

    @property
    def is_used_up(self) -> bool:
        """Whether its turns, its tokens or the model's context were used up."""
        return self.stop_reason not in (None, StopReason.MAX_SECONDS)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the budget is used up, 0 or more; None: it has no end."""
        if self.budget.max_seconds is None:
            return None
        return max(0.0, self._opened + self.budget.max_seconds - read_clock())

    def end_for_time(self) -> BudgetExceededError:
        """The error of a call that came, or was in flight, when the time was over."""
        return self._exceed(
            StopReason.MAX_SECONDS, "timeout_seconds", f"{self.budget.max_seconds:g}"
        )

    def _exceed(self, reason: StopReason, key: str, limit: int | str) -> BudgetExceededError:
        self.stop_reason, self.budget_exceeded = reason, f"rollout.{key} = {limit}"
        return BudgetExceededError(self.budget_exceeded)

    def _apply_budget(self, sampling: Sampling, num_choices: int) -> Sampling:
        budget = self.budget
        if self.seconds_left == 0.0:
            raise self.end_for_time()
        if budget.max_turns is not None and self._num_calls + num_choices > budget.max_turns:
            raise self._exceed(StopReason.MAX_TURNS, "max_turns", budget.max_turns)
        if budget.max_tokens is None:
            return sampling
        left = (budget.max_tokens - self._num_tokens) // num_choices
        if left < 1:
            key = "max_tokens_per_trajectory"
            raise self._exceed(StopReason.MAX_TOKENS, key, budget.max_tokens)
        wanted = left if sampling.max_tokens is None else min(sampling.max_tokens, left)
        return replace(sampling, max_tokens=wanted)

    def touch(self) -> None:
        """Records that the session's client is active."""
        self._last_active = read_clock()

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last activity; 0 while a call is in flight."""
        return 0.0 if self._open_calls else read_clock() - self._last_active

    def _keep(self, call: OpenCall, interaction: Interaction) -> None:
        self.touch()
        self._open_calls.pop(id(call), None)
        # Wakes whoever waits at this moment.
        self._call_ended.set()
        self._call_ended.clear()
        if self._max_kept is not None and len(self._interactions) >= self._max_kept:
            self._interactions.clear()
            self.tree = self._build_tree()
        self._interactions[interaction.id] = interaction

    def _derive_seed(self, asked: int | None, started: int, choice: int) -> int | None:
        """The seed of one choice of a call.

        What a request asks for repeats the reply when it is asked for again; the session's own
        seed is another one for every call, so that a seeded session does not repeat itself.
        """
        if asked is not None:
            text = f"{asked}/{choice}"
        elif self.sampling.seed is not None:
            text = f"{self.sampling.seed}/{started}/{choice}"
        else:
            return None
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")

    def _tick(self) -> int:
        return next(self._trajectory.clock)


def _answers(turn: Interaction, call: OpenCall) -> bool:
    """Whether the call could have sampled what the turn holds."""
    asked, sampling, num_tokens = call.asked, call.sampling, len(turn.completion_ids)
    most = num_tokens if sampling.max_tokens is None else sampling.max_tokens
    return (
        # Those are not on record.
        not (sampling.stop or sampling.num_top_logprobs)
        and (num_tokens == most if turn.finish_reason == "length" else 0 < num_tokens <= most)
        and (turn.temperature, turn.top_p) == (asked.temperature, asked.top_p)
        and turn.structural_tag == asked.structural_tag
        and len(turn.prompt_ids) == len(asked.prompt_ids)
        and all(map(operator.eq, turn.prompt_ids, asked.prompt_ids))
    )


def read_clock() -> float:
    """The event loop's clock, which may stand still while the process is stopped."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()
