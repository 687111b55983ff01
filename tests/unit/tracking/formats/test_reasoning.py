"""Thoughts are parted from answers, wherever the opening tag stands."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_cli.tracking.formats.call_scanner import ParsedText
from agentrl_cli.tracking.formats.format_table import REASONING_FORMATS, TOOL_CALL_FORMATS
from agentrl_cli.tracking.formats.reply_formats import ReasoningParser, ReplyContext, TextParser

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
QWEN3 = REASONING_FORMATS["qwen3"]


def build(name: str = "qwen3", prompt_end: str = "", with_calls: bool = True) -> TextParser:
    reasoning = REASONING_FORMATS[name]
    answer = TOOL_CALL_FORMATS["hermes"].build_parser(ReplyContext()) if with_calls else None
    is_inside = reasoning.is_inside(prompt_end)
    return ReasoningParser(reasoning, is_inside=is_inside, answer=answer)


def read(parser: TextParser, text: str, sizes: list[int] | None = None) -> tuple[str, str, Any]:
    parsed = ParsedText()
    at = number = 0
    while at < len(text):
        size = sizes[number % len(sizes)] if sizes else len(text)
        parsed.add(parser.feed(text[at : at + size]))
        at, number = at + size, number + 1
    parsed.add(parser.finish())
    calls = [json.loads(c["function"]["arguments"]) for c in parsed.tool_calls]
    return parsed.reasoning, parsed.content, calls


@pytest.mark.parametrize(
    ("prompt_end", "text", "expected"),
    [
        ("", "<think>\nhm\n</think>\n\nParis", ("hm", "Paris", [])),
        ("", "\n<think>\na\n\nb \n</think>\n\n" + CALL, ("a\n\nb", "", [{"x": 1}])),
        ("<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nParis", ("hm", "Paris", [])),
        # Some models write the tag again that the prompt has.
        ("<|im_start|>assistant\n<think>\n", "<think>hm</think>Paris", ("hm", "Paris", [])),
        ("assistant\n<think>\n\n</think>\n\n", "Paris", ("", "Paris", [])),
        ("<think>", "never ends", ("never ends", "", [])),
        ("<think>", "cut </thin", ("cut </thin", "", [])),
        ("", "<think>\n\n</think>\n\nParis", ("", "Paris", [])),
        ("", "no thought </think> at all", ("", "no thought </think> at all", [])),
        ("", "later <think>x</think>", ("", "later <think>x</think>", [])),
        ("", f"<think>maybe {CALL}</think>{CALL}", (f"maybe {CALL}", "", [{"x": 1}])),
        ("", f"<think>{CALL}", (CALL, "", [])),
        ("", "<think>hm</think>\n I call.\n" + CALL, ("hm", "I call.\n", [{"x": 1}])),
        ("", "<thin", ("", "<thin", [])),
        ("", "  \n", ("", "  \n", [])),
        ("", "", ("", "", [])),
    ],
)
def test_thought_and_answer(prompt_end: str, text: str, expected: tuple[str, str, Any]) -> None:
    assert read(build(prompt_end=prompt_end), text) == expected


def test_formats_that_begin_inside_need_no_opening_tag() -> None:
    assert read(build("deepseek_r1"), "hm</think>Paris") == ("hm", "Paris", [])
    assert read(build("deepseek_r1"), "<think>hm</think>Paris") == ("hm", "Paris", [])
    closed = "<think>\n\n</think>\n\n"
    assert read(build("deepseek_r1", closed), "Paris") == ("", "Paris", [])


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS))
def test_every_format_parts_its_thoughts(name: str) -> None:
    syntax = REASONING_FORMATS[name]
    text = f"{syntax.begin}\nhm, 2 < 3\n{syntax.end}\n\nParis"
    assert read(build(name), text) == ("hm, 2 < 3", "Paris", [])


_PARTS = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<",
            "think>",
            "</",
            " ",
            "\n\n",
            "text",
            CALL,
            CALL[:20],
            "é",
            "\ud800",
        ]
    ),
    max_size=8,
)


@given(
    _PARTS,
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
    st.sampled_from(["", "<think>\n", "</think>\n\n"]),
    st.booleans(),
)
def test_result_does_not_depend_on_the_pieces(
    parts: list[str], sizes: list[int], prompt_end: str, with_calls: bool
) -> None:
    text = "".join(parts)
    whole = read(build(prompt_end=prompt_end, with_calls=with_calls), text)
    assert read(build(prompt_end=prompt_end, with_calls=with_calls), text, sizes) == whole
    if not with_calls:
        # Only tags and white space are ever left out.
        kept = "".join((whole[0] + whole[1]).split())
        for tag in ("<think>", "</think>"):
            text = text.replace(tag, "", 1) if tag not in kept else text
        assert len(kept) <= len("".join(text.split())) + len("<think></think>")


def test_streaming_gives_out_thoughts_as_they_come() -> None:
    parser = build()
    assert parser.feed("<think>\nfirst").reasoning == "first"
    assert parser.feed(" second").reasoning == " second"
    assert parser.feed(" </thi").reasoning == ""
    rest = parser.feed("nk>\n\nPar")
    assert (rest.reasoning, rest.content) == ("", "Par")
