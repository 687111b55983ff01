from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_cli.errors import UserInputError
from agentrl_cli.tracking.tool_calls import HermesParser, check_parser_name, parse_tool_calls


def call(name: str = "f", arguments: object = None) -> str:
    data = json.dumps({"name": name, "arguments": {"x": 1} if arguments is None else arguments})
    return f"<tool_call>\n{data}\n</tool_call>"


def read(text: str) -> tuple[str, list[tuple[str, str]]]:
    parsed = parse_tool_calls(text)
    return parsed.content, [
        (c["function"]["name"], c["function"]["arguments"]) for c in parsed.tool_calls
    ]


def test_call_alone_has_no_content() -> None:
    assert read(call()) == ("", [("f", '{"x": 1}')])


def test_text_around_calls_is_kept_without_tags() -> None:
    content, calls = read(f"First. {call('f')} then {call('g')} done")
    assert content == "First.  then  done"
    assert [name for name, _ in calls] == ["f", "g"]


def test_arguments_given_as_json_text_are_parsed_once() -> None:
    assert read(call(arguments='{"x": 2}')) == ("", [("f", '{"x": 2}')])


def test_missing_arguments_are_an_empty_object() -> None:
    assert read('<tool_call>{"name": "now"}</tool_call>') == ("", [("now", "{}")])


@pytest.mark.parametrize(
    "bad",
    [
        "<tool_call>{not json}</tool_call>",
        "<tool_call>[1, 2]</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": ',
        "<tool_call>",
        "<tool_ca",
        "<tool_call>" + "[" * 5000,
    ],
)
def test_malformed_call_stays_text_and_valid_one_beside_it_is_kept(bad: str) -> None:
    assert read(bad) == (bad, [])
    content, calls = read(bad + " " + call("g"))
    assert calls == [("g", '{"x": 1}')]
    assert content.strip() == bad.strip()


def test_closing_tag_inside_an_argument_does_not_end_the_call() -> None:
    text = call(arguments={"html": "</tool_call> <tool_call>"})
    assert read(text) == ("", [("f", '{"html": "</tool_call> <tool_call>"}')])


def test_last_call_may_lack_its_closing_tag() -> None:
    assert read('<tool_call>\n{"name": "f", "arguments": {}}\n') == ("", [("f", "{}")])
    assert read('<tool_call>{"name": "f", "arguments": {}}</tool_') == ("", [("f", "{}")])


def test_only_white_space_without_calls_is_content() -> None:
    assert read(" \n") == (" \n", [])


def test_every_call_gets_an_id_of_its_own() -> None:
    parsed = parse_tool_calls(call() + call())
    assert parsed.tool_calls[0]["id"] != parsed.tool_calls[1]["id"]


_PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", call(), call("g", {}), "{", "}", " ", "\n", "text", "<", "é"]
)


@given(st.lists(_PIECES, max_size=8), st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_result_does_not_depend_on_the_pieces(parts: list[str], sizes: list[int]) -> None:
    text = "".join(parts)
    parser, content, names, at, number = HermesParser(), "", [], 0, 0
    while at < len(text):
        size = sizes[number % len(sizes)]
        piece = parser.feed(text[at : at + size])
        content, at, number = content + piece.content, at + size, number + 1
        names += [c["function"]["name"] for c in piece.tool_calls]
    rest = parser.finish()
    content += rest.content
    names += [c["function"]["name"] for c in rest.tool_calls]
    whole = parse_tool_calls(text)
    assert names == [c["function"]["name"] for c in whole.tool_calls]
    assert content == whole.content


def test_unknown_parser_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserInputError, match="did you mean 'hermes'"):
        check_parser_name("hermess")
