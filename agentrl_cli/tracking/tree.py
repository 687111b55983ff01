"""The conversation tree of one trajectory, and the prompt of every new call in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from agentrl_cli.records import BreakCause, Interaction, Message
from agentrl_cli.tracking.matching import (
    diagnose_edit,
    extract_thought,
    fingerprint,
    fingerprint_prefixes,
)
from agentrl_cli.tracking.template import (
    PLACEHOLDER,
    TemplateInputs,
    make_placeholder,
)


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """How a request becomes token ids, and where it hangs in the tree."""

    prompt_ids: tuple[int, ...]
    parent_id: str | None
    extends_parent: bool
    """True: ``prompt_ids`` begins with the parent's prompt and completion ids."""
    break_cause: BreakCause | None
    inputs: TemplateInputs
    skeleton: tuple[Message, ...]
    """The request's messages, a placeholder standing for every sampled turn of the path."""
    skeleton_text: str
    """``skeleton`` as the template renders it."""
    prefix_digests: list[bytes]
    thoughts: tuple[str, ...] = ()
    """Chains of thought that were sampled on the path to this request."""


@dataclass(frozen=True, slots=True)
class _Node:
    interaction: Interaction
    plan: PromptPlan

    @property
    def thoughts(self) -> tuple[str, ...]:
        """Chains of thought sampled on the path to here, this turn included."""
        thought = extract_thought(self.interaction.reply or {})
        return (*self.plan.thoughts, thought) if thought else self.plan.thoughts


class TurnTemplate(Protocol):
    """What a tree needs of a :class:`~agentrl_cli.tracking.template.ChatTemplate`."""

    def render(self, messages: Sequence[Message], inputs: TemplateInputs) -> str:
        """The prompt's text."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of template text."""
        ...

    def split_at_last_turn(
        self, skeleton: Sequence[Message], inputs: TemplateInputs
    ) -> tuple[str, str] | None:
        """The texts around the last sampled turn; None where a splice is impossible."""
        ...

    def join(
        self,
        prompt_ids: tuple[int, ...],
        completion_ids: tuple[int, ...],
        text_after: str,
        finish_reason: str | None,
    ) -> tuple[int, ...]:
        """A sampled turn's own ids, followed by those of the text after it."""
        ...


class ConversationTree:
    """Finds what a request continues; grows by completed interactions only.

    A call that failed, was cancelled or never ended is not added, so it can be nobody's
    parent.
    """

    def __init__(self, template: TurnTemplate, *, keep_thinking: bool = False) -> None:
        self._template = template
        self._keep_thinking = keep_thinking
        self._by_conversation: dict[bytes, list[_Node]] = {}
        self._by_request: dict[bytes, list[_Node]] = {}
        self._replies: set[tuple[bytes, bytes]] = set()
        #: Conversations up to an assistant's turn that an agent gave unasked: examples.
        self._given: set[bytes] = set()

    def clear(self) -> None:
        """Forgets every turn: what continues one of them is tokenized anew."""
        self._by_conversation.clear()
        self._by_request.clear()
        self._replies.clear()
        self._given.clear()

    def plan(self, messages: Sequence[Message], inputs: TemplateInputs) -> PromptPlan:
        """The prompt of a request, spliced to the turn that it continues, if it does.

        Raises:
            TemplateError: the template refuses the messages.
        """
        digests = fingerprint_prefixes(messages)
        parent, num_known = self._find_parent(messages, digests)
        edit = self._find_edit(messages, digests, num_known)
        if parent is None:
            text = self._template.render(messages, inputs)
            ids = self._template.encode(text)
            return PromptPlan(
                prompt_ids=ids,
                parent_id=None,
                extends_parent=False,
                break_cause=edit,
                inputs=inputs,
                skeleton=tuple(messages),
                skeleton_text=text,
                prefix_digests=digests,
            )
        return self._continue(parent, messages, num_known, inputs, edit, digests)

    def add(self, plan: PromptPlan, interaction: Interaction) -> None:
        """Makes a completed interaction available as a parent."""
        reply = interaction.reply or {"role": "assistant", "content": ""}
        node = _Node(interaction, plan)
        request = plan.prefix_digests[-1]
        self._by_conversation.setdefault(fingerprint(reply, request), []).append(node)
        self._by_request.setdefault(request, []).append(node)
        self._replies.add((_fingerprint_system(interaction.messages), fingerprint(reply)))
        if plan.break_cause is None:
            turns = zip(interaction.messages, plan.prefix_digests[1:], strict=True)
            self._given.update(digest for m, digest in turns if m["role"] == "assistant")

    def _find_parent(
        self, messages: Sequence[Message], digests: list[bytes]
    ) -> tuple[_Node | None, int]:
        """The deepest sampled turn that the messages replay, and how many they replay.

        Of equal replies to an equal prompt, the latest: replies that differ in a tool
        call's id are not equal.
        """
        for length in range(len(messages), 0, -1):
            if messages[length - 1]["role"] == "assistant":
                nodes = self._by_conversation.get(digests[length])
                if nodes:
                    return nodes[-1], length
        return None, 0

    def _find_edit(
        self, messages: Sequence[Message], digests: list[bytes], num_known: int
    ) -> BreakCause | None:
        """Why the messages after the known ones do not replay a turn that they resemble."""
        system = _fingerprint_system(messages)
        for position in range(num_known, len(messages)):
            message = messages[position]
            if message["role"] != "assistant":
                continue
            siblings = self._by_request.get(digests[position])
            if siblings:
                causes = [diagnose_edit(n.interaction.reply or {}, message) for n in siblings]
                named = [c for c in causes if c is not BreakCause.HISTORY_EDITED]
                return named[-1] if named else BreakCause.HISTORY_EDITED
            # What stood in an unbroken request before is given, though a reply may equal it.
            is_given = digests[position + 1] in self._given
            if not is_given and (system, fingerprint(message)) in self._replies:
                return BreakCause.HISTORY_EDITED
        return None

    def _continue(
        self,
        parent: _Node,
        messages: Sequence[Message],
        num_known: int,
        inputs: TemplateInputs,
        edit: BreakCause | None,
        digests: list[bytes],
    ) -> PromptPlan:
        turn = parent.interaction
        new_messages = messages[num_known:]
        skeleton = (*parent.plan.skeleton, make_placeholder(), *new_messages)
        texts = self._template.split_at_last_turn(skeleton, inputs)
        cause = self._find_obstacle(parent, messages, inputs, texts)
        if texts is not None and cause is None:
            return PromptPlan(
                prompt_ids=self._template.join(
                    turn.prompt_ids, turn.completion_ids, texts[1], turn.finish_reason
                ),
                parent_id=turn.id,
                extends_parent=True,
                break_cause=edit,
                inputs=inputs,
                skeleton=skeleton,
                skeleton_text=PLACEHOLDER.join(texts),
                prefix_digests=digests,
                thoughts=parent.thoughts,
            )

        # No splice: tokenize the whole. Often the tokens agree all the same.
        text = self._template.render(messages, inputs)
        ids = self._template.encode(text)
        known_ids = turn.prompt_ids + turn.completion_ids
        extends = ids[: len(known_ids)] == known_ids
        return PromptPlan(
            prompt_ids=ids,
            parent_id=turn.id,
            extends_parent=extends,
            break_cause=edit if extends else cause,
            inputs=inputs,
            skeleton=tuple(messages),
            skeleton_text=text,
            prefix_digests=digests,
            thoughts=parent.thoughts,
        )

    def _find_obstacle(
        self,
        parent: _Node,
        messages: Sequence[Message],
        inputs: TemplateInputs,
        texts: tuple[str, str] | None,
    ) -> BreakCause | None:
        """What keeps the sampled ids from standing in this prompt; None: nothing."""
        if inputs != parent.plan.inputs:
            return BreakCause.TEMPLATE_CHANGED
        if parent.thoughts and not self._keep_thinking:
            rendered = self._template.render(messages, inputs)
            if not all(thought in rendered for thought in parent.thoughts):
                return BreakCause.THINKING_STRIPPED
        if texts is None:
            return BreakCause.RETOKENIZED
        # The template must show the past as it did when the turn was sampled. The text
        # before the turn may lack what only a generation prompt has.
        if not parent.plan.skeleton_text.startswith(texts[0]):
            return BreakCause.TEMPLATE_CHANGED
        return None


def _fingerprint_system(messages: Sequence[Message]) -> bytes:
    """A digest of the leading system messages: another system prompt, another conversation."""
    leading = takewhile(lambda m: m["role"] in ("system", "developer"), messages)
    return fingerprint_prefixes(leading)[-1]
