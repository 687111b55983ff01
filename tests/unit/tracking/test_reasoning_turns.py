"""Turns with reasoning: however it comes back, the tokens are those that were sampled.

Each way in which frameworks replay reasoning, on templates that show it, strip it once the
user speaks again, or want it in places of their own; ids are compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentrl_cli.records import Interaction, MismatchCause
from agentrl_cli.tracking.client import TrackingClient

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


WAYS = [kept, renamed, dropped, moved]


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
