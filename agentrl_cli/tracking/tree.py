"""The conversation tree of one trajectory, and the prompt of every new call in it.

Turns are compared by meaning. Frameworks send an assistant's turn back in many spellings:
``content`` null, missing or empty, arguments with other key order, keys added with null, its
reasoning as a key of its own, inside the content, or left out. Those are the same turn.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from agentrl_cli.records import Interaction, Message, MismatchCause, SharedSequence
from agentrl_cli.tracking.tail_rendering import Tail
from agentrl_cli.tracking.template import (
    PLACEHOLDER,
    ChatTemplate,
    SplitPrompt,
    TemplateForms,
    TemplateInputs,
    extract_answer,
    extract_reasoning,
    extract_text,
    holds_reasoning_in_content,
    make_placeholder,
    parse_arguments,
    write_reasoning,
)

#: Made once: ``json.dumps`` with options makes an encoder for every call.
_write_json = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode
#: Messages that are known; a session that never ends forgets them all when there are more.
_MAX_HELD = 100_000
#: Ends of prompts that a session keeps.
_MAX_ENDS = 16
#: Keys whose meaning is compared otherwise, or that only number the pieces of a stream.
_KNOWN_KEYS = frozenset({"role", "content", "tool_calls"})
_KNOWN_REPLY_KEYS = _KNOWN_KEYS | {"reasoning_content", "reasoning"}
_KNOWN_CALL_KEYS = frozenset({"id", "type", "function", "index"})


class MessageHistory(SharedSequence[Message]):
    """The messages of a request; requests that begin alike share them, and what is known of them.

    Args:
        message: the last one; None: there are no messages yet.
        before: those before it.
    """

    __slots__ = ("_next", "before", "digest", "is_given")
    # By identity: each is made once.
    __hash__ = object.__hash__

    def __init__(
        self, message: Message | None = None, before: MessageHistory | None = None
    ) -> None:
        super().__init__(() if message is None else (message,), before)
        self.before = before
        self._next: tuple[MessageHistory, ...] = ()
        self.digest = b""
        """Of the meaning of all messages; empty: there are none."""
        if message is not None and before is not None:
            self.digest = fingerprint(message, before.digest)
        self.is_given = False
        """True: a request that matched had them."""

    def find_next(self, message: Any) -> MessageHistory | None:
        """These messages and one more, if a request had them."""
        return next((h for h in self._next if is_same_json(h._own[0], message)), None)

    def add_next(self, message: Message) -> MessageHistory:
        """These messages and one more, which no request had."""
        self._next += (MessageHistory(share_texts(message), self),)
        return self._next[-1]

    @property
    def beginnings(self) -> list[MessageHistory]:
        """Entry i is the first i messages."""
        found: list[MessageHistory] = []
        history: MessageHistory | None = self
        while history is not None:
            found.append(history)
            history = history.before
        return found[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """How a request becomes token ids, and where it hangs in the tree."""

    prompt_ids: SharedSequence[int]
    parent_id: str | None = None
    extends_parent: bool = False
    """True: ``prompt_ids`` begins with the parent's prompt and completion ids."""
    mismatch_cause: MismatchCause | None
    inputs: TemplateInputs
    history: MessageHistory
    skeleton: SharedSequence[Message]
    """The request's messages, a placeholder standing for every sampled turn of the path."""
    marked: SharedSequence[Message]
    """The same, a mark standing for every turn's reasoning that is in ``prompt_ids``."""
    without_reasoning: frozenset[str] = frozenset()
    """The sampled turns whose reasoning is not in ``prompt_ids``, by id."""


@dataclass(frozen=True, slots=True)
class _Node:
    interaction: Interaction
    plan: PromptPlan
    reasoning: str
    """The reasoning that was sampled; empty: none."""
    parent: _Node | None
    shows_reasoning: bool
    """Whether reasoning of any turn is in the tokens up to here."""

    @property
    def position(self) -> int:
        """Where the reply stands among the messages of a request that continues it."""
        return len(self.plan.history)

    @property
    def ids(self) -> SharedSequence[int]:
        """The tokens up to the end of the turn."""
        return SharedSequence(self.interaction.completion_ids, self.plan.prompt_ids)

    @property
    def with_reasoning(self) -> frozenset[str]:
        """The turns whose reasoning is in the tokens up to here."""
        turns = {n.interaction.id for n in self.path if n.reasoning}
        return frozenset(turns - self.plan.without_reasoning)

    @property
    def path(self) -> Iterator[_Node]:
        """This turn, and those that it continues."""
        node: _Node | None = self
        while node is not None:
            yield node
            node = node.parent


class ConversationTree:
    """Finds what a request continues; grows by completed interactions only.

    A call that failed, was cancelled or never ended is not added, so it can be nobody's
    parent.
    """

    def __init__(self, template: ChatTemplate, *, keep_reasoning: bool = False) -> None:
        self._template = template
        self._keep_reasoning = keep_reasoning
        self._root = MessageHistory()
        self._num_held = 0
        self._forms = TemplateForms()
        self._known_inputs: list[TemplateInputs] = []
        self._by_conversation: dict[bytes, list[_Node]] = {}
        self._by_request: dict[bytes, list[_Node]] = {}
        self._by_id: dict[str, _Node] = {}
        self._replies: set[tuple[bytes, bytes]] = set()
        #: Conversations up to an assistant's turn that an agent gave unasked: examples.
        self._given: set[bytes] = set()
        #: Requests that replay the reasoning of a turn, and of all that it continues.
        self._replays: set[tuple[MessageHistory, str]] = set()
        self._last_text: tuple[object, str] = (None, "")
        #: Of the last prompts, which are the likeliest to be continued; by their address.
        self._last_ends: dict[int, tuple[SharedSequence[Message], Tail]] = {}

    def plan(self, messages: Sequence[Message], inputs: TemplateInputs) -> PromptPlan:
        """The prompt of a request, spliced to the turn that it continues, if it does.

        Raises:
            TemplateError: the template refuses the messages.
        """
        history = self._follow(messages)
        beginnings = history.beginnings
        digests = [beginning.digest for beginning in beginnings]
        inputs = self._share(inputs)
        parent, num_known = self._find_parent(history, beginnings)
        edit = self._find_edit(messages, digests, num_known)
        if parent is not None:
            return self._continue(parent, history, num_known, inputs, edit)
        text = self._template.render(messages, inputs)
        skeleton = SharedSequence(tuple(history))
        self._last_text = (skeleton, text)
        return PromptPlan(
            prompt_ids=pack_ids(self._template.encode(text)),
            mismatch_cause=edit,
            inputs=inputs,
            history=history,
            skeleton=skeleton,
            marked=skeleton,
        )

    def find_known(self, messages: Sequence[Any]) -> MessageHistory:
        """The longest beginning of ``messages`` that an earlier request had, to the letter."""
        history = self._root
        for message in messages:
            following = history.find_next(message)
            if following is None:
                break
            history = following
        return history

    def _follow(self, messages: Sequence[Message]) -> MessageHistory:
        """The messages of a request; those that :meth:`find_known` found are not compared again."""
        known = messages.parent if isinstance(messages, SharedSequence) else None
        history = known if isinstance(known, MessageHistory) else self.find_known(messages)
        self._num_held += len(messages) - len(history)
        if self._num_held > _MAX_HELD:
            self._root, self._num_held = MessageHistory(), 0
            self._replays.clear()
        for message in messages[len(history) :]:
            history = history.add_next(message)
        return history

    def add(self, plan: PromptPlan, interaction: Interaction) -> None:
        """Makes a completed interaction available as a parent."""
        reply = interaction.reply or {"role": "assistant", "content": ""}
        parent = self._by_id.get(plan.parent_id or "")
        reasoning = extract_reasoning(reply)
        shows_reasoning = bool(reasoning)
        if parent is not None and not shows_reasoning:
            turns = parent.with_reasoning if plan.without_reasoning else parent.shows_reasoning
            shows_reasoning = bool(turns and (turns is True or turns - plan.without_reasoning))
        node = _Node(interaction, plan, reasoning, parent, shows_reasoning)
        self._by_id[interaction.id] = node
        request = plan.history.digest
        self._by_conversation.setdefault(fingerprint(reply, request), []).append(node)
        self._by_request.setdefault(request, []).append(node)
        beginnings = plan.history.beginnings
        system = _find_system_digest(plan.history, [b.digest for b in beginnings])
        self._replies.add((system, fingerprint(reply)))
        if plan.mismatch_cause is None:
            for history in reversed(beginnings[1:]):
                if history.is_given:
                    break
                history.is_given = True
                if history[-1]["role"] == "assistant":
                    self._given.add(history.digest)

    def _share(self, inputs: TemplateInputs) -> TemplateInputs:
        """Equal inputs, held once."""
        for known in self._known_inputs:
            if is_same_json(
                (known.tools, known.template_kwargs), (inputs.tools, inputs.template_kwargs)
            ):
                return known
        self._known_inputs.append(inputs)
        return inputs

    def _find_parent(
        self, history: MessageHistory, beginnings: Sequence[MessageHistory]
    ) -> tuple[_Node | None, int]:
        """The deepest sampled turn that the messages replay, and how many they replay.

        Of equal replies to an equal prompt, the latest: replies that differ in a tool
        call's id are not equal. Of equal replies after different reasoning, the one whose
        reasoning came back, if any did.
        """
        for beginning in reversed(beginnings[1:]):
            message = beginning[-1]
            if message["role"] == "assistant":
                known = self._by_conversation.get(beginning.digest, ())
                nodes = [node for node in known if self._is_replayed(node, beginnings)]
                if nodes:
                    reasoning = extract_reasoning(message)
                    exact = [node for node in nodes if node.reasoning == reasoning]
                    return (exact or nodes)[-1], len(beginning)
        return None, 0

    def _is_replayed(self, node: _Node, beginnings: Sequence[MessageHistory]) -> bool:
        """Whether no turn of the path came back with other reasoning than was sampled."""
        found: list[tuple[MessageHistory, str]] = []
        for turn in node.path:
            history = beginnings[turn.position + 1]
            if (history, turn.interaction.id) in self._replays:
                break
            if not replays_reasoning(history[-1], turn.reasoning):
                return False
            found.append((history, turn.interaction.id))
        self._replays.update(found)
        return True

    def _find_edit(
        self, messages: Sequence[Message], digests: list[bytes], num_known: int
    ) -> MismatchCause | None:
        """Why the messages after the known ones do not replay a turn that they resemble."""
        system = _find_system_digest(messages, digests)
        for position in range(num_known, len(messages)):
            message = messages[position]
            if message["role"] != "assistant":
                continue
            siblings = self._by_request.get(digests[position])
            if siblings:
                causes = [diagnose_edit(n.interaction.reply or {}, message) for n in siblings]
                named = [c for c in causes if c is not MismatchCause.HISTORY_EDITED]
                return named[-1] if named else MismatchCause.HISTORY_EDITED
            # What stood in a matching request before is given, though a reply may equal it.
            is_given = digests[position + 1] in self._given
            if not is_given and (system, fingerprint(message)) in self._replies:
                return MismatchCause.HISTORY_EDITED
        return None

    def _continue(
        self,
        parent: _Node,
        history: MessageHistory,
        num_known: int,
        inputs: TemplateInputs,
        edit: MismatchCause | None,
    ) -> PromptPlan:
        turn = parent.interaction
        messages = tuple(history)
        new_messages = messages[num_known:]
        placeholder = make_placeholder(turn.reply)
        skeleton = SharedSequence((placeholder, *new_messages), parent.plan.skeleton)
        if parent.reasoning:
            placeholder = write_reasoning(placeholder, _mark(parent))
        marked = skeleton
        if parent.shows_reasoning:
            marked = SharedSequence((placeholder, *new_messages), parent.plan.marked)
        after = self._find_text_after(parent, marked, inputs)
        cause = shown = None
        if after is None:
            split = self._template.split_at_last_turn(skeleton, inputs)
            shown = self._find_shown_reasoning(parent, messages, inputs)
            cause = self._find_obstacle(parent, inputs, split, shown)
            if split is not None and cause is None:
                after = split.after
                self._last_text = (skeleton, split.text)
        if after is None:
            assert shown is not None
            return self._retokenize(parent, history, inputs, shown, edit, cause)
        new_ids = self._template.encode_after(turn.completion_ids, after, turn.finish_reason)
        return PromptPlan(
            prompt_ids=pack_ids(new_ids, parent.ids),
            parent_id=turn.id,
            extends_parent=True,
            mismatch_cause=edit,
            inputs=inputs,
            history=history,
            skeleton=skeleton,
            marked=marked,
            without_reasoning=parent.plan.without_reasoning,
        )

    def _retokenize(
        self,
        parent: _Node,
        history: MessageHistory,
        inputs: TemplateInputs,
        shown: frozenset[str],
        edit: MismatchCause | None,
        cause: MismatchCause | None,
    ) -> PromptPlan:
        """The plan of a prompt that is tokenized whole; often the tokens agree all the same."""
        restored = SharedSequence(_restore_reasoning(parent, tuple(history), shown))
        text = self._template.render(restored, inputs)
        ids, known_ids = self._template.encode(text), parent.ids
        extends = ids[: len(known_ids)] == known_ids
        self._last_text = (restored, text)
        sampled = frozenset(n.interaction.id for n in parent.path if n.reasoning)
        return PromptPlan(
            prompt_ids=pack_ids(ids[len(known_ids) :], known_ids) if extends else pack_ids(ids),
            parent_id=parent.interaction.id,
            extends_parent=extends,
            mismatch_cause=edit if extends else cause,
            inputs=inputs,
            history=history,
            skeleton=restored,
            marked=SharedSequence(_mark_reasoning(parent, restored, shown)),
            without_reasoning=sampled - shown,
        )

    def _find_text_after(
        self, parent: _Node, marked: SharedSequence[Message], inputs: TemplateInputs
    ) -> str | None:
        """The text after the parent's turn, where its ids can stand, by what is new alone.

        None: something else than the end of the conversation may have changed, so that only the
        whole of it tells.
        """
        past = parent.plan
        if inputs is not past.inputs:
            return None
        known = self._render_last(past.marked, inputs)
        # One more than is new: the last message of a prompt may be shown in a way of its own.
        num_last = len(marked) - len(past.marked) + 1
        end = known and self._template.render_tail(marked, num_last, inputs, self._forms)
        if known is None or end is None or end.state != known.state:
            return None
        self._last_ends[id(marked)] = (marked, Tail(end.texts[-1:], end.state))
        if len(self._last_ends) > _MAX_ENDS:
            del self._last_ends[next(iter(self._last_ends))]
        before, found, after = "".join(end.texts).rpartition(PLACEHOLDER)
        if not found or (parent.reasoning and _mark(parent) not in before):
            return None
        [prompt_end] = known.texts
        if not (prompt_end.startswith(before) or before.startswith(prompt_end)):
            closed = self._template.render_tail(past.marked, 1, inputs, self._forms, False)
            if closed is None or not before.startswith(closed.texts[0]):
                return None
        return after

    def _render_last(self, marked: SharedSequence[Message], inputs: TemplateInputs) -> Tail | None:
        """The end of a prompt that is likely the last one that was made."""
        known = self._last_ends.get(id(marked))
        if known is not None:
            return known[1]
        return self._template.render_tail(marked, 1, inputs, self._forms)

    def _find_shown_reasoning(
        self, parent: _Node, messages: Sequence[Message], inputs: TemplateInputs
    ) -> frozenset[str]:
        """The turns whose reasoning the template shows in this prompt."""
        turns = parent.with_reasoning
        if not turns:
            return frozenset()
        text = self._template.render(_mark_reasoning(parent, messages, turns), inputs)
        nodes = (node for node in parent.path if node.interaction.id in turns)
        return frozenset(node.interaction.id for node in nodes if _mark(node) in text)

    def _find_obstacle(
        self,
        parent: _Node,
        inputs: TemplateInputs,
        split: SplitPrompt | None,
        shown: frozenset[str],
    ) -> MismatchCause | None:
        """What keeps the sampled ids from standing in this prompt; None: nothing."""
        if inputs != parent.plan.inputs:
            return MismatchCause.TEMPLATE_CHANGED
        is_stripped = shown != parent.with_reasoning
        if is_stripped and not self._keep_reasoning:
            return MismatchCause.THINKING_STRIPPED
        if split is None:
            return MismatchCause.RETOKENIZED
        if not self._shows_past(parent.plan, split.before):
            return (
                MismatchCause.THINKING_STRIPPED if is_stripped else MismatchCause.TEMPLATE_CHANGED
            )
        return None

    def _shows_past(self, plan: PromptPlan, before: str) -> bool:
        """Whether the text before a sampled turn is what the turn was sampled after.

        It may lack what only a generation prompt has, or have more: what the model wrote
        itself, such as empty reasoning; or it may begin the turn in another way.
        """
        skeleton, past = self._last_text
        if skeleton is not plan.skeleton:
            past = self._template.render(plan.skeleton, plan.inputs)
        if past.startswith(before) or before.startswith(past):
            return True
        return before.startswith(self._template.render(plan.skeleton, plan.inputs, is_prompt=False))


def _mark(node: _Node) -> str:
    """Stands for the reasoning of a turn, which may be a word that occurs elsewhere too."""
    return f"{PLACEHOLDER}REASONING{node.interaction.id}X"


def _mark_reasoning(
    parent: _Node, messages: Sequence[Message], turns: frozenset[str]
) -> tuple[Message, ...]:
    """The messages with marks in place of the reasoning of the turns."""
    marked = list(messages)
    for node in parent.path:
        if node.interaction.id in turns:
            marked[node.position] = write_reasoning(messages[node.position], _mark(node))
    return tuple(marked)


def _restore_reasoning(
    parent: _Node, messages: Sequence[Message], shown: frozenset[str]
) -> tuple[Message, ...]:
    """The messages with the sampled reasoning that the template shows, and without any other.

    Reasoning that came back inside the content is left to the template.
    """
    restored = list(messages)
    for node in parent.path:
        message = messages[node.position]
        if node.reasoning and not holds_reasoning_in_content(message):
            reasoning = node.reasoning if node.interaction.id in shown else ""
            restored[node.position] = write_reasoning(message, reasoning)
    return tuple(restored)


def _find_system_digest(messages: Sequence[Message], digests: Sequence[bytes]) -> bytes:
    """The digest of the leading system messages: another system prompt, another conversation."""
    leading = takewhile(lambda m: m["role"] in ("system", "developer"), messages)
    return digests[len(list(leading))]


def replays_reasoning(message: Message, reasoning: str) -> bool:
    """Whether a message has the reasoning that was sampled; frameworks may leave it out."""
    return extract_reasoning(message) in ("", reasoning)


def _normalize(message: Message) -> list[Any]:
    """The meaning of a message as plain JSON data; equal meaning gives equal data.

    Reasoning is no part of it: whether it came back is another question.
    """
    role = "system" if message["role"] == "developer" else message["role"]
    is_reply = role == "assistant"
    text = extract_answer(message) if is_reply else extract_text(message.get("content"))
    known = _KNOWN_REPLY_KEYS if is_reply else _KNOWN_KEYS
    extras = {k: v for k, v in message.items() if k not in known and _carries_meaning(v)}
    calls = [_normalize_call(call) for call in message.get("tool_calls") or ()]
    return [role, text, calls, extras]


def fingerprint(message: Message, previous: bytes = b"") -> bytes:
    """A digest of a message's meaning and of all that came before it."""
    meaning = _write_json(_normalize(message)).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(meaning, key=previous, digest_size=16).digest()


def share_texts(value: Any) -> Any:
    """Equal JSON, whose texts and keys are held once however many messages have them."""
    if isinstance(value, dict):
        return {sys.intern(key): share_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [share_texts(item) for item in value]
    return sys.intern(value) if type(value) is str else value


def is_same_json(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON, to the order of keys; to Python 1, 1.0 and True are
    equal."""
    return one == other and marshal.dumps(one, 0) == marshal.dumps(other, 0)


def pack_ids(ids: Sequence[int], parent: SharedSequence[int] | None = None) -> SharedSequence[int]:
    """Token ids after those of ``parent``, in 4 bytes each."""
    return SharedSequence(array("i", ids), parent)


def diagnose_edit(sampled: Message, replayed: Message) -> MismatchCause:
    """Why ``replayed`` is not the turn that was ``sampled`` at its place."""
    _, text, calls, extras = _normalize(sampled)
    _, other_text, other_calls, other_extras = _normalize(replayed)
    # All of a call but its arguments.
    rests, other_rests = ([[*c[:2], c[3]] for c in side] for side in (calls, other_calls))
    same_reasoning = replays_reasoning(replayed, extract_reasoning(sampled))
    same_rest = text == other_text and extras == other_extras and same_reasoning
    if same_rest and calls != other_calls and rests == other_rests:
        return MismatchCause.TOOL_ARGUMENTS_CHANGED
    # Whoever removes the reasoning removes white space with it.
    has_lost_reasoning = extract_reasoning(sampled) and not extract_reasoning(replayed)
    if has_lost_reasoning and calls == other_calls and text.strip() == other_text.strip():
        return MismatchCause.THINKING_STRIPPED
    return MismatchCause.HISTORY_EDITED


def _carries_meaning(value: Any) -> bool:
    return value is not None and value not in ("", [], {})


def _normalize_call(call: dict[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    extras = {k: v for k, v in call.items() if k not in _KNOWN_CALL_KEYS and _carries_meaning(v)}
    arguments = parse_arguments(function.get("arguments"), parse_float=_parse_number)
    return [call.get("id"), function.get("name"), arguments, extras]


def _parse_number(text: str) -> float:
    """A number with a fraction or an exponent; 1.0 is 1, as programs in JavaScript send it back."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number
