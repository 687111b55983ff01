"""Conversations over ``/v1/messages``, with Anthropic's official SDK as the judge."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.records import Interaction
from agentrl_cli.tracking.credit import build_sequences
from agentrl_cli.tracking.protocols.messages import sign_thinking

pytestmark = pytest.mark.anthropic

Open = Callable[..., Any]
USER: Any = {"role": "user", "content": "What is the weather in Paris?"}
TOOL: Any = {
    "name": "f",
    "description": "Does it.",
    "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": [1, {"y": "ü 😀"}]}}\n</tool_call>'


def as_texts(*texts: str) -> list[Any]:
    return [{"type": "text", "text": text} for text in texts]


def read_text(message: Any) -> str:
    """All text of a message; where it stands among the calls depends on streaming."""
    return "".join(block.text for block in message.content if block.type == "text")


def read_calls(message: Any) -> list[tuple[str, Any]]:
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


def check_continued(interactions: tuple[Interaction, ...]) -> None:
    """Every turn goes on from the one before with the very tokens that were sampled."""
    for parent, child in itertools.pairwise(interactions):
        known = parent.prompt_ids + parent.completion_ids
        assert child.parent_id == parent.id
        assert child.prompt_ids[: len(known)] == known
        assert child.mismatch_cause is None
    [sequence] = build_sequences(interactions, "concat")
    assert sum(sequence.loss_mask) == sum(len(i.completion_ids) for i in interactions)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("sampled", "options", "text", "inputs", "stop_reason"),
    [
        ("It is 42.", {}, "It is 42.", [], "end_turn"),
        ("Ünïcödé 😀 over tokens", {}, "Ünïcödé 😀 over tokens", [], "end_turn"),
        ("", {}, "", [], "end_turn"),
        (CALL, {"tools": [TOOL]}, "", [{"x": 1}], "tool_use"),
        (
            f"Let me see. {CALL}{OTHER_CALL}",
            {"tools": [TOOL]},
            "Let me see. ",
            [{"x": 1}, {"x": [1, {"y": "ü 😀"}]}],
            "tool_use",
        ),
        ("<tool_call> nothing", {"tools": [TOOL]}, "<tool_call> nothing", [], "end_turn"),
        (CALL, {}, CALL, [], "end_turn"),
        (CALL, {"tools": [TOOL], "tool_choice": {"type": "none"}}, CALL, [], "end_turn"),
        (("It is", "length"), {}, "It is", [], "max_tokens"),
    ],
)
async def test_a_reply_is_the_message_that_the_sdk_reads(
    open_conversation: Open,
    sampled: Any,
    options: Any,
    text: str,
    inputs: list[Any],
    stop_reason: str,
    stream: bool,
) -> None:
    conversation = open_conversation(sampled)
    message = await conversation.create(stream=stream, messages=[USER], **options)
    assert read_text(message) == text
    assert read_calls(message) == [("f", given) for given in inputs]
    assert len(message.content) == bool(text) + len(inputs), "no block is empty"
    assert (message.stop_reason, message.stop_sequence) == (stop_reason, None)
    assert (message.role, message.model) == ("assistant", "scripted")
    [interaction] = conversation.interactions
    assert message.id == interaction.id
    assert message.usage.input_tokens == len(interaction.prompt_ids)
    assert message.usage.output_tokens == len(interaction.completion_ids)


async def test_events_come_in_the_official_order(open_conversation: Open, read_stream: Any) -> None:
    conversation = open_conversation(f"Let me see. {CALL} Then.")
    events = await read_stream(conversation, {"messages": [USER], "tools": [TOOL]})
    data = [json.loads(text) for _, text in events]
    assert [d["type"] for d in data] == [name for name, _ in events]
    kinds = [
        (name, d["delta"]["type"], d["index"]) if name == "content_block_delta" else name
        for (name, _), d in zip(events, data, strict=True)
    ]
    in_order = [k for i, k in enumerate(kinds) if i == 0 or k != kinds[i - 1]]
    assert in_order == [
        "message_start",
        "ping",
        "content_block_start",
        ("content_block_delta", "text_delta", 0),
        "content_block_stop",
        "content_block_start",
        ("content_block_delta", "input_json_delta", 1),
        "content_block_stop",
        "content_block_start",
        ("content_block_delta", "text_delta", 2),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    starts = [d["content_block"] for d in data if d["type"] == "content_block_start"]
    assert starts[0] == {"type": "text", "text": ""}
    assert starts[1] == {"type": "tool_use", "id": starts[1]["id"], "name": "f", "input": {}}
    begin = data[0]["message"]
    assert (begin["content"], begin["stop_reason"], begin["stop_sequence"]) == ([], None, None)
    [end] = [d for d in data if d["type"] == "message_delta"]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    [interaction] = conversation.interactions
    assert end["usage"] == {"output_tokens": len(interaction.completion_ids)}


def as_returned(message: Any) -> list[Any]:
    """The ways in which agents send a message back."""
    return [
        message.content,
        message.to_param()["content"],
        [block.model_dump() for block in message.content],
        [block.model_dump(exclude_none=True) for block in message.content],
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", range(4))
@pytest.mark.parametrize(
    "first", [CALL, f"\n\nLet me see.\n\n{CALL}", f"First {CALL} then {OTHER_CALL} at last."]
)
async def test_a_tool_conversation_continues_the_sampled_tokens(
    open_conversation: Open, first: str, way: int, stream: bool
) -> None:
    conversation = open_conversation(first, f"Again. {CALL}", "It is forty two.", "Yes.")
    messages: list[Any] = [USER]
    for _ in range(3):
        message = await conversation.create(
            stream=stream, messages=messages, tools=[TOOL], system="Be brief."
        )
        calls = [block for block in message.content if block.type == "tool_use"]
        messages.append({"role": "assistant", "content": as_returned(message)[way]})
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": "5"} for c in calls]
        messages.append({"role": "user", "content": results or "Really?"})
    await conversation.create(stream=stream, messages=messages, tools=[TOOL], system="Be brief.")
    assert len(conversation.interactions) == 4
    check_continued(conversation.interactions)


async def test_tokens_are_counted_as_the_next_call_has_them(open_conversation: Open) -> None:
    conversation = open_conversation(f"\n\nLet me see. {CALL}", "Yes.", sampling=Sampling(seed=1))
    options: Any = {"tools": [TOOL], "system": "Be brief."}
    count = conversation.sdk.messages.count_tokens
    before = await count(model="m", messages=[USER], **options)
    first = await conversation.create(stream=False, messages=[USER], **options)
    assert before.input_tokens == first.usage.input_tokens
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "5"}
    messages = [
        USER,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    counted = [await count(model="m", messages=messages, **options) for _ in range(2)]
    assert len(conversation.interactions) == 1, "counting records nothing"
    second = await conversation.create(stream=False, messages=messages, **options)
    assert {c.input_tokens for c in counted} == {second.usage.input_tokens}
    check_continued(conversation.interactions)
    # Neither does it change what is sampled.
    uncounted = open_conversation(f"\n\nLet me see. {CALL}", "Yes.", sampling=Sampling(seed=1))
    for turn in ([USER], messages):
        await uncounted.create(stream=False, messages=turn, **options)
    assert [s.seed for s in uncounted.engine.samplings] == [
        s.seed for s in conversation.engine.samplings
    ]


async def test_a_stop_sequence_is_named_only_if_the_request_named_it(
    open_conversation: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stop_text, expected in (
        ("STOP", ("stop_sequence", "STOP")),
        ("</end>", ("end_turn", None)),
        (None, ("end_turn", None)),
    ):
        for stream in (False, True):
            sampling = Sampling(stop=("</end>",))
            conversation = open_conversation(f"one{stop_text or ''}", sampling=sampling)
            let_engine_stop_at(conversation.engine, stop_text, monkeypatch)
            message = await conversation.create(
                stream=stream, messages=[USER], stop_sequences=["x", "STOP"]
            )
            assert (message.stop_reason, message.stop_sequence) == expected
            assert read_text(message) == "one"
            assert conversation.engine.samplings[0].stop == ("</end>", "x", "STOP")


def let_engine_stop_at(engine: Any, stop_text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the scripted engine say which text ended the completion, as real ones do."""
    stream = engine.stream

    async def stop(*args: Any, **options: Any) -> Any:
        async for piece in stream(*args, **options):
            ended = piece.finish_reason is not None
            yield replace(piece, stop_text=stop_text if ended else None)

    monkeypatch.setattr(engine, "stream", stop)


async def test_sampling_parameters_reach_the_engine(open_conversation: Open) -> None:
    conversation = open_conversation("a", "b", sampling=Sampling(max_tokens=50, temperature=0.7))
    await conversation.create(
        stream=False,
        messages=[USER],
        max_tokens=7,
        metadata={"user_id": "u"},
        service_tier="auto",
        # The SDK names them no more.
        extra_body={"temperature": 0.2, "top_p": 0.5, "top_k": -1},
    )
    await conversation.create(stream=False, messages=[USER], max_tokens=500)
    first, second = conversation.engine.samplings
    assert (first.temperature, first.top_p, first.max_tokens) == (0.2, 0.5, 7)
    assert (second.temperature, second.max_tokens) == (0.7, 50), "gconfig.max_tokens is a limit"


async def test_prompts_are_those_of_chat_completions(open_conversation: Open) -> None:
    """One model, one prompt, whichever API asks for it."""
    conversation = open_conversation(CALL, "b", "c")
    cached = {"cache_control": {"type": "ephemeral"}}
    options: Any = {"system": as_texts("Brief."), "tools": [{**TOOL, **cached, "type": "custom"}]}
    first = await conversation.create(stream=False, messages=[USER], **options)
    call_id = first.content[0].id
    result = {"type": "tool_result", "tool_use_id": call_id, "content": as_texts("5"), **cached}
    answer = {"role": "assistant", "content": first.content}
    given = {"role": "user", "content": [result, *as_texts("Go on.")]}
    await conversation.create(stream=False, messages=[USER, answer, given], **options)
    function = {"name": "f", "description": "Does it.", "parameters": TOOL["input_schema"]}
    tool: Any = {"type": "function", "function": function}
    asked: list[Any] = [
        {"role": "system", "content": "Brief."},
        USER,
        conversation.interactions[0].reply,
        {"role": "tool", "tool_call_id": call_id, "content": "5"},
        {"role": "user", "content": "Go on."},
    ]
    chat = conversation.tracking.chat.completions
    await chat.create(model="m", messages=asked, tools=[tool])
    one, longer, other = conversation.interactions
    assert longer.prompt_ids == other.prompt_ids
    assert longer.tools == other.tools == (tool,)
    assert other.parent_id == one.id, "a chat may go on where messages began"


async def test_the_sdks_tool_runner_leaves_the_conversation_to_the_server(
    open_conversation: Open,
) -> None:
    """It sends only what is new, and names the reply that it goes on from."""
    from anthropic import beta_async_tool

    @beta_async_tool
    async def add(a: int, b: int) -> str:
        """Adds."""
        return str(a + b)

    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    conversation = open_conversation(call, f"And {call}", "It is 3.")
    runner = conversation.sdk.beta.messages.tool_runner(
        model="m", max_tokens=50, tools=[add], messages=[USER], system="Brief."
    )
    final = await runner.until_done()
    assert final.content[0].text == "It is 3."
    check_continued(conversation.interactions)
    last = conversation.interactions[-1]
    assert [m["role"] for m in last.messages] == [
        "system", "user", "assistant", "tool", "assistant", "tool",
    ]  # fmt: skip
    assert last.messages[3]["content"] == "3"
    assert [t["function"]["name"] for t in last.tools] == ["add"]


async def test_a_thread_that_is_lost_is_sent_whole_by_the_sdk(open_conversation: Open) -> None:
    conversation = open_conversation("One.", "Two.", "Three.")
    thread = conversation.sdk.beta.messages.thread(model="m", max_tokens=50, system="Brief.")
    await thread.send(USER)
    conversation.tracking.session._interactions.clear()
    reply = await thread.send({"role": "user", "content": "And?"})
    assert reply.content[0].text == "Two."
    [interaction] = conversation.interactions
    assert [m["content"] for m in interaction.messages] == [
        "Brief.", USER["content"], "One.", "And?",
    ]  # fmt: skip


HEADER = "x-anthropic-billing-header: cc_version=2.1; cch=71fea;"


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (f"{HEADER}\nBe brief.", ["Be brief."]),
        (as_texts(HEADER, "Be brief."), ["Be brief."]),
        (HEADER, []),
        ([], []),
        (as_texts("a", "b"), ["ab"]),
    ],
)
async def test_the_system_prompt_is_text_without_what_only_anthropic_reads(
    open_conversation: Open, system: Any, expected: list[str]
) -> None:
    conversation = open_conversation("a")
    await conversation.create(stream=False, messages=[USER], system=system)
    *system_messages, _ = conversation.interactions[0].messages
    assert [m["content"] for m in system_messages] == expected


async def test_blocks_and_neighbours_of_one_role_become_chat_messages(
    open_conversation: Open,
) -> None:
    results: list[Any] = [
        {"content": as_texts("5", "6")},
        {},
        {"content": "no file", "is_error": True},
        {"content": "error: no file", "is_error": True},
        {"content": "fine", "is_error": False},
    ]
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": as_texts("b")},
        # Thoughts of another model are no error.
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "EmwKAhgB"}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}],
        },
        {"role": "assistant", "content": [*as_texts("c"), call]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", **r} for r in results],
        },
        {"role": "user", "content": "d"},
        {"role": "system", "content": "e"},
    ]
    conversation = open_conversation("a")
    await conversation.create(stream=False, messages=messages)
    question, answer, *shown, last, system = conversation.interactions[0].messages
    texts = [{"type": "text", "text": text} for text in "ab"]
    assert question == {"role": "user", "content": texts}
    function = {"name": "f", "arguments": '{"x": 1}'}
    assert answer == {
        "role": "assistant",
        "content": "c",
        "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        "reasoning_content": "hm",
    }
    assert {(m["role"], m["tool_call_id"]) for m in shown} == {("tool", "t1")}
    assert [m["content"] for m in shown] == [
        "5\n6", "", "Error: no file", "error: no file", "fine",
    ]  # fmt: skip
    assert last == {"role": "user", "content": "d"}
    assert system == {"role": "system", "content": "e"}


THOUGHT = "They ask for Paris.\nI look."
SAMPLED = f"<think>\n{THOUGHT}\n</think>\n\n{CALL}"
ENABLED = {"type": "enabled", "budget_tokens": 2000}
OMITTED = {"type": "adaptive", "display": "omitted"}


@pytest.fixture
def open_thinking(open_conversation: Open, tokenizer: Any) -> Open:
    """Conversations of a model whose template shows every turn's thought."""
    thinking = copy.deepcopy(tokenizer)
    thought = (
        "{%- if m.reasoning_content %}"
        "{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
    )
    begin = "'<|im_start|>assistant\\n' + (m.content or '')"
    assert begin in thinking.chat_template
    thinking.chat_template = thinking.chat_template.replace(
        "{{- " + begin + " }}",
        "{{- '<|im_start|>assistant\\n' }}" + thought + "{{- m.content or '' }}",
    )
    return lambda *script: open_conversation(*script, tokenizer=thinking)


def answer(message: Any) -> list[Any]:
    """A conversation in which the message's one call was answered."""
    [call] = [block for block in message.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
    return [
        USER,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (ENABLED, [("thinking", THOUGHT)]),
        ({"type": "adaptive"}, [("thinking", THOUGHT)]),
        (OMITTED, [("thinking", "")]),
        ({"type": "disabled"}, []),
        (None, []),
    ],
)
async def test_a_thought_is_shown_as_asked_and_stays_in_the_conversation(
    open_thinking: Open, thinking: Any, shown: Any, stream: bool
) -> None:
    conversation = open_thinking(SAMPLED, "It is 5.")
    options = {"tools": [TOOL], **({"thinking": thinking} if thinking else {})}
    first = await conversation.create(stream=stream, messages=[USER], **options)
    blocks = [(b.type, b.thinking) for b in first.content if b.type == "thinking"]
    assert blocks == shown
    assert [b.type for b in first.content] == [*(kind for kind, _ in shown), "tool_use"]
    assert all(b.signature == sign_thinking(THOUGHT) for b in first.content if b.type == "thinking")
    await conversation.create(stream=stream, messages=answer(first), **options)
    one, two = conversation.interactions
    assert one.reply["reasoning_content"] == THOUGHT
    assert two.parent_id == one.id
    assert two.mismatch_cause is None
    known = one.prompt_ids + one.completion_ids
    assert two.prompt_ids[: len(known)] == known


async def test_thoughts_that_were_left_out_are_told_apart_by_their_signatures(
    open_thinking: Open,
) -> None:
    other = SAMPLED.replace(THOUGHT, "I know.").replace(CALL, "Rain.")
    conversation = open_thinking(SAMPLED.replace(CALL, "Rain."), other, "Yes.", "Yes.")
    replies = [
        await conversation.create(stream=False, messages=[USER], thinking=OMITTED) for _ in range(2)
    ]
    for reply in replies:
        messages = [USER, {"role": "assistant", "content": reply.content}, USER]
        await conversation.create(stream=False, messages=messages, thinking=OMITTED)
    first, second, on_first, on_second = conversation.interactions
    assert (on_first.parent_id, on_second.parent_id) == (first.id, second.id)


async def test_a_thought_streams_before_its_signature(
    open_thinking: Open, read_stream: Any
) -> None:
    conversation = open_thinking(SAMPLED)
    events = await read_stream(
        conversation, {"messages": [USER], "tools": [TOOL], "thinking": ENABLED}
    )
    data = [json.loads(text) for _, text in events]
    first = [d for d in data if d.get("index") == 0]
    assert first[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    deltas = [d["delta"] for d in first if d["type"] == "content_block_delta"]
    assert len(deltas) > 3
    assert {d["type"] for d in deltas[:-1]} == {"thinking_delta"}
    assert "".join(d["thinking"] for d in deltas[:-1]) == THOUGHT
    assert deltas[-1] == {"type": "signature_delta", "signature": sign_thinking(THOUGHT)}
    assert first[-1]["type"] == "content_block_stop"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"thinking": ENABLED}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({}, {}),
    ],
)
async def test_the_template_is_passed_whether_to_think(
    open_conversation: Open, make_tokenizer: Any, options: Any, expected: Any
) -> None:
    names = ("enable_thinking", "thinking", "reasoning_effort")
    shown = "".join(f"{{% if {n} is defined %}}{n}={{{{ {n} }}}};{{% endif %}}" for n in names)
    tokenizer = make_tokenizer("{{ messages[0].content }}:" + shown)
    conversation = open_conversation("a", tokenizer=tokenizer)
    await conversation.create(stream=False, messages=[USER], **options)
    prompt = tokenizer.decode(conversation.interactions[0].prompt_ids)
    said = USER["content"]
    assert prompt == f"{said}:" + "".join(f"{n}={v};" for n, v in expected.items())
