"""Every format reads what its models write, and raises on nothing that they might write."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_cli.tracking.formats.call_scanner import REASONING_MARKS, ParsedText
from agentrl_cli.tracking.formats.format_table import TOOL_CALL_ALIASES, TOOL_CALL_FORMATS
from agentrl_cli.tracking.formats.reply_formats import ReplyContext, ReplyFormats
from agentrl_cli.tracking.formats.xml_calls import ArgumentTypes
from agentrl_cli.tracking.protocols.model_request import ReplyRules
from agentrl_cli.tracking.structured_output import build_structural_tag

Write = Callable[[Sequence[tuple[str, dict[str, Any]]]], str]
NAMES = sorted(TOOL_CALL_FORMATS)
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Zürich", "days": 3}),
    ("note", {"text": "a\nb 'c' <d>", "tags": ["x", 1], "urgent": True, "more": {"k": [None]}}),
    ("now", {}),
]
#: Text stands in a message of its own, or nowhere beside calls.
CALLS_ALONE = ("openai", "pythonic", "llama3_json")


def read(
    name: str, text: str, tools: Sequence[Any], sizes: Sequence[int] = (), prompt_end: str = ""
) -> ParsedText:
    """What the format's parser makes of ``text``, whole or in pieces of ``sizes``."""
    context = ReplyContext(tools=tools, prompt_end=prompt_end)
    parser = TOOL_CALL_FORMATS[name].build_parser(context)
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


def test_every_format_has_a_writer_here(writers: dict[str, Write]) -> None:
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
                json.loads(call["function"]["arguments"], parse_constant=pytest.fail)

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


@pytest.mark.parametrize("sizes", [(), (1,), (7, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_malformed_calls_are_told_from_good_ones_and_from_text(
    name: str, sizes: Sequence[int], writers: dict[str, Write], tools: list[Any]
) -> None:
    good = writers[name](CALLS[:1])
    bad = good[: good.index("Zürich")]
    bad += '"}}' if name == "openai" else ""
    assert read(name, bad, tools, sizes).has_malformed_call
    if name not in CALLS_ALONE:
        assert read(name, f"{bad} {good}", tools, sizes).has_malformed_call
    answers = ["It is 3.", '{"answer": [1, {"x": 2}]}', "[1, 2]", "import functools", '{"name": "B']
    for text in (good, writers[name](CALLS), *answers):
        assert not read(name, text, tools, sizes).has_malformed_call, text


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


@pytest.mark.parametrize("name", [n for n in NAMES if n != "openai"])
def test_call_inside_of_reasoning_that_nobody_parted_is_text(
    name: str, writers: dict[str, Write], tools: list[Any]
) -> None:
    inside, after = writers[name](CALLS[:1]), writers[name](CALLS[2:])
    for begin, end in REASONING_MARKS.items():
        # An open mark in an argument opens nothing.
        opens = writers[name]([("note", {"text": begin})])
        thought = f"{begin}hm {inside}{end}"
        first = [] if name == "pythonic" else CALLS[2:]
        for sizes in ((), (1,), (5, 2)):
            parsed = read(name, f"{thought}{after}", tools, sizes)
            assert (parsed.content[: len(thought)], list_calls(parsed)) == (thought, first)
            parsed = read(name, f"{begin}{inside}", tools, sizes)
            assert (parsed.content, parsed.tool_calls) == (f"{begin}{inside}", [])
            parsed = read(name, inside, tools, sizes, f"assistant\n{begin}\n")
            assert (parsed.content, parsed.tool_calls) == (inside, [])
            assert list_calls(read(name, opens, tools, sizes)) == [("note", {"text": begin})]


#: The end of an argument, and how another one is written.
ARGUMENT_ENDS = {
    "qwen3_coder": ("</parameter>", "<parameter=k>v</parameter>"),
    "mimo": ("</parameter>", "<parameter=k>v</parameter>"),
    "seed_oss": ("</parameter>", "<parameter=k>v</parameter>"),
    "minimax_m2": ("</parameter>", '<parameter name="k">v</parameter>'),
    "deepseek_v32": (
        "</｜DSML｜parameter>", '<｜DSML｜parameter name="k" string="true">v</｜DSML｜parameter>',
    ),
    "glm45": ("</arg_value>", "<arg_key>k</arg_key><arg_value>v</arg_value>"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENT_ENDS)
@pytest.mark.parametrize("sizes", [(), (1,), (14, 100)])
def test_argument_without_an_end_does_not_take_the_next_one(
    name: str, sizes: Sequence[int], writers: dict[str, Write], tools: list[Any]
) -> None:
    end, other = ARGUMENT_ENDS[name]
    good = writers[name](CALLS[:1])
    for bad in (good.replace(end, "", 1), good.replace(end, end[:-1], 1), good.replace(end, "")):
        assert read(name, bad, tools, sizes).tool_calls == []
        after = read(name, f"{bad}\n{good}", tools, sizes)
        assert list_calls(after) == CALLS[:1]
    quoting = [("get_weather", {"city": f"a {other} b", "days": 3})]
    assert list_calls(read(name, writers[name](quoting), tools, sizes)) == quoting


#: Arguments as models write them that escape nothing, and what they mean.
NEARLY_PYTHON = [
    ("f(x='it's')", [("f", {"x": "it's"})]),
    ("f(x='a\nb', y=[1])", [("f", {"x": "a\nb", "y": [1]})]),
    ("f(x='a)]\nwhat's [that]', y={'k': ['don't', \"b\"]})",
     [("f", {"x": "a)]\nwhat's [that]", "y": {"k": ["don't", "b"]}})]),
    ("f(x='sed -n '1,9p' f.py')", [("f", {"x": "sed -n '1,9p' f.py"})]),
    ("f(x=\"say \"hi\", you\")", [("f", {"x": 'say "hi", you'})]),
    ("f(x='C:\\Users\\x', y='\\d')", [("f", {"x": "C:\\Users\\x", "y": "\\d"})]),
    ("f(x='it\\'s\nfine')", [("f", {"x": "it's\nfine"})]),
    ("f(from='me', class=07, x=-007)", [("f", {"from": "me", "class": 7, "x": -7})]),
    ("f(x='it's'), g(y='that's')", [("f", {"x": "it's"}), ("g", {"y": "that's"})]),
    # No reading is certain.
    ("f(x='a'b)", []),
    ("f(x='it's)", []),
    ("f(x='a' b='c')", []),
]  # fmt: skip


@pytest.mark.parametrize("sizes", [(), (1,), (14, 100)])
@pytest.mark.parametrize(("written", "expected"), NEARLY_PYTHON)
@pytest.mark.parametrize("name", ["lfm2", "llama4_pythonic", "pythonic", "olmo3"])
def test_strings_of_python_calls_need_no_escapes(
    name: str, written: str, expected: Any, sizes: Sequence[int], writers: dict[str, Write]
) -> None:
    begin, end = writers[name]([("x", {})]).split("x()")
    if name == "olmo3":
        written = written.replace("), g(", ")\ng(")
    text = f"{begin}{written}{end}"
    parsed = read(name, text, [], sizes)
    assert list_calls(parsed) == expected
    assert parsed.content == ("" if expected else text)
    if begin != "[":
        assert list_calls(read(name, f"{text}\n{text}", [], sizes)) == expected * 2


CALL = '{"name": "f", "parameters": {"x": 1}}'


@pytest.mark.parametrize("sizes", [(), (1,)])
@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("llama4_json", f"<|python_start|><|python_end|>{CALL}", ""),
        ("llama4_json", f"<|python_start|>I look.<|python_end|>{CALL}", "I look."),
        ("llama4_json", f"<|python_start|>{CALL}<|python_end|>", ""),
        ("llama4_json", CALL, ""),
        ("llama4_pythonic", "[f(x=1)]", ""),
    ],
)
def test_calls_of_llama_4(name: str, text: str, content: str, sizes: Sequence[int]) -> None:
    parsed = read(TOOL_CALL_ALIASES.get(name, name), text, [], sizes)
    assert (list_calls(parsed), parsed.content) == ([("f", {"x": 1})], content)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "openai"])
def test_marks_and_brackets_inside_of_arguments_are_text(
    name: str, writers: dict[str, Write], tools: list[Any]
) -> None:
    """But for gpt-oss, whose marks are tokens that no text holds."""
    one = TOOL_CALL_FORMATS[name]
    reader = one.build_parser(ReplyContext())._reader  # type: ignore[attr-defined]
    marks = {*reader.starts, *reader.closers, *(one.special_texts or ())}
    marks |= {"</parameter>", "</function>", "</arg_value>", "<arg_key>", "\\u0041", "<think>"}
    for mark in sorted(marks | {"}", "]", ")]", "[", '"', "'", '"""', "\\"}):
        for text in (mark, f"a{mark}b", mark * 2):
            calls = [("note", {"text": text, "more": {text: [text]}}), ("now", {})]
            written = writers[name](calls)
            for sizes in ((), (3, 7, 1)):
                parsed = read(name, written, tools, sizes)
                assert (list_calls(parsed), parsed.content) == (calls, ""), (text, sizes)


def _long_texts(name: str, write: Write, tools: Sequence[Any]) -> list[str]:
    whole = write([("note", {"text": "TEXT"})])
    begin, _, end = whole.partition("TEXT")
    marks = [mark for mark in TOOL_CALL_FORMATS[name].special_texts or () if mark]
    repeated = ["{", "]", ")]", " ", "</parameter>", "</arg_value>", ";", *marks[:2]]
    texts = [text * (30_000 // len(text)) for text in repeated]
    # From the beginning, in a call that never ends, in one that does, and behind one.
    return [
        variant
        for text in texts
        for variant in (text, begin + text, begin + text + end, whole + text)
    ] + [begin * (30_000 // len(begin))]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_time_grows_with_the_length_and_not_with_its_square(
    name: str, writers: dict[str, Write], tools: list[Any]
) -> None:
    slowest = 0.0
    for text in _long_texts(name, writers[name], tools):
        for sizes in ((), (16,)):
            started = time.process_time()
            read(name, text, tools, sizes)
            slowest = max(slowest, time.process_time() - started)
    # Mostly 0.1 s; attempts at every bracket took from seconds to minutes.
    assert slowest < 1


@pytest.mark.parametrize("sizes", [(), (1,), (14, 100)])
def test_string_in_three_quotes_may_hold_what_ends_a_list(sizes: Sequence[int]) -> None:
    parsed = read("pythonic", '[f(x="""a")] """)]', [], sizes)
    assert list_calls(parsed) == [("f", {"x": 'a")] '})]


@pytest.mark.parametrize("value", ['{**{"a": 1}}', "name", "[name]", "{name: 1}", "g()", "1 + x"])
def test_what_is_no_literal_is_no_argument(value: str) -> None:
    parsed = read("pythonic", f"[f(x={value})]", [])
    assert (parsed.tool_calls, parsed.content) == ([], f"[f(x={value})]")


@pytest.mark.parametrize("name", ["qwen3_coder", "mimo", "seed_oss", "minimax_m2", "glm45"])
def test_bare_word_where_an_object_is_wanted_is_text(
    name: str, writers: dict[str, Write], tools: list[Any]
) -> None:
    parsed = read(name, writers[name]([("note", {"more": "word", "tags": "[word]"})]), tools)
    assert list_calls(parsed) == [("note", {"more": "word", "tags": "[word]"})]


def convert(schema: Any, text: str, **parameters: Any) -> Any:
    parameters = {"type": "object", "properties": {"x": schema}, **parameters}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return ArgumentTypes([tool]).convert("f", "x", text)


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, " kept\n", " kept\n"),
        ({"type": "string", "minLength": 1}, "  kept", "  kept"),
        ({"type": "integer"}, "12", 12),
        ({"type": "number"}, "12", 12),
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, "['a', 1]", ["a", 1]),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": "1"}, "1", "1"),
        ({}, "12", 12),
        ({}, "text", "text"),
        # What xgrammar lets a model write around a string that is not free.
        ({"enum": ["a", " b "]}, "\t a\n", "a"),
        ({"enum": ["a", " b "]}, " b ", " b "),
        ({"const": "a"}, "\na", "a"),
        ({"type": "string", "pattern": "^[a-c]+$"}, " \rab", "ab"),
        ({"type": "string", "format": "date"}, "2026-01-01\n", "2026-01-01"),
        ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, "\tab", "ab"),
    ],
)
def test_text_becomes_what_the_schema_says(schema: Any, text: str, expected: Any) -> None:
    found = convert(schema, text)
    assert (found, type(found)) == (expected, type(expected))


def test_references_are_followed() -> None:
    definitions = {
        "Zip": {"type": "string"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Maybe": {"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]},
    }
    for schema, text, expected in (
        ({"$ref": "#/$defs/Zip"}, "01234", "01234"),
        ({"allOf": [{"$ref": "#/$defs/Zip"}], "default": "1"}, "12", "12"),
        ({"$ref": "#/$defs/Maybe"}, "12", "12"),
        ({"$ref": "#/$defs/Maybe"}, "null", None),
        ({"$ref": "#/$defs/Loop"}, "12", 12),
        ({"$ref": "#/$defs/Nowhere"}, "12", 12),
        ({"$ref": 5}, "text", "text"),
    ):
        assert convert(schema, text, **{"$defs": definitions}) == expected


@pytest.mark.parametrize(
    "schema",
    [
        None, 5, [], "string", {"type": 5}, {"type": [["string"]]}, {"type": {}}, {"anyOf": 5},
        {"anyOf": "string"}, {"oneOf": [5, None]}, {"enum": 5}, {"enum": [[1], {}]},
        {"type": "string", "enum": [["1"]], "maxLength": "2"}, {"$ref": []},
    ],
)  # fmt: skip
def test_schema_that_is_none_raises_nothing(schema: Any) -> None:
    for text in ("1", "text", " ", '{"a": 1}'):
        convert(schema, text)


def test_choices_within_choices_end() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(900):
        schema = {"anyOf": [schema, {"type": "null"}]}
    assert convert(schema, "12") == 12


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    "name", sorted(name for name, one in TOOL_CALL_FORMATS.items() if one.grammar is not None)
)
def test_what_models_write_is_what_sampling_is_constrained_to(
    name: str,
    number: int,
    tools: list[Any],
    writers: dict[str, Write],
) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string

    tag = build_structural_tag(
        ReplyRules(tool_choice="required"),
        tools[:1],
        ReplyFormats(tool_calls=TOOL_CALL_FORMATS[name]),
    )
    grammar = xgrammar.Grammar.from_structural_tag(tag)
    # DeepSeek V3.2 leaves an empty line before its calls, also where no text precedes them.
    text = ("\n\n" if name == "deepseek_v32" else "") + writers[name]([CALLS[0], CALLS[0]][:number])
    assert _is_grammar_accept_string(grammar, text), text
    assert not _is_grammar_accept_string(grammar, text.replace("get_weather", "other"))
    assert not _is_grammar_accept_string(grammar, text[:-1])
