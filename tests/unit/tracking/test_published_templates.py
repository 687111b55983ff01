"""What published chat templates do that others do not, and that turns are spliced all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentrl_cli.records import MismatchCause
from agentrl_cli.tracking.client import TrackingClient

Open = Callable[..., TrackingClient]
USER = {"role": "user", "content": "What is the weather in Paris?"}
AGAIN = {"role": "user", "content": "And then?"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}

#: As DeepSeek V3.1: the prompt opens a thought, a turn of the past begins with its end; arguments
#: are put together as text; nothing begins the turn after a tool's result.
DEEPSEEK = """\
{%- set ns = namespace(user=false) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.user = true %}{{- '<|im_start|>' + m.content }}
{%- elif m.role == 'tool' %}{% set ns.user = false %}{{- '<|im_start|>output ' + m.content }}
{%- else %}
{%- if ns.user %}{{- '<|im_start|>assistant</think>' }}{% endif %}{% set ns.user = false %}
{{- m.content.split('</think>')[-1] }}
{%- for c in m.tool_calls or [] %}
{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}
{{- '<｜tool▁call▁end｜>' }}{% endfor %}
{{- '<|im_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt and ns.user %}{{- '<|im_start|>assistant<think>' }}{% endif %}"""
DEEPSEEK_CALL = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x":1}<｜tool▁call▁end｜>'
#: As GLM 4.5: no end of turn; what follows a turn ends it, and the model samples that.
GLM = """\
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|im_end|>' + m.content }}
{%- elif m.role == 'tool' %}{{- '<|endoftext|><tool_response>' + m.content }}
{%- else %}{{- '<|im_start|>' }}
{%- if m.reasoning_content %}{{- '\\n<think>' + m.reasoning_content + '</think>' }}
{%- else %}{{- '\\n<think></think>' }}{% endif %}
{{- '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>' + c.function.name }}
{%- for k, v in c.function.arguments.items() %}
{{- '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v | tojson) + '</arg_value>' }}{% endfor %}
{{- '</tool_call>' }}{% endfor %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"""


#: As Llama 2: the end of a turn stands behind a space.
LLAMA_2 = """\
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|im_start|>[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{- ' ' + m.content | trim + ' <|im_end|>' }}{% endif %}{% endfor %}"""
#: As gpt-oss: a call is a message of its own, a result wants to see its call, and a turn of the
#: past ends with another token than the one that is sampled.
GPT_OSS = """\
{%- set ns = namespace(called=none) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}
{%- if ns.called is none %}{{- raise_exception('no previous tool call') }}{% endif %}
{{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' }}
{{- (m.content | tojson) + '<|end|>' }}
{%- elif m.tool_calls %}
{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking }}
{{- '<|end|>' }}{% endif %}
{%- set c = m.tool_calls[0].function %}{% set ns.called = c.name %}
{{- '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}
{{- (c.arguments | tojson) + '<|call|>' }}
{%- else %}{% set ns.called = none %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
GPT_OSS_TOKENS = [
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>",
]  # fmt: skip


async def ask(client: TrackingClient, messages: list[Any], **options: Any) -> dict[str, Any]:
    completion = await client.chat.completions.create(model="m", messages=messages, **options)
    return completion.choices[0].message.model_dump(exclude_none=True)


def assert_spliced(client: TrackingClient, child: Any, parent: Any, after: str) -> None:
    text_ids = client.gateway.template.encode(after)  # type: ignore[attr-defined]
    assert child.prompt_ids == parent.prompt_ids + parent.completion_ids + text_ids
    assert (child.parent_id, child.mismatch_cause) == (parent.id, None)


@pytest.mark.parametrize("keep_reasoning", [False, True])
async def test_deepseek_begins_past_turns_in_another_way(
    open_client: Open, make_tokenizer: Callable[[str], Any], keep_reasoning: bool
) -> None:
    script = ["hm</think>" + DEEPSEEK_CALL, "sunny", "bye"]
    reading = {"keep_reasoning": keep_reasoning}
    client = open_client(*script, tokenizer=make_tokenizer(DEEPSEEK), reading=reading)
    first = await ask(client, [USER], tools=[TOOL])
    assert first["reasoning_content"] == "hm"
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "20"}
    second = await ask(client, [USER, first, result], tools=[TOOL])
    await ask(client, [USER, first, result, second, AGAIN], tools=[TOOL])
    one, two, three = client.interactions
    if keep_reasoning:
        assert_spliced(client, two, one, "<|im_start|>output 20")
    else:
        assert two.mismatch_cause is MismatchCause.THINKING_STRIPPED
        text = client.gateway.template.tokenizer.decode(two.prompt_ids)  # type: ignore[attr-defined]
        assert text == (
            "<|im_start|>What is the weather in Paris?<|im_start|>assistant</think>"
            + DEEPSEEK_CALL.replace('"x":1', '"x": 1')
            + "<|im_end|><|im_start|>output 20"
        )
    assert_spliced(client, three, two, "<|im_start|>And then?<|im_start|>assistant<think>")


async def test_glm_ends_a_turn_with_what_follows(
    open_client: Open, make_tokenizer: Callable[[str], Any]
) -> None:
    call = "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    script = [
        (f"\n<think>hm</think>\nI look.{call}<|endoftext|>", "length"),
        ("\n<think></think>\nsunny", "stop"),
        "bye",
    ]
    client = open_client(*script, tokenizer=make_tokenizer(GLM))
    first = await ask(client, [USER], tools=[TOOL])
    assert (first["reasoning_content"], first["content"]) == ("hm", "I look.")
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "20"}
    second = await ask(client, [USER, first, result], tools=[TOOL])
    await ask(client, [USER, first, result, second, AGAIN], tools=[TOOL])
    one, two, three = client.interactions
    assert_spliced(client, two, one, "<tool_response>20<|im_start|>")
    assert_spliced(client, three, two, "And then?<|im_start|>")


async def test_glm_tells_who_speaks_also_after_another_end(
    open_client: Open, make_tokenizer: Callable[[str], Any]
) -> None:
    # The model wants to see a tool's result, but what it wrote is no call: the user speaks.
    tokenizer = make_tokenizer(GLM)
    tokenizer.eos_token = "<|endoftext|>"
    client = open_client("\n<think></think>\nI look.", "bye", tokenizer=tokenizer)
    first = await ask(client, [USER], tools=[TOOL])
    await ask(client, [USER, first, AGAIN], tools=[TOOL])
    one, two = client.interactions
    assert tokenizer.decode(one.completion_ids[-1]) == "<|endoftext|>"
    assert_spliced(client, two, one, "<|im_end|>And then?<|im_start|>")


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
async def test_llama_2_writes_a_space_before_the_end_of_a_turn(
    open_client: Open, make_tokenizer: Callable[[str], Any], end: str
) -> None:
    tokenizer = make_tokenizer(LLAMA_2)
    tokenizer.eos_token = end
    client = open_client(" Paris", (" cut off", "length"), "bye", tokenizer=tokenizer)
    first = await ask(client, [USER])
    second = await ask(client, [USER, first, AGAIN])
    await ask(client, [USER, first, AGAIN, second, AGAIN])
    one, two, three = client.interactions
    assert_spliced(client, two, one, "<|im_start|>[INST] And then? [/INST]")
    assert_spliced(client, three, two, " <|im_end|><|im_start|>[INST] And then? [/INST]")


async def test_a_turn_without_an_end_leaves_the_next_its_beginning(
    open_client: Open, make_tokenizer: Callable[[str], Any]
) -> None:
    template = LLAMA_2.replace(" <|im_end|>", "\\n")
    client = open_client(" Paris", "bye", tokenizer=make_tokenizer(template))
    first = await ask(client, [USER])
    await ask(client, [USER, first, AGAIN])
    one, two = client.interactions
    assert_spliced(client, two, one, "\n<|im_start|>[INST] And then? [/INST]")


@pytest.mark.parametrize("way", ["kept", "dropped"])
async def test_gpt_oss_wants_to_see_the_call_and_ends_turns_of_the_past_otherwise(
    open_client: Open, make_tokenizer: Callable[[str], Any], way: str
) -> None:
    tokenizer = make_tokenizer(GPT_OSS)
    tokenizer.add_special_tokens({"additional_special_tokens": GPT_OSS_TOKENS})
    tokenizer.eos_token = "<|return|>"
    call = ' to=functions.f<|channel|>commentary json<|message|>{"x":1}<|call|>'
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    script: list[Any] = [
        (thought + call, "length"),
        "<|channel|>final<|message|>sunny",
        "<|channel|>final<|message|>bye",
    ]
    client = open_client(*script, tokenizer=tokenizer, reading={"keep_reasoning": True})
    first = await ask(client, [USER], tools=[TOOL])
    assert first["reasoning_content"] == "hm"
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    if way == "dropped":
        del first["reasoning_content"]
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "20"}
    second = await ask(client, [USER, first, result], tools=[TOOL])
    assert second["content"] == "sunny"
    await ask(client, [USER, first, result, second, AGAIN], tools=[TOOL])
    one, two, three = client.interactions
    assert_spliced(
        client, two, one,
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"20"<|end|>'
        "<|start|>assistant",
    )  # fmt: skip
    # The end that was sampled stays, in place of the one that the template would write.
    assert tokenizer.decode(two.completion_ids[-1]) == "<|return|>"
    assert_spliced(client, three, two, "<|start|>user<|message|>And then?<|end|><|start|>assistant")


async def test_changed_tools_are_still_a_changed_template(
    open_client: Open, make_tokenizer: Callable[[str], Any]
) -> None:
    template = "{{ tools | tojson if tools }}" + DEEPSEEK
    script = ["</think>Paris", "yes"]
    client = open_client(*script, tokenizer=make_tokenizer(template))
    first = await ask(client, [USER], tools=[TOOL])
    await ask(client, [USER, first, AGAIN], tools=[OTHER])
    assert client.interactions[1].mismatch_cause is MismatchCause.TEMPLATE_CHANGED
