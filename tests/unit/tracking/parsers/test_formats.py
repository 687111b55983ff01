"""Every format reads what its models write, and raises on nothing that they might write."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_cli.tracking.parsers.formats import ReplyContext
from agentrl_cli.tracking.parsers.table import TOOL_CALL_FORMATS
from agentrl_cli.tracking.tool_calls import ParsedText

Write = Callable[[Sequence[tuple[str, dict[str, Any]]]], str]
NAMES = sorted(TOOL_CALL_FORMATS)
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Zürich", "days": 3}),
    ("note", {"text": "a\nb 'c' <d>", "tags": ["x", 1], "urgent": True, "more": {"k": [None]}}),
    ("now", {}),
]
#: Text stands in a message of its own, or nowhere beside calls.
CALLS_ALONE = ("openai", "pythonic", "llama3_json")


def read(name: str, text: str, tools: Sequence[Any], sizes: Sequence[int] = ()) -> ParsedText:
    """What the format's parser makes of ``text``, whole or in pieces of ``sizes``."""
    parser = TOOL_CALL_FORMATS[name].build_parser(ReplyContext(tools=tools))
    parsed = ParsedText()
    at = number = 0
    while at < len(text):
        size = sizes[number % len(sizes)] if sizes else len(text)
        parsed.add(parser.feed(text[at : at + size]))
        at, number = at + size, number + 1
    parsed.add(parser.finish())
    return parsed


def list_calls(parsed: ParsedText) -> list[tuple[str, Any]]:
    for call in parsed.tool_calls:
        assert set(call) == {"id", "type", "function"}
        assert call["type"] == "function"
    functions = [call["function"] for call in parsed.tool_calls]
    return [(f["name"], json.loads(f["arguments"])) for f in functions]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_has_a_writer_here(name: str, writers: dict[str, Write]) -> None:
    assert set(writers) == set(NAMES)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_calls_are_read_as_they_are_written(
    name: str, number: int, writers: dict[str, Write], tools: list[Any]
) -> None:
    for calls in (CALLS[:number], CALLS[-number:], [CALLS[0]] * number):
        parsed = read(name, writers[name](calls), tools)
        assert (parsed.content, parsed.reasoning) == ("", "")
        assert list_calls(parsed) == calls
        assert len({call["id"] for call in parsed.tool_calls}) == len(calls)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in CALLS_ALONE])
def test_text_around_calls_is_kept(name: str, writers: dict[str, Write], tools: list[Any]) -> None:
    parsed = read(name, f"I look.\n{writers[name](CALLS)}\nDone.", tools)
    assert parsed.content.split() == ["I", "look.", "Done."]
    assert list_calls(parsed) == CALLS


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("openai",)])
def test_text_without_calls_is_content(name: str, tools: list[Any]) -> None:
    for text in ("Plain [1] {x} <b>text</b> f(x)", " \n", "", "functions", "[", "{", "a < b | c"):
        parsed = read(name, text, tools)
        assert (parsed.content, parsed.tool_calls, parsed.reasoning) == (text, [], "")


@pytest.mark.parametrize("name", NAMES)
def test_what_the_syntax_writes_is_read(name: str, tools: list[Any]) -> None:
    syntax = TOOL_CALL_FORMATS[name].syntax
    if syntax is None or syntax.arguments_style != "json":
        return
    number = ":0" if syntax.after_name_pattern else ""
    written = [
        f"{syntax.begin(called)}{number}{syntax.before_arguments if number else ''}"
        f"{json.dumps(arguments)}{syntax.end}"
        for called, arguments in CALLS
    ]
    text = f"{syntax.section_begin}{syntax.separator.join(written)}{syntax.section_end}"
    parsed = read(name, text, tools)
    assert list_calls(parsed) == CALLS
    assert parsed.content == ""


def _cut_up(written: str) -> list[str]:
    """Parts of a call: whole, cut off, and its marks alone."""
    marks = [
        written[: len(written) // 3],
        written[len(written) // 3 :],
        written[: len(written) // 2],
    ]
    return [written, *marks, written[:-1], written[:-9], written[1:], written[5:]]


_NOISE = st.sampled_from(
    ["{", "}", "[", "]", '"', "\\", "\n", " ", "text", "<", "|>", ">", "é", "😀", "\\ud800", "(",
     ")", "'", "=", ",", ";", "NaN", "1e999", "null", '{"name": "f"', '"arguments": ', "</", "f(",
     "<think>", "</think>", "\ud800", "\x00", "```"]
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_nothing_raises_and_nothing_depends_on_the_pieces(
    name: str, writers: dict[str, Write], tools: list[Any]
) -> None:
    written = [
        part for calls in (CALLS, CALLS[:1], CALLS[2:]) for part in _cut_up(writers[name](calls))
    ]
    marks = [m for m in TOOL_CALL_FORMATS[name].special_texts or () if m]
    parts = st.lists(st.sampled_from([*written, *marks, *marks]) | _NOISE, max_size=7)

    @settings(max_examples=60, deadline=None)
    @given(parts, st.lists(st.integers(1, 12), min_size=1, max_size=12))
    def check(pieces: list[str], sizes: list[int]) -> None:
        text = "".join(pieces)
        whole = read(name, text, tools)
        cut = read(name, text, tools, sizes)
        assert (cut.content, cut.reasoning) == (whole.content, whole.reasoning)
        assert list_calls(cut) == list_calls(whole)
        for parsed in (whole, cut):
            for called, arguments in list_calls(parsed):
                assert called
                assert isinstance(arguments, dict)
            json.dumps(parsed.tool_calls, ensure_ascii=False).encode()
            for call in parsed.tool_calls:
                assert "NaN" not in call["function"]["arguments"].replace('"NaN"', "")

    check()


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("pythonic", "llama4_pythonic")])
def test_malformed_call_stays_text_and_the_valid_one_after_it_is_kept(
    name: str, writers: dict[str, Write], tools: list[Any]
) -> None:
    good = writers[name](CALLS[:1])
    # The same call, its arguments broken: a cut in the midst and another beginning.
    for cut in (len(good) // 2, len(good) - 12, len(good) * 2 // 3):
        bad = good[:cut]
        parsed = read(name, f"{bad} {good}", tools)
        assert list_calls(parsed)[-1:] == CALLS[:1], (bad, parsed)


@pytest.mark.parametrize("name", NAMES)
def test_call_that_is_cut_off_loses_no_text(
    name: str, writers: dict[str, Write], tools: list[Any]
) -> None:
    marks = TOOL_CALL_FORMATS[name].special_texts or ()
    good = writers[name](CALLS[:1])
    for end in range(len(good)):
        parsed = read(name, good[:end], tools)
        if not parsed.tool_calls:
            assert "".join(parsed.content.split()) == "".join(good[:end].split()) or (
                name == "openai" and parsed.content in good
            ), (good[:end], marks)
        else:
            assert list_calls(parsed) == CALLS[:1]
