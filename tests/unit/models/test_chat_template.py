from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agentrl_cli.models.tokenizer import build_untrained_tokenizer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOL_TEXT = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'


@pytest.fixture(scope="module")
def renderer() -> PreTrainedTokenizerFast:
    return build_untrained_tokenizer()


def render(
    renderer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **options: Any
) -> str:
    return renderer.apply_chat_template(messages, tokenize=False, **options)


def call(arguments: Any, name: str = "add") -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: Any, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def test_plain_conversation(renderer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    assert render(renderer, messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_no_system_part_without_instructions_or_tools(renderer: PreTrainedTokenizerFast) -> None:
    text = render(renderer, [{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize("system", ["Be brief.", None])
def test_tools_stand_in_the_system_part(
    renderer: PreTrainedTokenizerFast, system: str | None
) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    before = "Be brief.\n\n" if system else ""
    assert render(renderer, messages, tools=[TOOL, TOOL]) == (
        f"<|im_start|>system\n{before}<tools>\n{TOOL_TEXT}\n{TOOL_TEXT}\n</tools><|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
    )


def test_developer_and_later_system_messages(renderer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "developer", "content": "A"},
        {"role": "user", "content": "B"},
        {"role": "system", "content": "C"},
    ]
    assert render(renderer, messages) == (
        "<|im_start|>system\nA<|im_end|>\n<|im_start|>user\nB<|im_end|>\n"
        "<|im_start|>system\nC<|im_end|>\n"
    )


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("arguments", [{"a": 1, "b": "é"}, '{"a": 1, "b": "é"}'])
def test_tool_call_is_rendered_as_it_is_sampled(
    renderer: PreTrainedTokenizerFast, content: str | None, arguments: Any
) -> None:
    text = render(renderer, [assistant(content, call(arguments))])
    assert text == (
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n'
        "</tool_call><|im_end|>\n"
    )


def test_arguments_given_as_text_are_kept_to_the_letter(
    renderer: PreTrainedTokenizerFast,
) -> None:
    assert '"arguments": {"b":2,  "a":1}}' in render(
        renderer, [assistant(None, call('{"b":2,  "a":1}'))]
    )


@pytest.mark.parametrize("arguments", ["", None, {}])
def test_missing_arguments_are_an_empty_object(
    renderer: PreTrainedTokenizerFast, arguments: Any
) -> None:
    assert '{"name": "add", "arguments": {}}' in render(
        renderer, [assistant(None, call(arguments))]
    )


@pytest.mark.parametrize("content", ["Let me see.", "Let me see.\n"])
def test_text_goes_before_parallel_calls(renderer: PreTrainedTokenizerFast, content: str) -> None:
    text = render(renderer, [assistant(content, call({"a": 1}), call({}, name="now"))])
    assert text == (
        '<|im_start|>assistant\nLet me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>\n'
    )


def test_neighbouring_tool_results_share_a_user_turn(renderer: PreTrainedTokenizerFast) -> None:
    messages = [
        assistant(None, call({}), call({})),
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        assistant("3"),
        {"role": "tool", "tool_call_id": "c", "content": None},
    ]
    text = render(renderer, messages)
    assert text.partition("</tool_call><|im_end|>\n")[2] == (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n\n</tool_response><|im_end|>\n"
    ).replace("</tool_call><|im_end|>\n", "")


def test_content_in_parts(renderer: PreTrainedTokenizerFast) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    text = render(
        renderer, [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
    )
    assert text == ("<|im_start|>system\none two<|im_end|>\n<|im_start|>user\none two<|im_end|>\n")


def test_each_turn_extends_the_one_before(renderer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        assistant("Yes.", call({"a": 1})),
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        assistant(""),
        {"role": "user", "content": "Thanks"},
    ]
    texts = [render(renderer, messages[:length], tools=[TOOL]) for length in range(1, 6)]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)
