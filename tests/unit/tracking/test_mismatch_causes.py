"""Whatever is done to a conversation, a mismatch has the right cause and trains nothing wrong.

Every reply and question of a conversation is different, so that what was done to it is beyond
doubt; the last property adds what agents do besides (equal replies, failures, repeated calls).
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentrl_cli.prefix_mismatches import find_prefix_mismatches
from agentrl_cli.records import Interaction, InteractionStatus, MismatchCause
from agentrl_cli.tracking.credit import build_sequences
from agentrl_cli.tracking.template import ChatTemplate, TemplateInputs
from agentrl_cli.tracking.tree import ConversationTree

TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},)
OTHER_TOOLS = ({"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}},)
SYSTEM = {"role": "system", "content": "Be brief."}

_ARGUMENTS = st.dictionaries(
    st.sampled_from(["a", "b", "c", "é"]),
    st.recursive(
        st.integers(-5, 5) | st.booleans() | st.none() | st.sampled_from(["x", "é", "", "1"]),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.sampled_from(["k", "l"]), inner, max_size=2)
        ),
        max_leaves=3,
    ),
    min_size=1,
    max_size=3,
)
_KINDS = st.sampled_from(["plain", "thinking", "call", "text and call", "two calls"])
_TURNS = st.lists(st.tuples(_KINDS, _ARGUMENTS), min_size=1, max_size=4)


class Talk:
    """An agent's conversation, sampled turn by turn with the tokens of the template."""

    def __init__(self, tokenizer: Any, data: Any = None, *, keep_reasoning: bool = False) -> None:
        self.data = data
        self.template = ChatTemplate(tokenizer)
        self.tree = ConversationTree(self.template, keep_reasoning=keep_reasoning)
        self.messages: list[dict[str, Any]] = []
        self.interactions: list[Interaction] = []
        self.sampled_at: list[int] = []
        """Positions of the sampled replies among the messages."""
        if data is not None and data.draw(st.booleans(), label="system"):
            self.messages.append(dict(SYSTEM))
        self.num_given = len(self.messages)

    def take_turns(self, *kinds: str) -> list[Any]:
        turns: list[Any] = self.data.draw(_TURNS, label="turns")
        assume(not kinds or any(kind in kinds for kind, _ in turns))
        for kind, arguments in turns:
            self.take_turn(kind, arguments)
        return turns

    def take_turn(self, kind: str, arguments: dict[str, Any]) -> None:
        number = len(self.interactions)
        if not self.messages or self.messages[-1]["role"] != "tool":
            self.messages.append({"role": "user", "content": f"question {number}"})
        reply, text = build_reply(kind, arguments, number)
        self.request(self.messages, reply, text)
        self.sampled_at.append(len(self.messages))
        self.messages.append(reply)
        for call in reply.get("tool_calls", ()):
            result = {"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"}
            self.messages.append(result)

    def request(
        self,
        messages: list[dict[str, Any]],
        reply: dict[str, Any],
        text: str,
        tools: tuple[dict[str, Any], ...] = TOOLS,
        finish: str = "stop",
        status: InteractionStatus = InteractionStatus.COMPLETED,
    ) -> Interaction:
        inputs = TemplateInputs(tools)
        plan = self.tree.plan(copy.deepcopy(messages), inputs)
        failed = status is InteractionStatus.FAILED
        ids = self.template.encode(text)
        if finish == "stop" or not ids:
            finish, ids = "stop", (*ids, self.template.tokenizer.eos_token_id)
        if failed:
            ids = ()
        clock = 2 * len(self.interactions) + 1
        interaction = Interaction(
            id=f"i{len(self.interactions)}",
            parent_id=plan.parent_id,
            extends_parent=plan.extends_parent,
            mismatch_cause=plan.mismatch_cause,
            messages=tuple(copy.deepcopy(messages)),
            tools=tools,
            reply=None if failed else copy.deepcopy(reply),
            prompt_ids=plan.prompt_ids,
            completion_ids=ids,
            rollout_logprobs=(-1.0,) * len(ids),
            versions=(0,) * len(ids),
            finish_reason=finish,
            status=status,
            started=clock,
            ended=clock + 1,
        )
        self.interactions.append(interaction)
        if not failed:
            self.tree.add(plan, interaction)
        return interaction

    def ask(self, messages: list[dict[str, Any]], **options: Any) -> Interaction:
        """One more request, whatever its messages."""
        number = len(self.interactions)
        reply = {"role": "assistant", "content": f"answer {number}"}
        return self.request(messages, reply, f"answer {number}", **options)

    def next_messages(self) -> list[dict[str, Any]]:
        """The request of an agent that sends everything back as it was."""
        messages = copy.deepcopy(self.messages)
        if messages[-1]["role"] != "tool":
            messages.append({"role": "user", "content": "go on"})
        return messages

    def list_completed(self) -> list[Interaction]:
        return [i for i in self.interactions if i.status is InteractionStatus.COMPLETED]

    def check_training(self) -> None:
        """Every sampled token is trained exactly once, and no other token is."""
        for style in ("concat", "individual"):
            trained: Counter[str] = Counter()
            for sequence in build_sequences(self.interactions, style):  # type: ignore[arg-type]
                assert len(sequence.input_ids) == len(sequence.loss_mask) == len(sequence.versions)
                places = set()
                for span in sequence.spans:
                    turn = span.interaction
                    assert sequence.input_ids[: span.start] == turn.prompt_ids
                    assert sequence.input_ids[span.start : span.end] == turn.completion_ids
                    if span.trained:
                        trained[turn.id] += 1
                        places |= set(range(span.start, span.end))
                assert {n for n, m in enumerate(sequence.loss_mask) if m} == places
                assert {n for n, v in enumerate(sequence.versions) if v >= 0} >= places
            assert trained == Counter(i.id for i in self.list_completed())


def build_reply(kind: str, arguments: dict[str, Any], number: int) -> tuple[dict[str, Any], str]:
    """A reply as the gateway records it, and the text that was sampled for it."""
    texts = {
        "plain": f"answer {number}",
        "thinking": f"<think>\nthought {number}\n</think>\n\nanswer {number}",
        "text and call": f"calling {number}",
    }
    content = texts.get(kind)
    spelled = json.dumps(arguments, ensure_ascii=False)
    num_calls = {"call": 1, "text and call": 1, "two calls": 2}.get(kind, 0)
    written = f'\n<tool_call>\n{{"name": "f", "arguments": {spelled}}}\n</tool_call>'
    text = (content or "") + written * num_calls
    function = {"name": "f", "arguments": spelled}
    calls = [
        {"id": f"call_{number}_{index}", "type": "function", "function": dict(function)}
        for index in range(num_calls)
    ]
    reply: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        reply["tool_calls"] = calls
    return reply, text


def begin(tokenizer: Any, data: Any, *kinds: str) -> Talk:
    """A conversation, with at least one turn of one of ``kinds`` where those are given."""
    talk = Talk(tokenizer, data)
    turns = talk.take_turns(*kinds)
    # The base of all that follows: an agent that changes nothing has no mismatch.
    assert [i.mismatch_cause for i in talk.interactions] == [None] * len(turns)
    assert all(i.extends_parent for i in talk.interactions[1:])
    return talk


def mismatch_once(
    talk: Talk, messages: list[Any], cause: MismatchCause | None, **options: Any
) -> None:
    """A changed request has this cause; what continues from there has no other."""
    changed = talk.ask(messages, **options)
    assert changed.mismatch_cause is cause
    following = [*messages, changed.reply, {"role": "user", "content": "and then?"}]
    after = talk.ask(following, **options)
    assert (after.parent_id, after.extends_parent) == (changed.id, True)
    assert after.mismatch_cause is None
    talk.check_training()
    costs = {one.interaction_id: one for one in find_prefix_mismatches(talk.interactions)}
    assert set(costs) == ({changed.id} if cause is not None else set())


_NOTES = st.dictionaries(
    st.sampled_from(["name", "parsed", "provider_specific_fields", "é", "mood"]),
    st.sampled_from([None, "", "x", 0, True, {"refusal": None}, {"k": [{"l": None}]}, ["x"]]),
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_another_spelling_matches(tokenizer: Any, data: Any) -> None:
    talk = begin(tokenizer, data)
    messages = [
        dict(data.draw(st.permutations([*message.items(), *data.draw(_NOTES).items()])))
        for message in talk.next_messages()
    ]
    for position in talk.sampled_at:
        message = messages[position]
        if not message.get("content"):
            message["content"] = data.draw(st.sampled_from([None, "", []]))
            if message["content"] is None and data.draw(st.booleans()):
                del message["content"]
        elif data.draw(st.booleans()):
            message["content"] = [{"type": "text", "text": message["content"]}]
        for call in message.get("tool_calls", ()):
            call |= data.draw(_NOTES)
            call["function"] |= {"parsed_arguments": {}}
            call["function"]["arguments"] = respell(call["function"]["arguments"], data)
    tools = tuple(dict(reversed(tool.items())) for tool in TOOLS)
    request = talk.ask(messages, tools=tools)
    assert (request.parent_id, request.extends_parent) == (talk.interactions[-2].id, True)
    assert request.mismatch_cause is None
    talk.check_training()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_only_a_key_that_the_template_shows_makes_another_turn(tokenizer: Any, data: Any) -> None:
    showing = copy.copy(tokenizer)
    showing.chat_template = tokenizer.chat_template.replace(
        "(m.content or '')", "(m.mood or '') + (m.content or '')"
    )
    talk = begin(showing, data)
    messages = talk.next_messages()
    changed = data.draw(st.sampled_from(messages))
    changed |= data.draw(_NOTES) | {"mood": data.draw(st.sampled_from(["", "good"]))}
    is_shown = changed["role"] == "assistant" and changed["mood"]
    mismatch_once(talk, messages, MismatchCause.HISTORY_EDITED if is_shown else None)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_gathered_branches_are_no_edit_until_one_is_edited(tokenizer: Any, data: Any) -> None:
    """As LangGraph merges what parallel nodes and Send add to a state's messages."""
    talk = begin(tokenizer, data)
    root = talk.next_messages()
    gathered = list(root)
    for number in range(data.draw(st.integers(2, 3), label="branches")):
        own = [{"role": "user", "content": f"part {number}"}]
        past, own = data.draw(st.sampled_from([(root, []), (root, own), ([], own)]))
        branch = list(own)
        for _ in range(data.draw(st.integers(1, 2), label="turns")):
            reply = talk.ask([*past, *branch]).reply
            branch += [reply, {"role": "user", "content": "more"}]
        gathered += branch[len(own) : -1]
    gathered.append({"role": "user", "content": "sum up"})
    mismatch_once(talk, gathered, None)
    edited = [*gathered, talk.interactions[-2].reply, {"role": "user", "content": "again"}]
    edited[len(gathered) - 1] = {"role": "user", "content": "sum up briefly"}
    mismatch_once(talk, edited, MismatchCause.HISTORY_EDITED)


def respell(arguments: str, data: Any) -> str:
    """The same JSON in other words: key order, white space, escapes, 1 as 1.0."""

    def change(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: change(value[k]) for k in data.draw(st.permutations(sorted(value)))}
        if isinstance(value, list):
            return [change(item) for item in value]
        if isinstance(value, int) and not isinstance(value, bool) and data.draw(st.booleans()):
            return float(value)
        return value

    return json.dumps(
        change(json.loads(arguments)),
        ensure_ascii=data.draw(st.booleans()),
        indent=data.draw(st.sampled_from([None, 0, 2])),
        separators=data.draw(st.sampled_from([(",", ":"), (", ", ": ")])),
    )


@settings(max_examples=60, deadline=None)
@given(change=st.sampled_from(["altered", "missing", "swapped"]), data=st.data())
def test_a_change_before_a_kept_reply_is_an_edit(tokenizer: Any, change: str, data: Any) -> None:
    talk = begin(tokenizer, data)
    messages = talk.next_messages()
    places = st.integers(talk.num_given, talk.sampled_at[-1])
    one, other = data.draw(places), data.draw(places)
    if change == "altered":
        messages[one]["content"] = f"{messages[one].get('content') or ''} changed"
    elif change == "missing":
        assume(one < talk.sampled_at[-1])
        del messages[one]
    else:
        assume(messages[one] != messages[other])
        messages[one], messages[other] = messages[other], messages[one]
    mismatch_once(talk, messages, MismatchCause.HISTORY_EDITED)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_reasoning_that_was_taken_out_is_put_back(tokenizer: Any, data: Any) -> None:
    talk = begin(tokenizer, data, "thinking")
    messages = talk.next_messages()
    thinking = [p for p in talk.sampled_at if "</think>" in (messages[p]["content"] or "")]
    for position in data.draw(st.sets(st.sampled_from(thinking), min_size=1)):
        text = messages[position]["content"].split("</think>")[1]
        messages[position]["content"] = data.draw(st.sampled_from([text, text.strip()]))
    mismatch_once(talk, messages, None)


@settings(max_examples=30, deadline=None)
@given(keep=st.booleans(), data=st.data())
def test_a_template_that_strips_reasoning_mismatches_unless_it_is_kept(
    thinking_tokenizer: Any, keep: bool, data: Any
) -> None:
    """The remedy that is told with the cause mends it."""
    talk = Talk(thinking_tokenizer, data, keep_reasoning=keep)
    turns = talk.take_turns("thinking")
    talk.ask(talk.next_messages())
    causes = [i.mismatch_cause for i in talk.interactions]
    if keep:
        assert set(causes) == {None}
        assert all(i.extends_parent for i in talk.interactions[1:])
    else:
        assert set(causes) == {None, MismatchCause.THINKING_STRIPPED}
        first = next(n for n, (kind, _) in enumerate(turns) if kind == "thinking")
        assert causes.index(MismatchCause.THINKING_STRIPPED) == first + 1
    talk.check_training()


@settings(max_examples=60, deadline=None)
@given(
    change=st.sampled_from(["value", "missing", "added", "broken", "renamed", "other id"]),
    data=st.data(),
)
def test_other_tool_arguments_are_told_from_another_call(
    tokenizer: Any, change: str, data: Any
) -> None:
    talk = begin(tokenizer, data, "call", "text and call", "two calls")
    messages = talk.next_messages()
    positions = [p for p in talk.sampled_at if messages[p].get("tool_calls")]
    call = data.draw(st.sampled_from(messages[data.draw(st.sampled_from(positions))]["tool_calls"]))
    arguments = json.loads(call["function"]["arguments"])
    name = data.draw(st.sampled_from(sorted(arguments)))
    cause = MismatchCause.TOOL_ARGUMENTS_CHANGED
    if change == "renamed":
        call["function"]["name"], cause = "g", MismatchCause.HISTORY_EDITED
    elif change == "other id":
        answered = [m for m in messages if m.get("tool_call_id") == call["id"]]
        call["id"], cause = "renamed", MismatchCause.HISTORY_EDITED
        for message in answered:
            message["tool_call_id"] = "renamed"
    elif change == "value":
        arguments[name] = "another value"
    elif change == "missing":
        del arguments[name]
    elif change == "added":
        arguments["added"] = None
    call["function"]["arguments"] = json.dumps(arguments)[: -1 if change == "broken" else None]
    mismatch_once(talk, messages, cause)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_other_tools_are_another_template(tokenizer: Any, data: Any) -> None:
    talk = begin(tokenizer, data)
    mismatch_once(talk, talk.next_messages(), MismatchCause.TEMPLATE_CHANGED, tools=OTHER_TOOLS)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_another_system_prompt_is_another_conversation(tokenizer: Any, data: Any) -> None:
    talk = begin(tokenizer, data)
    handed_over = [{"role": "system", "content": "You are another."}]
    handed_over += [m for m in talk.next_messages() if m["role"] != "system"]
    mismatch_once(talk, handed_over, None)
    assert talk.interactions[-2].parent_id is None


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_summary_in_place_of_the_beginning(tokenizer: Any, data: Any) -> None:
    talk = begin(tokenizer, data)
    messages = talk.next_messages()
    num_gone = data.draw(st.integers(talk.num_given + 1, len(messages) - 1), label="summarized")
    summary = {"role": "user", "content": "What happened so far: nothing."}
    compacted = [*messages[: talk.num_given], summary, *messages[num_gone:]]
    keeps_a_reply = any(position >= num_gone for position in talk.sampled_at)
    # A summary and nothing that was sampled: the agent has begun again.
    mismatch_once(talk, compacted, MismatchCause.HISTORY_EDITED if keeps_a_reply else None)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_given_examples_that_the_model_repeats_are_no_edit(tokenizer: Any, data: Any) -> None:
    """A reply that equals an example of the prompt makes the prompt's next use no mismatch."""
    talk = begin(tokenizer, data)
    examples = [
        *talk.messages[: talk.num_given],
        {"role": "user", "content": "an example"},
        {"role": "assistant", "content": "answer again"},
        {"role": "user", "content": "a task"},
    ]
    first = talk.request(examples, {"role": "assistant", "content": "answer again"}, "answer again")
    assert first.mismatch_cause is None
    repeated = copy.deepcopy(examples)
    if data.draw(st.booleans()):
        repeated[-1]["content"] = "another task"
    assert talk.ask(repeated).mismatch_cause is None
    talk.check_training()


def test_arguments_too_deep_to_read_are_text(tokenizer: Any) -> None:
    talk = Talk(tokenizer)
    talk.take_turn("call", {"a": 1})
    messages = talk.next_messages()
    messages[1]["tool_calls"][0]["function"]["arguments"] = "[" * 100_000
    assert talk.ask(messages).mismatch_cause is MismatchCause.TOOL_ARGUMENTS_CHANGED
    talk.check_training()


_ACTIONS = st.sampled_from(["continue", "branch", "edit", "new", "other_tools", "fail", "repeat"])
_REPLIES = st.sampled_from(["The answer", "is", "", "\n\nforty two ", "Paris\n", "é"])
_STEPS = st.lists(
    st.tuples(_ACTIONS, _REPLIES, st.sampled_from(["stop", "length"]), st.integers(0, 50)),
    min_size=1,
    max_size=12,
)


def build_request(talk: Talk, action: str, number: int) -> tuple[list[Any], Any]:
    """Messages and tools of an agent that continues from any turn it has seen."""
    known = talk.list_completed()
    if not known or action == "new":
        return [{"role": "user", "content": f"question {number}"}], ()
    past = known[-1] if action == "continue" else known[number % len(known)]
    if action == "repeat":
        return list(past.messages), past.tools
    reply = dict(past.reply or {})
    if action == "edit":
        reply["content"] = f"{reply['content']} edited"
    tools = past.tools
    if action == "other_tools":
        tools = () if past.tools else TOOLS
    return [*past.messages, reply, {"role": "user", "content": f"more {number % 3}"}], tools


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(steps=_STEPS)
def test_every_sampled_token_is_trained_once_and_continued_as_it_is(
    tokenizer: Any, steps: list[Any]
) -> None:
    talk = Talk(tokenizer)
    for action, text, finish, number in steps:
        messages, tools = build_request(talk, action, number)
        status = InteractionStatus.FAILED if action == "fail" else InteractionStatus.COMPLETED
        reply = {"role": "assistant", "content": text}
        talk.request(messages, reply, text, tools, finish, status)
    talk.check_training()
    by_id = {i.id: i for i in talk.list_completed()}
    for interaction in talk.interactions:
        shown = tokenizer.apply_chat_template(
            list(interaction.messages),
            tools=list(interaction.tools) or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        assert tokenizer.decode(interaction.prompt_ids) == shown
        if interaction.extends_parent:
            parent = by_id[interaction.parent_id or ""]
            known = parent.prompt_ids + parent.completion_ids
            assert interaction.prompt_ids[: len(known)] == known
