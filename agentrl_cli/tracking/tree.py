"""The conversation tree of one trajectory, and the prompt of every new call in it."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from agentrl_cli.records import Interaction, Message, MismatchCause, SharedSequence
from agentrl_cli.tracking.message_meaning import (
    MessageHistory,
    diagnose_edit,
    extract_reasoning,
    fingerprint,
    fingerprint_reply,
    holds_reasoning_in_content,
    is_same_json,
    list_own_keys,
    replays_reasoning,
    share_texts,
    write_json,
    write_open_list,
    write_reasoning,
)
from agentrl_cli.tracking.tail_rendering import Tail, TemplateForms
from agentrl_cli.tracking.template import (
    PLACEHOLDER,
    ChatTemplate,
    SplitPrompt,
    TemplateError,
    TemplateInputs,
    make_placeholder,
)

#: Messages that are known; a session that never ends forgets them all when there are more.
_MAX_HELD = 100_000
#: Ends of prompts that a session keeps.
_MAX_ENDS = 16


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
    system: bytes
    """The digest of the system prompt that it was sampled under."""

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
        #: The messages of the last request, and as JSON: mostly the next one goes on from there.
        self._latest: tuple[MessageHistory, bytes] = (self._root, b"")
        self._forms = TemplateForms()
        self._known_inputs: list[TemplateInputs] = []
        self._by_conversation: dict[bytes, list[_Node]] = {}
        self._by_request: dict[bytes, list[_Node]] = {}
        self._by_id: dict[str, _Node] = {}
        self._by_reply: dict[bytes, list[_Node]] = {}
        #: By turn: its reply, and those among the messages that it was sampled after.
        self._replies: dict[str, tuple[bytes, frozenset[bytes]]] = {}
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
        inputs = self._share(inputs)
        history = self._follow(messages, inputs)
        beginnings = history.beginnings
        parent, num_known = self._find_parent(beginnings)
        edit = self._find_edit(beginnings, num_known)
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

    def find_known(
        self,
        messages: Sequence[Any],
        case: Hashable = None,
        known: MessageHistory | None = None,
    ) -> MessageHistory:
        """The longest beginning of ``messages`` that an earlier request had, to the letter.

        Args:
            messages: of a request.
            case: of its inputs; None: those of the earlier request may be any.
            known: a beginning that is not compared again.
        """
        history = known or self._root
        latest, written = self._latest
        fits = written and (case is None or latest.fits(case))
        if known is None and fits and write_open_list(messages).startswith(written):
            history = latest
        for message in messages[len(history) :]:
            following = history.find_next(message, case)
            if following is None:
                break
            history = following
        return history

    def _follow(self, messages: Sequence[Message], inputs: TemplateInputs) -> MessageHistory:
        """The messages of a request, which may begin with those that :meth:`find_known` found."""
        case = inputs.case
        found = messages.parent if isinstance(messages, SharedSequence) else None
        known = found if isinstance(found, MessageHistory) and found.fits(case) else None
        known = history = self.find_known(messages, case, known)
        self._num_held += len(messages) - len(history)
        if self._num_held > _MAX_HELD:
            # From the new root on, and nothing of the old one is held any more.
            known = history = self._root = MessageHistory()
            self._latest, self._num_held = (history, b""), len(messages)
            self._replays.clear()
        for position in range(len(history), len(messages)):
            history = self._extend(history, messages, position, inputs)
        latest, written = self._latest
        if known is not latest or not written:
            self._latest = (history, write_open_list(messages))
        else:
            self._latest = (history, write_open_list(messages[len(known) :], written))
        return history

    def _extend(
        self,
        history: MessageHistory,
        messages: Sequence[Message],
        position: int,
        inputs: TemplateInputs,
    ) -> MessageHistory:
        """The history with the message at a position of a request."""
        message = share_texts(messages[position])
        case = history.case or (inputs.case if list_own_keys(message) else None)
        try:
            unread = self._template.find_unread(messages, position, inputs)
        except TemplateError:
            # All keys count this time; later requests find out for themselves.
            return MessageHistory(message, history, case=case)
        following = MessageHistory(message, history, unread, case)
        history.add_next(following)
        return following

    def add(self, plan: PromptPlan, interaction: Interaction) -> None:
        """Makes a completed interaction available as a parent."""
        reply = interaction.reply or {"role": "assistant", "content": ""}
        parent = self._by_id.get(plan.parent_id or "")
        reasoning = extract_reasoning(reply)
        shows_reasoning = bool(reasoning)
        if parent is not None and not shows_reasoning:
            turns = parent.with_reasoning if plan.without_reasoning else parent.shows_reasoning
            shows_reasoning = bool(turns and (turns is True or turns - plan.without_reasoning))
        beginnings = plan.history.beginnings
        system = _find_system_digest(beginnings)
        node = _Node(interaction, plan, reasoning, parent, shows_reasoning, system)
        self._by_id[interaction.id] = node
        request = plan.history.digest
        self._by_conversation.setdefault(fingerprint(reply, request), []).append(node)
        self._by_request.setdefault(request, []).append(node)
        self._by_reply.setdefault(fingerprint(reply), []).append(node)
        if plan.mismatch_cause is None:
            for history in reversed(beginnings[1:]):
                if history.is_given:
                    break
                history.is_given = True
                if history.message["role"] == "assistant":
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

    def _find_parent(self, beginnings: Sequence[MessageHistory]) -> tuple[_Node | None, int]:
        """The deepest sampled turn that the messages replay, and how many they replay.

        Of equal replies to an equal prompt, the latest: replies that differ in a tool
        call's id are not equal. Of equal replies after different reasoning, the one whose
        reasoning came back, if any did.
        """
        for beginning in reversed(beginnings[1:]):
            message = beginning.message
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
            if not replays_reasoning(history.message, turn.reasoning):
                return False
            found.append((history, turn.interaction.id))
        self._replays.update(found)
        return True

    def _find_edit(
        self, beginnings: Sequence[MessageHistory], num_known: int
    ) -> MismatchCause | None:
        """Why the messages after the known ones do not replay a turn that they resemble."""
        if all(h.message["role"] != "assistant" for h in beginnings[num_known + 1 :]):
            return None
        system = _find_system_digest(beginnings)
        replies = {
            position: self._by_reply.get(fingerprint(history.read), [])
            for position, history in enumerate(beginnings)
            if position and history.message["role"] == "assistant"
        }
        for position, nodes in replies.items():
            if position <= num_known or self._is_gathered(nodes, replies.values()):
                continue
            history = beginnings[position]
            siblings = self._by_request.get(beginnings[position - 1].digest)
            if siblings:
                causes = [diagnose_edit(n.interaction.reply or {}, history.read) for n in siblings]
                named = [c for c in causes if c is not MismatchCause.HISTORY_EDITED]
                return named[-1] if named else MismatchCause.HISTORY_EDITED
            # What stood in a matching request before is given, though a reply may equal it.
            is_given = history.digest in self._given
            if not is_given and any(node.system == system for node in nodes):
                return MismatchCause.HISTORY_EDITED
        return None

    def _is_gathered(self, nodes: Sequence[_Node], replies: Iterable[Sequence[_Node]]) -> bool:
        """Whether a reply stands beside one of another branch: neither was sampled after the other.

        Whoever edits a history leaves replies that were sampled one after the other.
        """
        return bool(nodes) and any(
            other and not any(self._are_successive(n, o) for n in nodes for o in other)
            for other in replies
        )

    def _are_successive(self, node: _Node, other: _Node) -> bool:
        """Whether one of two replies was sampled after the other, or is it."""
        if node is other:
            return True
        (reply, before), (other_reply, other_before) = map(self._list_replies, (node, other))
        return other_reply in before or reply in other_before

    def _list_replies(self, node: _Node) -> tuple[bytes, frozenset[bytes]]:
        """Digests of a turn's reply, and of those among the messages that it was sampled after."""
        turn = node.interaction
        if turn.id not in self._replies:
            replies = (m for m in turn.messages if m["role"] == "assistant")
            own = fingerprint_reply(turn.reply or {"role": "assistant"})
            self._replies[turn.id] = own, frozenset(map(fingerprint_reply, replies))
        return self._replies[turn.id]

    def _continue(
        self,
        parent: _Node,
        history: MessageHistory,
        num_known: int,
        inputs: TemplateInputs,
        edit: MismatchCause | None,
    ) -> PromptPlan:
        turn = parent.interaction
        if inputs is not parent.plan.inputs and _say_same(inputs, parent.plan.inputs):
            inputs = parent.plan.inputs  # Its order of keys is the one that was rendered.
        new_messages = history[num_known:]
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
            shown = self._find_shown_reasoning(parent, tuple(history), inputs)
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
        differing = (
            n for n, pair in enumerate(zip(ids, known_ids, strict=False)) if pair[0] != pair[1]
        )
        num_known = next(differing, min(len(ids), len(known_ids)))
        extends = num_known == len(known_ids)
        self._last_text = (restored, text)
        sampled = frozenset(n.interaction.id for n in parent.path if n.reasoning)
        return PromptPlan(
            prompt_ids=pack_ids(ids[num_known:], known_ids, num_known),
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
        skeleton, past = self._last_text
        if skeleton is not plan.skeleton:
            past = self._template.render_skeleton(plan.skeleton, plan.inputs)
        if past.startswith(before) or before.startswith(past):
            return True
        closed = self._template.render_skeleton(plan.skeleton, plan.inputs, is_prompt=False)
        return before.startswith(closed)


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


def _say_same(one: TemplateInputs, other: TemplateInputs) -> bool:
    """Whether two inputs are the same JSON, but for the order of keys."""
    texts = (write_json([inputs.tools, inputs.template_kwargs]) for inputs in (one, other))
    return next(texts) == next(texts)


def _find_system_digest(beginnings: Sequence[MessageHistory]) -> bytes:
    """The digest of the leading system messages: another system prompt, another conversation."""
    following = islice(beginnings, 1, None)
    leading = takewhile(lambda h: h.message["role"] in ("system", "developer"), following)
    return beginnings[len(list(leading))].digest


def pack_ids(
    ids: Sequence[int],
    parent: SharedSequence[int] | None = None,
    num_shared: int | None = None,
) -> SharedSequence[int]:
    """Token ids after the first ``num_shared`` of ``parent``, in 4 bytes each."""
    return SharedSequence(array("i", ids), parent, num_shared)
