"""gpt-oss: messages on channels."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl_cli.tracking.formats.harmony import HarmonyParser

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>'
THOUGHT = "<|channel|>analysis<|message|>hm<|end|>"
NEXT = "<|start|>assistant"


def read(text: str, tools: Any = TOOLS) -> tuple[str, str, list[tuple[str, Any]]]:
    parser = HarmonyParser(tools)
    parsed = parser.feed(text)
    parsed.add(parser.finish())
    calls = [
        (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in parsed.tool_calls
    ]
    return parsed.reasoning, parsed.content, calls


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (THOUGHT + NEXT + CALL, ("hm", "", [("f", {"x": 1})])),
        (
            f"{THOUGHT}{NEXT}<|channel|>final<|message|>Paris<|return|>",
            ("hm", "Paris", []),
        ),
        # The recipient may stand before the channel.
        (
            ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>',
            ("", "", [("f", {"x": 1})]),
        ),
        # A preamble to the user, then two calls.
        (
            f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}{NEXT}{CALL}",
            ("", "I look.", [("f", {"x": 1}), ("f", {"x": 1})]),
        ),
        (f"{THOUGHT}{NEXT}{THOUGHT}", ("hm\nhm", "", [])),
        ("<|channel|>final<|message|>cut off", ("", "cut off", [])),
        ("<|channel|>analysis<|message|>cut off", ("cut off", "", [])),
        (CALL.replace("<|call|>", ""), ("", "", [("f", {"x": 1})])),
        (CALL[:-10], ("", '{"x": ', [])),
        (CALL.replace('{"x": 1}', "{bad}") + NEXT + CALL, ("", "{bad}", [("f", {"x": 1})])),
        (CALL.replace('{"x": 1}', ""), ("", "", [("f", {})])),
        ("plain text", ("", "plain text", [])),
        ("<|channel|>final", ("", "<|channel|>final", [])),
        ("", ("", "", [])),
        # The end of a thought was forgotten.
        (
            f"<|channel|>analysis<|message|>hm{NEXT}<|channel|>final<|message|>Paris",
            ("hm", "Paris", []),
        ),
    ],
)
def test_messages_of_a_reply(text: str, expected: Any) -> None:
    assert read(text) == expected


def test_without_tools_a_call_is_text() -> None:
    assert read(CALL, ()) == ("", '{"x": 1}', [])


def test_content_is_given_out_as_it_comes() -> None:
    parser = HarmonyParser(TOOLS)
    assert parser.feed("<|channel|>final<|message|>Par").content == "Par"
    assert parser.feed("is").content == "is"
