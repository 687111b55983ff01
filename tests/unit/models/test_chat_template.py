from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from agentrl_cli.models.tokenizer_training import build_untrained_tokenizer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOL_TEXT = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'


@pytest.fixture(scope="module")
def render() -> Callable[..., str]:
    return partial(build_untrained_tokenizer().apply_chat_template, tokenize=False)


def call(arguments: Any, name: str = "add") -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: Any, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def write_turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


@pytest.mark.parametrize(
    ("messages", "turns"),
    [
        ([user("Hi")], [("user", "Hi")]),
        (
            [{"role": "system", "content": "A"}, user("B"), {"role": "assistant", "content": "C"}],
            [("system", "A"), ("user", "B"), ("assistant", "C")],
        ),
        (
            [{"role": "developer", "content": "A"}, user("B"), {"role": "system", "content": "C"}],
            [("system", "A"), ("user", "B"), ("system", "C")],
        ),
        (
            [user([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}])],
            [("user", "one two")],
        ),
    ],
)
def test_plain_conversations(render, messages, turns) -> None:
    text = "".join(write_turn(*turn) for turn in turns)
    assert render(messages) == text
    assert render(messages, add_generation_prompt=True) == text + "<|im_start|>assistant\n"


@pytest.mark.parametrize("system", ["Be brief.", None])
def test_tools_stand_in_the_system_part(render, system: str | None) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    before = "Be brief.\n\n" if system else ""
    assert render(messages, tools=[TOOL, TOOL]) == (
        f"<|im_start|>system\n{before}<tools>\n{TOOL_TEXT}\n{TOOL_TEXT}\n</tools><|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
    )


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"a": 1, "b": "é"}, '{"a": 1, "b": "é"}'),
        ('{"b":2,  "a":"é"}', '{"b":2,  "a":"é"}'),  # to the letter
        ("", "{}"),
        (None, "{}"),
    ],
)
def test_tool_call_is_rendered_as_it_is_sampled(render, content, arguments, expected) -> None:
    called = f'<tool_call>\n{{"name": "add", "arguments": {expected}}}\n</tool_call>'
    assert render([assistant(content, call(arguments))]) == write_turn("assistant", called)


@pytest.mark.parametrize("content", ["Let me see.", "Let me see.\n"])
def test_text_goes_before_parallel_calls(render, content: str) -> None:
    text = render([assistant(content, call({"a": 1}), call({}, name="now"))])
    assert text == (
        '<|im_start|>assistant\nLet me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>\n'
    )


def test_neighbouring_tool_results_share_a_user_turn(render) -> None:
    results = [{"role": "tool", "tool_call_id": "c", "content": one} for one in ("1", "2", None)]
    answer = {"role": "assistant", "content": "3"}
    first, second, empty = (f"<tool_response>\n{one}\n</tool_response>" for one in ("1", "2", ""))
    text = render([user("Hi"), *results[:2], answer, results[2]])
    turns = [("user", f"{first}\n{second}"), ("assistant", "3"), ("user", empty)]
    assert text == write_turn("user", "Hi") + "".join(write_turn(*turn) for turn in turns)


def test_each_turn_extends_the_one_before(render) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        assistant("Yes.", call({"a": 1})),
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        assistant(""),
        {"role": "user", "content": "Thanks"},
    ]
    texts = [render(messages[:length], tools=[TOOL]) for length in range(1, 6)]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)
