"""Turns on templates as published: the tokens that are continued are those that were sampled.

Each way in which frameworks replay reasoning, on templates that show it, strip it once the
user speaks again, or want it in places of their own; ids are compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentrl_cli.records import Interaction, MismatchCause
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.template import ChatTemplate
from tests.unit.tracking.conftest import build_tokenizer

Open = Callable[..., TrackingClient]
USER = {"role": "user", "content": "What is the weather in Paris?"}
AGAIN = {"role": "user", "content": "And then?"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'

_SHOWN = "'<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text.lstrip('\\n')"
_TURNS = """\
{%- set ns = namespace(last_query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>assistant\\n' }}
{%- set thought = '' %}{% set text = m.content %}
READ_REASONING
{%- if thought and SHOWS %}{{- SHOWN }}{% else %}{{- text }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson) }}
{{- '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\nPROMPT' }}{% endif %}"""
_FROM_CONTENT = """\
{%- if '</think>' in m.content %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1] %}
{%- set text = m.content.split('</think>')[-1] %}{% endif %}"""
_FROM_KEY = """\
{%- if m.KEY is string %}{% set thought = m.KEY %}{% endif %}"""


def write_template(
    shows: str, *, key: str | None = "reasoning_content", prompt: str = "", content: bool = True
) -> str:
    read = (_FROM_CONTENT if content else "") + (_FROM_KEY.replace("KEY", key) if key else "")
    return (
        _TURNS.replace("READ_REASONING", read)
        .replace("SHOWN", _SHOWN)
        .replace("SHOWS", shows)
        .replace("PROMPT", prompt)
    )


_IN_LOOP = "loop.index0 > ns.last_query"
#: Reasoning of turns before the last question is stripped, as by Qwen3.
STRIPS = write_template(_IN_LOOP)
#: It is always stripped, and the prompt begins it, as by DeepSeek-R1.
STRIPS_ALL = write_template("false", key=None, prompt="<think>\\n")
KEEPS = write_template("true")
#: Another key than the one of the wire, as gpt-oss's and Granite's.
KEEPS_BY_OTHER_KEY = write_template("true", key="thinking", content=False)
KEEPS_CONTENT = write_template("true", key=None)
#: Knows nothing of reasoning: it is text.
PLAIN = write_template("false", key=None, content=False)


def kept(message: dict[str, Any]) -> dict[str, Any]:
    return message


def renamed(message: dict[str, Any]) -> dict[str, Any]:
    rest = {k: v for k, v in message.items() if k != "reasoning_content"}
    return {**rest, "reasoning": message["reasoning_content"]}


def dropped(message: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in message.items() if k != "reasoning_content"}


def moved(message: dict[str, Any]) -> dict[str, Any]:
    thought = message["reasoning_content"]
    return {
        **dropped(message),
        "content": f"<think>\n{thought}\n</think>\n\n{message.get('content') or ''}",
    }


def sent_twice(message: dict[str, Any]) -> dict[str, Any]:
    return {**moved(message), **{k: v for k, v in message.items() if k == "reasoning_content"}}


WAYS = [kept, renamed, dropped, moved, sent_twice]


@pytest.fixture
def make_tokenizer(make_tokenizer: Callable[[str], Any]) -> Callable[[str], Any]:
    """The templates here are about turns; all of them show tools in the same way."""
    return lambda template: make_tokenizer("{{ tools | tojson if tools }}" + template)


async def ask(client: TrackingClient, messages: list[Any], **options: Any) -> dict[str, Any]:
    completion = await client.chat.completions.create(model="m", messages=messages, **options)
    return completion.choices[0].message.model_dump(exclude_none=True)


def assert_spliced(
    client: TrackingClient, child: Interaction, parent: Interaction, after: str
) -> None:
    """The child's prompt is the parent's own tokens and those of ``after``, nothing else."""
    text_ids = client.gateway.template.encode(after)  # type: ignore[attr-defined]
    assert child.prompt_ids == parent.prompt_ids + parent.completion_ids + text_ids
    assert (child.parent_id, child.extends_parent, child.mismatch_cause) == (parent.id, True, None)


def render(client: TrackingClient, text: str) -> tuple[int, ...]:
    return client.gateway.template.encode(text)  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "template", [STRIPS, KEEPS, KEEPS_BY_OTHER_KEY, KEEPS_CONTENT, PLAIN],
    ids=["strips", "keeps", "other key", "in content", "plain"],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_before_a_call_is_spliced(
    open_client: Open,
    make_tokenizer: Callable[[str], Any],
    way: Callable[[dict[str, Any]], dict[str, Any]],
    template: str,
    stream: bool,
) -> None:
    reading = {"reasoning_parser": "qwen3"}
    script = ["<think>\nhm  hm\n\n</think>\n\n\nI look.\n" + CALL, "sunny"]
    client = open_client(*script, tokenizer=make_tokenizer(template), reading=reading)
    if stream:
        async with client.chat.completions.stream(
            model="m",
            messages=[USER],
            tools=[TOOL],  # type: ignore[list-item]
        ) as events:
            async for _ in events:
                pass
        first = dict(client.interactions[0].reply or {})
    else:
        first = await ask(client, [USER], tools=[TOOL])
    assert (first["reasoning_content"], first["content"]) == ("hm  hm", "I look.\n")
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "20"}
    await ask(client, [USER, way(first), result], tools=[TOOL])
    one, two = client.interactions
    assert_spliced(
        client, two, one,
        "\n<|im_start|>user\n<tool_response>\n20\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n",
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("opened", [False, True], ids=["tag sampled", "tag in prompt"])
async def test_reasoning_that_is_stripped_mismatches_once(
    open_client: Open, make_tokenizer: Callable[[str], Any], way: Any, opened: bool
) -> None:
    template = STRIPS_ALL if opened else STRIPS
    begin = "" if opened else "<think>\n"
    script = [begin + "hm\n</think>\n\nParis", begin + "so\n</think>\n\nyes", "end"]
    client = open_client(*script, tokenizer=make_tokenizer(template))
    first = await ask(client, [USER])
    assert (first["reasoning_content"], first["content"]) == ("hm", "Paris")
    second = await ask(client, [USER, way(first), AGAIN])
    one, two = client.interactions
    assert (two.parent_id, two.extends_parent) == (one.id, False)
    assert two.mismatch_cause is MismatchCause.THINKING_STRIPPED
    prompt = "<|im_start|>assistant\n" + ("<think>\n" if opened else "")
    # Templates that split the content leave the lines before the answer.
    lines = "\n\n" if way is moved else ""
    question = "<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n"
    assert two.prompt_ids == render(
        client,
        f"{question}<|im_start|>assistant\n{lines}Paris<|im_end|>\n"
        f"<|im_start|>user\nAnd then?<|im_end|>\n{prompt}",
    )
    # The first reasoning is gone for good: only the second mismatches now.
    await ask(client, [USER, way(first), AGAIN, way(second), AGAIN])
    three = client.interactions[2]
    assert (three.parent_id, three.mismatch_cause) == (two.id, MismatchCause.THINKING_STRIPPED)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("opened", [False, True], ids=["tag sampled", "tag in prompt"])
async def test_keep_reasoning_splices_whatever_the_template_strips(
    open_client: Open, make_tokenizer: Callable[[str], Any], way: Any, opened: bool
) -> None:
    template = STRIPS_ALL if opened else STRIPS
    begin = "" if opened else "<think>\n"
    script = [begin + "hm\n</think>\n\nParis", begin + "so</think>yes", "end"]
    reading = {"keep_reasoning": True}
    client = open_client(*script, tokenizer=make_tokenizer(template), reading=reading)
    first = await ask(client, [USER])
    second = await ask(client, [USER, way(first), AGAIN])
    await ask(client, [USER, way(first), AGAIN, way(second), AGAIN])
    one, two, three = client.interactions
    after = "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    after += "<think>\n" if opened else ""
    assert_spliced(client, two, one, after)
    assert_spliced(client, three, two, after)
    [exported] = client.export_interactions().values()
    sampled = sum(len(i.completion_ids) for i in client.interactions)
    assert sum(exported.loss_mask) == sampled


async def test_reasoning_that_was_edited_is_another_turn(
    open_client: Open, make_tokenizer: Callable[[str], Any]
) -> None:
    client = open_client("<think>hm</think>Paris", "yes", tokenizer=make_tokenizer(KEEPS))
    first = await ask(client, [USER])
    await ask(client, [USER, {**first, "reasoning_content": "ha"}, AGAIN])
    _, two = client.interactions
    assert (two.parent_id, two.mismatch_cause) == (None, MismatchCause.HISTORY_EDITED)
    assert "ha" in client.gateway.template.tokenizer.decode(two.prompt_ids)  # type: ignore[attr-defined]


async def test_reasoning_tells_which_of_two_equal_replies_goes_on(
    open_client: Open, make_tokenizer: Callable[[str], Any]
) -> None:
    script = ["<think>a</think>Paris", "<think>b</think>Paris", "x", "y", "z"]
    client = open_client(*script, tokenizer=make_tokenizer(KEEPS))
    first = await ask(client, [USER])
    second = await ask(client, [USER])
    await ask(client, [USER, first, AGAIN])
    await ask(client, [USER, second, AGAIN])
    await ask(client, [USER, dropped(first), {"role": "user", "content": "Who?"}])
    one, two, *children = client.interactions
    assert [child.parent_id for child in children] == [one.id, two.id, two.id]


async def test_reasoning_as_short_as_a_word_of_the_answer_is_not_mistaken_for_it(
    open_client: Open, make_tokenizer: Callable[[str], Any]
) -> None:
    client = open_client("<think>a</think>a a a", "yes", tokenizer=make_tokenizer(STRIPS))
    first = await ask(client, [USER])
    await ask(client, [USER, first, AGAIN])
    assert client.interactions[1].mismatch_cause is MismatchCause.THINKING_STRIPPED


# -- what published templates do that others do not ------------------------------------------

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
        assert text.endswith(
            "]<|im_start|>What is the weather in Paris?<|im_start|>assistant</think>"
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
        *(f"<|channel|>final<|message|>{text}" for text in ("sunny", "elsewhere", "bye")),
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
    # Another conversation in between.
    await ask(client, [AGAIN], tools=[TOOL])
    await ask(client, [USER, first, result, second, AGAIN], tools=[TOOL])
    one, two, _, three = client.interactions
    assert_spliced(
        client, two, one,
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"20"<|end|>'
        "<|start|>assistant",
    )  # fmt: skip
    # The end that was sampled stays, in place of the one that the template would write.
    assert tokenizer.decode(two.completion_ids[-1]) == "<|return|>"
    assert_spliced(client, three, two, "<|start|>user<|message|>And then?<|end|><|start|>assistant")


JOINED = "(m.content | map(attribute='text') | join)"


@pytest.mark.parametrize(
    ("shown", "text"),
    [("m.content", "a\nb"), (f"m.content if m.content is string else {JOINED}", "ab")],
)
async def test_parts_are_joined_by_the_template_or_by_line_breaks(
    open_client: Open, make_tokenizer: Callable[[str], Any], shown: str, text: str
) -> None:
    template = KEEPS.replace("m.content + '<|im_end|>", f"({shown}) + '<|im_end|>", 1)
    client = open_client("x", tokenizer=make_tokenizer(template))
    parts = [{"type": "text", "text": part} for part in "ab"]
    await ask(client, [{"role": "user", "content": parts}])
    prompt = client.gateway.template.decode_all(client.interactions[0].prompt_ids)  # type: ignore[attr-defined]
    assert prompt.startswith(f"<|im_start|>user\n{text}<|im_end|>")


async def test_changed_tools_are_still_a_changed_template(
    open_client: Open, make_tokenizer: Callable[[str], Any]
) -> None:
    script = ["</think>Paris", "yes"]
    client = open_client(*script, tokenizer=make_tokenizer(DEEPSEEK))
    first = await ask(client, [USER], tools=[TOOL])
    await ask(client, [USER, first, AGAIN], tools=[OTHER])
    assert client.interactions[1].mismatch_cause is MismatchCause.TEMPLATE_CHANGED


@pytest.mark.parametrize("state", ["padding", "truncation", "split_special_tokens"])
def test_what_else_a_tokenizer_is_set_to_does_not_change_ids(state: str) -> None:
    tokenizer = build_tokenizer()
    text = "<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n"
    expected = tuple(build_tokenizer().encode(text, add_special_tokens=False))
    if state == "split_special_tokens":
        tokenizer.split_special_tokens = True
        expected = tuple(tokenizer.encode(text, add_special_tokens=False))
    template = ChatTemplate(tokenizer)
    if state == "padding":
        tokenizer.backend_tokenizer.enable_padding(length=64)
    elif state == "truncation":
        tokenizer.backend_tokenizer.enable_truncation(3)
    assert template.encode(text) == expected
