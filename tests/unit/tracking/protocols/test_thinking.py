"""Thoughts over ``/v1/messages``: shown where they were asked for, and never lost."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_cli.records import MismatchCause
from agentrl_cli.tracking.protocols.messages import sign_thinking

pytestmark = pytest.mark.anthropic

Open = Callable[..., Any]
USER: Any = {"role": "user", "content": "What is the weather in Paris?"}
TOOL: Any = {"name": "f", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
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


async def test_an_edited_thought_is_another_turn(open_thinking: Open) -> None:
    conversation = open_thinking(SAMPLED, "It is 5.")
    first = await conversation.create(stream=False, messages=[USER], tools=[TOOL], thinking=ENABLED)
    messages = answer(first)
    blocks = [block.model_dump() for block in first.content]
    blocks[0]["thinking"] = "I look."
    messages[1] = {"role": "assistant", "content": blocks}
    await conversation.create(stream=False, messages=messages, tools=[TOOL], thinking=ENABLED)
    assert conversation.interactions[1].mismatch_cause is MismatchCause.HISTORY_EDITED


async def test_thoughts_of_another_model_are_no_error(open_thinking: Open) -> None:
    conversation = open_thinking("Yes.")
    blocks = [
        {"type": "redacted_thinking", "data": "EmwKAhgB"},
        {"type": "thinking", "thinking": "Hm.", "signature": "EqQBCgIYAhIM"},
        {"type": "text", "text": "Rain."},
    ]
    messages = [USER, {"role": "assistant", "content": blocks}, USER]
    await conversation.create(stream=False, messages=messages)
    [interaction] = conversation.interactions
    assert interaction.messages[1] == {
        "role": "assistant", "content": "Rain.", "reasoning_content": "Hm.",
    }  # fmt: skip


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
    tokenizer = make_tokenizer("prompt:" + shown)
    conversation = open_conversation("a", tokenizer=tokenizer)
    await conversation.create(stream=False, messages=[USER], **options)
    prompt = tokenizer.decode(conversation.interactions[0].prompt_ids)
    assert prompt == "prompt:" + "".join(f"{n}={v};" for n, v in expected.items())
