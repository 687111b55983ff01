"""The records that travel through agentrl: frozen, plain Python, no torch.

``Interaction`` is one model call, ``Trajectory`` one attempt at a task. They are
made in ``tracking`` and ``rollout``, written by ``store``, trained on by ``train``
and shown by ``inspector``; none of those changes them in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, Literal, TypeVar, overload

#: One chat message in OpenAI's form: ``{"role": ..., "content": ..., ...}``.
Message = dict[str, Any]

#: ``concat``: turns that extend each other are one sample; ``individual``: every turn is one.
ExportStyle = Literal["concat", "individual"]


#: The first of these fields that a dataset row has is the agent's input.
INPUT_FIELDS = ("messages", "question", "prompt", "input")
#: The first of these that it has is shown as what was expected.
ANSWER_FIELDS = ("answer", "expected", "target", "solution", "label")

#: Characters that lists keep of a text.
_MAX_SHOWN = 300

ItemT = TypeVar("ItemT")


class SharedSequence(Sequence[ItemT]):
    """Items that begin as ``parent`` does, of which no copy is held; equal to a tuple of them.

    Every call of a conversation repeats what came before it: held as tuples, the messages and
    tokens of 200 turns would take a hundred times the memory of the last one's.

    Args:
        own: what follows the items of ``parent``.
        parent: None: nothing comes before ``own``.
        num_shared: how many items of ``parent``, from its first on, come before ``own``; None: all.
    """

    __slots__ = ("_depth", "_length", "num_shared", "own", "parent")

    def __init__(
        self,
        own: Sequence[ItemT] = (),
        parent: SharedSequence[ItemT] | None = None,
        num_shared: int | None = None,
    ) -> None:
        self.own = own
        self.parent = parent
        num_before = 0 if parent is None else len(parent)
        self.num_shared = num_before if num_shared is None else num_shared
        self._length = len(own) + self.num_shared
        self._depth: int = 0 if parent is None else parent._depth + 1

    def _read_from(self, start: int) -> Iterator[ItemT]:
        """The items from one that lies at ``start`` or before it."""
        pieces: list[Sequence[ItemT]] = []
        node: SharedSequence[ItemT] | None = self
        end = self._length
        while node is not None and end > start:
            if end > node.num_shared:
                is_whole = end == node._length
                pieces.append(node.own if is_whole else node.own[: end - node.num_shared])
                end = node.num_shared
            node = node.parent
        return chain.from_iterable(reversed(pieces))

    def count_shared(self, other: SharedSequence[ItemT]) -> int:
        """How many items both begin with that are held once for both."""
        one: SharedSequence[ItemT] | None = self
        two: SharedSequence[ItemT] | None = other
        num_shared = min(len(self), len(other))
        while one is not None and two is not None and not one._holds_same(two):
            is_deeper = one._depth > two._depth
            if one._depth >= two._depth:
                num_shared, one = min(num_shared, one.num_shared), one.parent
            if not is_deeper:
                num_shared, two = min(num_shared, two.num_shared), two.parent
        return 0 if one is None or two is None else num_shared

    def _holds_same(self, other: SharedSequence[ItemT]) -> bool:
        are_alike = self.own is other.own and self.num_shared == other.num_shared
        return self is other or (are_alike and self.parent is other.parent)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[ItemT]:
        return self._read_from(0)

    @overload
    def __getitem__(self, index: int) -> ItemT: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ItemT, ...]: ...
    def __getitem__(self, index: int | slice) -> ItemT | tuple[ItemT, ...]:
        if isinstance(index, int):
            end = index % self._length + 1 if -self._length <= index < self._length else 0
            if not end:
                raise IndexError(f"there are {self._length} items, none at {index}")
            return self[end - 1 : end][0]
        start = index.indices(self._length)[0] if (index.step or 1) > 0 else 0
        items = tuple(self._read_from(start))
        num_before = self._length - len(items)
        positions = range(self._length)[index]
        if positions.step == 1:
            return items[positions.start - num_before : positions.stop - num_before]
        return tuple(items[position - num_before] for position in positions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple | SharedSequence):
            return NotImplemented
        return len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Sequence[ItemT]) -> tuple[ItemT, ...]:
        return (*self, *other)

    def __radd__(self, other: Sequence[ItemT]) -> tuple[ItemT, ...]:
        return (*other, *self)

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


class MismatchCause(StrEnum):
    """Why the tokens of an interaction do not simply continue an earlier one."""

    HISTORY_EDITED = "history_edited"
    THINKING_STRIPPED = "thinking_stripped"
    TOOL_ARGUMENTS_CHANGED = "tool_arguments_changed"
    TEMPLATE_CHANGED = "template_changed"
    RETOKENIZED = "retokenized"


class Boundary(StrEnum):
    """The boundary that a failed rollout's exception crossed."""

    AGENT = "agent"
    TOOL = "tool"
    REWARD = "reward"
    ENGINE = "engine"
    GATEWAY = "gateway"
    TIMEOUT = "timeout"
    BUDGET = "budget"


class FailureCause(StrEnum):
    """Whose doing a failure is."""

    POLICY = "policy"
    """Of what the policy sampled: an outcome, scored with ``rollout.policy_failure_reward``."""
    SURROUNDINGS = "surroundings"
    """Of anything else (engine, tool, reward, deadline, the agent's own code): unscored."""


class StopReason(StrEnum):
    """The budget that a trajectory ran into."""

    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    MAX_SECONDS = "max_seconds"
    MAX_MODEL_LEN = "max_model_len"


class InteractionStatus(StrEnum):
    """How a model call ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interaction:
    """One model call: what was asked, the exact tokens, and what it earned.

    Token fields are empty for calls to endpoints that do not give token ids.
    A failed or cancelled call is kept for the record: it never has children,
    reward or return, and is never trained on.
    """

    id: str
    """The reply's id on the wire (``chatcmpl-...``); further choices add ``-1``, ``-2``..."""
    parent_id: str | None = None
    """The interaction whose reply the request replays; None: a conversation begins here."""
    extends_parent: bool = False
    """True: ``prompt_ids`` begins with the parent's prompt and completion ids."""
    mismatch_cause: MismatchCause | None = None
    """Why an earlier turn could not be continued as it was; None: no prefix mismatch."""
    messages: Sequence[Message] = ()
    """The request's messages, as received."""
    tools: tuple[dict[str, Any], ...] = ()
    """The request's tool schemas, as received."""
    reply: Message | None = None
    """The assistant message that was returned."""
    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[int] = ()
    """The sampled tokens, the end-of-turn token included."""
    rollout_logprobs: Sequence[float] = ()
    """One per completion token, in nats, of the distribution that was sampled from."""
    versions: Sequence[int] = ()
    """The policy version that sampled each completion token."""
    num_reported_tokens: int = 0
    """Sampled tokens as an endpoint counts them that gives no ids."""
    has_malformed_call: bool = False
    """True: some of the reply's text begins as a tool call and cannot be read as one."""
    structural_tag: str | None = None
    """What the completion had to look like, as an xgrammar structural tag; logprobs are those
    of the tokens that it allowed."""
    temperature: float = 1.0
    top_p: float = 1.0
    finish_reason: str | None = None
    """``stop``, ``length`` or ``tool_calls``; None when the call did not complete."""
    status: InteractionStatus = InteractionStatus.COMPLETED
    error: str | None = None
    started: int = 0
    """Tick of the session's logical clock when the call arrived: orders calls exactly."""
    ended: int | None = None
    """Tick when the reply was recorded; None: it never was."""
    started_at: float = 0.0
    """Unix time of arrival, seconds."""
    seconds: float = 0.0
    """Duration of the call."""
    reward: float | None = None
    """The interaction's own reward; None: it has none of its own."""
    turn_return: float | None = None
    """Own reward plus discounted credit of its successors; None: not computed yet."""

    @property
    def num_completion_tokens(self) -> int:
        """Sampled tokens, by their ids or, without ids, as reported."""
        return len(self.completion_ids) or self.num_reported_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The one exception that ended a rollout, attributed to the boundary it crossed."""

    boundary: Boundary
    kind: str
    """The exception's class name."""
    message: str
    cause: FailureCause = FailureCause.SURROUNDINGS
    """Decided once, when the rollout failed."""
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The record of one attempt at a task by the agent."""

    id: str
    """``<group_id>/<sample_index>``."""
    group_id: str
    """Equal for the ``gconfig.n_samples`` attempts that are compared with each other."""
    task_id: str
    """The dataset row: its position in the unshuffled dataset, as text."""
    sample_index: int = 0
    step: int = 0
    """The step that trains on it; 0: an evaluation before any step."""
    replaced_by: str | None = None
    """The group that took its group's place in the batch, where scores were all alike: this
    one is not trained on. None: it is in the batch."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """The dataset row."""
    agent_name: str | None = None
    interactions: tuple[Interaction, ...] = ()
    """In the order in which the calls arrived."""
    reward: float | None = None
    """The trajectory's reward; None: unscored, kept but never trained on."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    export_style: ExportStyle | None = None
    """How a workflow exported its interactions; None: as ``rollout.export_style`` says."""
    final_answer: str | None = None
    stop_reason: StopReason | None = None
    """The budget that it ran into; None: the agent ended by itself, or failed otherwise."""
    failure: Failure | None = None
    started_at: float = 0.0
    """Unix time, seconds; 0: not known."""
    seconds: float = 0.0
    """Duration, from the start of the agent until the reward is known."""
    reward_seconds: float = 0.0
    """Duration of the reward's part."""

    @property
    def known_reward(self) -> float | None:
        """The reward; None where it is missing or NaN: such a trajectory is unscored."""
        return None if self.reward is None or math.isnan(self.reward) else self.reward

    @property
    def is_policy_failure(self) -> bool:
        """Whether it failed through what the policy sampled."""
        return self.failure is not None and self.failure.cause is FailureCause.POLICY

    @property
    def is_cut_short(self) -> bool:
        """Whether its last reply was stopped by its token limit."""
        return bool(self.interactions) and self.interactions[-1].finish_reason == "length"

    @property
    def question(self) -> str:
        """The beginning of what was asked: the row's input, else the first call's."""
        asked = next((self.task[name] for name in INPUT_FIELDS if self.task.get(name)), None)
        if asked is None and self.interactions:
            asked = self.interactions[0].messages
        if not isinstance(asked, list | tuple | SharedSequence):
            return _shorten(asked)
        from_user = [m for m in asked if isinstance(m, dict) and m.get("role") == "user"]
        return _shorten(from_user[-1].get("content") if from_user else None)

    @property
    def expected(self) -> str:
        """The beginning of the row's answer; of several lines the last, where it is given."""
        answer = next((a for name in ANSWER_FIELDS if (a := self.task.get(name)) is not None), "")
        return _shorten(str(answer).strip().rpartition("\n")[2])

    @property
    def num_malformed_calls(self) -> int:
        """Replies with a malformed tool call."""
        return sum(i.has_malformed_call for i in self.interactions)

    @property
    def num_turns(self) -> int:
        """Completed model calls."""
        return sum(i.status is InteractionStatus.COMPLETED for i in self.interactions)

    @property
    def num_completion_tokens(self) -> int:
        """Sampled tokens over all calls."""
        return sum(i.num_completion_tokens for i in self.interactions)

    @property
    def num_tool_calls(self) -> int:
        """Tool calls over all replies."""
        return sum(len((i.reply or {}).get("tool_calls") or ()) for i in self.interactions)


def find_new_messages(interaction: Interaction, parent: Interaction | None) -> Sequence[Message]:
    """The request's messages that the parent's turn did not have; all, where history differs."""
    if parent is None:
        return interaction.messages
    known = len(parent.messages)
    # The parent's reply may come back spelled differently (null or "", key order), so it is
    # counted and not compared.
    if interaction.messages[:known] == parent.messages and len(interaction.messages) > known:
        return interaction.messages[known + 1 :]
    return interaction.messages


def _shorten(content: Any) -> str:
    """The beginning of a message's content; of several parts, of their texts."""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = " ".join(text for text in texts if isinstance(text, str))
    return "" if content is None else str(content)[:_MAX_SHOWN]
