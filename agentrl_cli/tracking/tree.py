"""The conversation tree of one trajectory, and the prompt of every new call in it.

Turns are compared by meaning. Frameworks send an assistant's turn back in many spellings:
``content`` null, missing or empty, arguments with other key order, keys added with null, its
reasoning as a key of its own, inside the content, or left out. Those are the same turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

from agentrl_cli.records import Interaction, Message, MismatchCause
from agentrl_cli.tracking.template import (
    PLACEHOLDER,
    ChatTemplate,
    SplitPrompt,
    TemplateInputs,
    extract_answer,
    extract_reasoning,
    extract_text,
    find_extras,
    holds_reasoning_in_content,
    make_placeholder,
    parse_arguments,
    write_reasoning,
)

#: Made once: ``json.dumps`` with options makes an encoder for every call.
_write_json = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """How a request becomes token ids, and where it hangs in the tree."""

    prompt_ids: tuple[int, ...]
    parent_id: str | None = None
    extends_parent: bool = False
    """True: ``prompt_ids`` begins with the parent's prompt and completion ids."""
    mismatch_cause: MismatchCause | None
    inputs: TemplateInputs
    skeleton: tuple[Message, ...]
    """The request's messages, a placeholder standing for every sampled turn of the path."""
    skeleton_text: str
    """``skeleton`` as the template renders it."""
    prefix_digests: list[bytes]
    with_reasoning: frozenset[str] = frozenset()
    """The sampled turns whose reasoning is in ``prompt_ids``, by id."""


@dataclass(frozen=True, slots=True)
class _Node:
    interaction: Interaction
    plan: PromptPlan
    reasoning: str
    """The reasoning that was sampled; empty: none."""
    parent: _Node | None

    @property
    def position(self) -> int:
        """Where the reply stands among the messages of a request that continues it."""
        return len(self.plan.prefix_digests) - 1

    @property
    def system(self) -> bytes:
        """The digest of the system prompt that it was sampled under."""
        return _find_system_digest(self.interaction.messages, self.plan.prefix_digests)

    @property
    def with_reasoning(self) -> frozenset[str]:
        """The turns whose reasoning is in the tokens up to here."""
        own = {self.interaction.id} if self.reasoning else set()
        return self.plan.with_reasoning | own

    @property
    def path(self) -> Iterator[_Node]:
        """This turn, and those that it continues."""
        node: _Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def is_replayed_in(self, messages: Sequence[Message]) -> bool:
        """Whether no turn of the path came back with other reasoning than was sampled."""
        return all(replays_reasoning(messages[n.position], n.reasoning) for n in self.path)


class ConversationTree:
    """Finds what a request continues; grows by completed interactions only.

    A call that failed, was cancelled or never ended is not added, so it can be nobody's
    parent.
    """

    def __init__(self, template: ChatTemplate, *, keep_reasoning: bool = False) -> None:
        self._template = template
        self._keep_reasoning = keep_reasoning
        self._by_conversation: dict[bytes, list[_Node]] = {}
        self._by_request: dict[bytes, list[_Node]] = {}
        self._by_id: dict[str, _Node] = {}
        self._by_reply: dict[bytes, list[_Node]] = {}
        #: Conversations up to an assistant's turn that an agent gave unasked: examples.
        self._given: set[bytes] = set()

    def plan(self, messages: Sequence[Message], inputs: TemplateInputs) -> PromptPlan:
        """The prompt of a request, spliced to the turn that it continues, if it does.

        Raises:
            TemplateError: the template refuses the messages.
        """
        read = self._template.drop_unread(messages, inputs)
        digests = fingerprint_prefixes(read)
        parent, num_known = self._find_parent(read, digests)
        edit = self._find_edit(read, digests, num_known)
        if parent is not None:
            return self._continue(parent, messages, num_known, inputs, edit, digests)
        text = self._template.render(messages, inputs)
        return PromptPlan(
            prompt_ids=self._template.encode(text),
            mismatch_cause=edit,
            inputs=inputs,
            skeleton=tuple(messages),
            skeleton_text=text,
            prefix_digests=digests,
        )

    def add(self, plan: PromptPlan, interaction: Interaction) -> None:
        """Makes a completed interaction available as a parent."""
        reply = interaction.reply or {"role": "assistant", "content": ""}
        parent = self._by_id.get(plan.parent_id or "")
        node = _Node(interaction, plan, extract_reasoning(reply), parent)
        self._by_id[interaction.id] = node
        request = plan.prefix_digests[-1]
        self._by_conversation.setdefault(fingerprint(reply, request), []).append(node)
        self._by_request.setdefault(request, []).append(node)
        self._by_reply.setdefault(fingerprint(reply), []).append(node)
        if plan.mismatch_cause is None:
            turns = zip(interaction.messages, plan.prefix_digests[1:], strict=True)
            self._given.update(digest for m, digest in turns if m["role"] == "assistant")

    def _find_parent(
        self, messages: Sequence[Message], digests: list[bytes]
    ) -> tuple[_Node | None, int]:
        """The deepest sampled turn that the messages replay, and how many they replay.

        Of equal replies to an equal prompt, the latest: replies that differ in a tool
        call's id are not equal. Of equal replies after different reasoning, the one whose
        reasoning came back, if any did.
        """
        for length in range(len(messages), 0, -1):
            if messages[length - 1]["role"] == "assistant":
                known = self._by_conversation.get(digests[length], ())
                nodes = [node for node in known if node.is_replayed_in(messages)]
                if nodes:
                    reasoning = extract_reasoning(messages[length - 1])
                    exact = [node for node in nodes if node.reasoning == reasoning]
                    return (exact or nodes)[-1], length
        return None, 0

    def _find_edit(
        self, messages: Sequence[Message], digests: list[bytes], num_known: int
    ) -> MismatchCause | None:
        """Why the messages after the known ones do not replay a turn that they resemble."""
        system = _find_system_digest(messages, digests)
        for position in range(num_known, len(messages)):
            message = messages[position]
            if message["role"] != "assistant" or self._is_gathered(message, messages):
                continue
            siblings = self._by_request.get(digests[position])
            if siblings:
                causes = [diagnose_edit(n.interaction.reply or {}, message) for n in siblings]
                named = [c for c in causes if c is not MismatchCause.HISTORY_EDITED]
                return named[-1] if named else MismatchCause.HISTORY_EDITED
            # What stood in a matching request before is given, though a reply may equal it.
            is_given = digests[position + 1] in self._given
            nodes = () if is_given else self._by_reply.get(fingerprint(message), ())
            if any(node.system == system for node in nodes):
                return MismatchCause.HISTORY_EDITED
        return None

    def _is_gathered(self, message: Message, messages: Sequence[Message]) -> bool:
        """Whether a reply stands beside one of another branch: neither was sampled after the other.

        Whoever edits a history leaves replies that were sampled one after the other.
        """
        nodes = self._by_reply.get(fingerprint(message), ())
        if not nodes:
            return False
        replies = (m for m in messages if m["role"] == "assistant")
        others = (self._by_reply.get(fingerprint(reply), ()) for reply in replies)
        return any(
            other and not any(_are_successive(n, o) for n in nodes for o in other)
            for other in others
        )

    def _continue(
        self,
        parent: _Node,
        messages: Sequence[Message],
        num_known: int,
        inputs: TemplateInputs,
        edit: MismatchCause | None,
        digests: list[bytes],
    ) -> PromptPlan:
        turn = parent.interaction
        if inputs == parent.plan.inputs:
            inputs = parent.plan.inputs  # Its order of keys is the one that was rendered.
        new_messages = messages[num_known:]
        skeleton = (*parent.plan.skeleton, make_placeholder(turn.reply), *new_messages)
        split = self._template.split_at_last_turn(skeleton, inputs)
        shown = self._find_shown_reasoning(parent, messages, inputs)
        cause = self._find_obstacle(parent, inputs, split, shown)
        if split is not None and cause is None:
            return PromptPlan(
                prompt_ids=self._template.join(
                    turn.prompt_ids, turn.completion_ids, split.after, turn.finish_reason
                ),
                parent_id=turn.id,
                extends_parent=True,
                mismatch_cause=edit,
                inputs=inputs,
                skeleton=skeleton,
                skeleton_text=split.text,
                prefix_digests=digests,
                with_reasoning=parent.with_reasoning,
            )

        # No splice: tokenize the whole prompt. Often the tokens agree all the same.
        restored = _restore_reasoning(parent, messages, shown)
        text = self._template.render(restored, inputs)
        ids = self._template.encode(text)
        known_ids = turn.prompt_ids + turn.completion_ids
        extends = ids[: len(known_ids)] == known_ids
        return PromptPlan(
            prompt_ids=ids,
            parent_id=turn.id,
            extends_parent=extends,
            mismatch_cause=edit if extends else cause,
            inputs=inputs,
            skeleton=restored,
            skeleton_text=text,
            prefix_digests=digests,
            with_reasoning=shown,
        )

    def _find_shown_reasoning(
        self, parent: _Node, messages: Sequence[Message], inputs: TemplateInputs
    ) -> frozenset[str]:
        """The turns whose reasoning the template shows in this prompt.

        Marks stand in for the reasoning, which may be a word that occurs elsewhere too.
        """
        turns = parent.with_reasoning
        nodes = {n.interaction.id: n for n in parent.path if n.interaction.id in turns}
        if not nodes:
            return frozenset()
        marked = list(messages)
        marks = {}
        for number, node in enumerate(nodes.values()):
            marks[node.interaction.id] = mark = f"{PLACEHOLDER}REASONING{number}X"
            marked[node.position] = write_reasoning(messages[node.position], mark)
        text = self._template.render(marked, inputs)
        return frozenset(turn for turn, mark in marks.items() if mark in text)

    def _find_obstacle(
        self,
        parent: _Node,
        inputs: TemplateInputs,
        split: SplitPrompt | None,
        shown: frozenset[str],
    ) -> MismatchCause | None:
        """What keeps the sampled ids from standing in this prompt; None: nothing."""
        is_stripped = shown != parent.with_reasoning
        cause = None
        if is_stripped and not self._keep_reasoning:
            cause = MismatchCause.THINKING_STRIPPED
        elif split is None:
            cause = MismatchCause.RETOKENIZED
        elif not self._shows_past(parent.plan, split.before):
            cause = (
                MismatchCause.THINKING_STRIPPED if is_stripped else MismatchCause.TEMPLATE_CHANGED
            )
        # Inputs that change nothing in what the template shows of the past are no obstacle.
        has_changed = cause is not None and inputs != parent.plan.inputs
        return MismatchCause.TEMPLATE_CHANGED if has_changed else cause

    def _shows_past(self, plan: PromptPlan, before: str) -> bool:
        """Whether the text before a sampled turn is what the turn was sampled after.

        It may lack what only a generation prompt has, or have more: what the model wrote
        itself, such as empty reasoning; or it may begin the turn in another way.
        """
        past = plan.skeleton_text
        if past.startswith(before) or before.startswith(past):
            return True
        return before.startswith(self._template.render(plan.skeleton, plan.inputs, is_prompt=False))


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


def _are_successive(node: _Node, other: _Node) -> bool:
    """Whether one of two replies was sampled after the other, or is it."""
    return node is other or _was_sampled_after(node, other) or _was_sampled_after(other, node)


def _was_sampled_after(node: _Node, earlier: _Node) -> bool:
    meaning = _normalize(earlier.interaction.reply or {"role": "assistant"})[:3]
    return any(_normalize(m)[:3] == meaning for m in node.interaction.messages)


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
    text = extract_answer(message) if is_reply else extract_text(message.get("content"), "\n")
    calls = [_normalize_call(call) for call in message.get("tool_calls") or ()]
    return [role, text, calls, find_extras(message)]


def fingerprint(message: Message, previous: bytes = b"") -> bytes:
    """A digest of a message's meaning and of all that came before it."""
    meaning = _write_json(_normalize(message)).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(meaning, key=previous).digest()


def fingerprint_prefixes(messages: Iterable[Message]) -> list[bytes]:
    """Entry i is the digest of the first i messages; entry 0 stands for none."""
    return list(accumulate(messages, lambda past, m: fingerprint(m, past), initial=b""))


def diagnose_edit(sampled: Message, replayed: Message) -> MismatchCause:
    """Why ``replayed`` is not the turn that was ``sampled`` at its place."""
    _, text, calls, extras = _normalize(sampled)
    _, other_text, other_calls, other_extras = _normalize(replayed)
    # All of a call but its arguments.
    rests, other_rests = ([call[:2] for call in side] for side in (calls, other_calls))
    same_reasoning = replays_reasoning(replayed, extract_reasoning(sampled))
    same_rest = text == other_text and extras == other_extras and same_reasoning
    if same_rest and calls != other_calls and rests == other_rests:
        return MismatchCause.TOOL_ARGUMENTS_CHANGED
    # Whoever removes the reasoning removes white space with it.
    has_lost_reasoning = extract_reasoning(sampled) and not extract_reasoning(replayed)
    if has_lost_reasoning and calls == other_calls and text.strip() == other_text.strip():
        return MismatchCause.THINKING_STRIPPED
    return MismatchCause.HISTORY_EDITED


def _normalize_call(call: dict[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    arguments = parse_arguments(function.get("arguments"), parse_float=_parse_number)
    return [call.get("id"), function.get("name"), arguments]


def _parse_number(text: str) -> float:
    """A number with a fraction or an exponent; 1.0 is 1, as programs in JavaScript send it back."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number
