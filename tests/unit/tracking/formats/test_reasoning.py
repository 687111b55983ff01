"""Reasoning is parted from answers: between tags, on channels, by a tokenizer's own template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from agentrl_cli.tracking.formats.call_scanner import ParsedText
from agentrl_cli.tracking.formats.format_choice import choose_formats
from agentrl_cli.tracking.formats.format_table import REASONING_FORMATS, TOOL_CALL_FORMATS
from agentrl_cli.tracking.formats.harmony import HarmonyParser
from agentrl_cli.tracking.formats.reply_formats import ReasoningParser, ReplyContext, TextParser

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
CALLED = ("f", {"x": 1})
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}},
    }
]


def read(parser: TextParser, text: str, sizes: Sequence[int] = ()) -> tuple[str, str, Any]:
    """Reasoning, content and calls of a text, whole or in pieces of ``sizes``."""
    parsed = ParsedText()
    at = number = 0
    while at < len(text):
        size = sizes[number % len(sizes)] if sizes else len(text)
        parsed.add(parser.feed(text[at : at + size]))
        at, number = at + size, number + 1
    parsed.add(parser.finish())
    functions = [call["function"] for call in parsed.tool_calls]
    calls = [(one["name"], json.loads(one["arguments"])) for one in functions]
    return parsed.reasoning, parsed.content, calls


def build(name: str = "qwen3", prompt_end: str = "", with_calls: bool = True) -> TextParser:
    reasoning = REASONING_FORMATS[name]
    answer = TOOL_CALL_FORMATS["hermes"].build_parser(ReplyContext()) if with_calls else None
    is_inside = reasoning.is_inside(prompt_end)
    return ReasoningParser(reasoning, is_inside=is_inside, answer=answer)


@pytest.mark.parametrize(
    ("prompt_end", "text", "expected"),
    [
        ("", "<think>\nhm\n</think>\n\nParis", ("hm", "Paris", [])),
        ("", "\n<think>\na\n\nb \n</think>\n\n" + CALL, ("a\n\nb", "", [CALLED])),
        ("<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nParis", ("hm", "Paris", [])),
        # Some models write the tag again that the prompt has.
        ("<|im_start|>assistant\n<think>\n", "<think>hm</think>Paris", ("hm", "Paris", [])),
        ("assistant\n<think>\n\n</think>\n\n", "Paris", ("", "Paris", [])),
        ("<think>", "never ends", ("never ends", "", [])),
        ("<think>", "cut </thin", ("cut </thin", "", [])),
        ("", "<think>\n\n</think>\n\nParis", ("", "Paris", [])),
        ("", "no thought </think> at all", ("", "no thought </think> at all", [])),
        ("", "later <think>x</think>", ("", "later <think>x</think>", [])),
        ("", f"later <think>{CALL}</think>", ("", f"later <think>{CALL}</think>", [])),
        ("", f"<think>maybe {CALL}</think>{CALL}", (f"maybe {CALL}", "", [CALLED])),
        ("", f"<think>{CALL}", (CALL, "", [])),
        ("", "<think>hm</think>\n I call.\n" + CALL, ("hm", "I call.\n", [CALLED])),
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


def test_streaming_gives_out_thoughts_as_they_come() -> None:
    parser = build()
    assert parser.feed("<think>\nfirst").reasoning == "first"
    assert parser.feed(" second").reasoning == " second"
    assert parser.feed(" </thi").reasoning == ""
    rest = parser.feed("nk>\n\nPar")
    assert (rest.reasoning, rest.content) == ("", "Par")


TO_F = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>'
THOUGHT = "<|channel|>analysis<|message|>hm<|end|>"
NEXT = "<|start|>assistant"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (THOUGHT + NEXT + TO_F, ("hm", "", [CALLED])),
        (
            f"{THOUGHT}{NEXT}<|channel|>final<|message|>Paris<|return|>",
            ("hm", "Paris", []),
        ),
        # The recipient may stand before the channel.
        (
            ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>',
            ("", "", [CALLED]),
        ),
        # A preamble to the user, then two calls.
        (
            f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{TO_F}{NEXT}{TO_F}",
            ("", "I look.", [CALLED, CALLED]),
        ),
        (f"{THOUGHT}{NEXT}{THOUGHT}", ("hm\nhm", "", [])),
        ("<|channel|>final<|message|>cut off", ("", "cut off", [])),
        ("<|channel|>analysis<|message|>cut off", ("cut off", "", [])),
        (TO_F.replace("<|call|>", ""), ("", "", [CALLED])),
        (TO_F[:-10], ("", '{"x": ', [])),
        (TO_F.replace('{"x": 1}', "{bad}") + NEXT + TO_F, ("", "{bad}", [CALLED])),
        (TO_F.replace('{"x": 1}', ""), ("", "", [("f", {})])),
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
def test_messages_of_gpt_oss(text: str, expected: Any) -> None:
    assert read(HarmonyParser(TOOLS), text) == expected


def test_without_tools_a_channels_call_is_text() -> None:
    assert read(HarmonyParser(()), TO_F) == ("", '{"x": 1}', [])


def test_content_is_given_out_as_it_comes() -> None:
    parser = HarmonyParser(TOOLS)
    assert parser.feed("<|channel|>final<|message|>Par").content == "Par"
    assert parser.feed("is").content == "is"


#: As a model's tokenizer_config.json describes it, in transformers' own words.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}
BROKEN = '<tool_call>\n{"name": "f", "arg</tool_call>'


def build_tokenizer(template: dict[str, Any]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"x": 0, "<|im_end|>": 1}, unk_token="x"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.response_template = template
    return tokenizer


def build_own(prompt_end: str = "", tools: Any = TOOLS) -> TextParser:
    chosen = choose_formats(build_tokenizer(RESPONSE_TEMPLATE)).tool_calls
    assert chosen is not None
    assert chosen.special_texts is None
    return chosen.build_parser(ReplyContext(tools=tools, prompt_end=prompt_end))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Paris<|im_end|>", ("", "Paris", [])),
        ("<think>hm</think>Paris<|im_end|>", ("hm", "Paris", [])),
        (f"{CALL}\n{CALL}<|im_end|>", ("", "", [CALLED] * 2)),
        (f"I look.\n{CALL}", ("", "I look.", [CALLED])),
        (f"<think>maybe {CALL}</think>{CALL}", (f"maybe {CALL}", "", [CALLED])),
        # What transformers raises on stays text; what comes after is read.
        (BROKEN, ("", BROKEN, [])),
        (f"{BROKEN} {CALL}", ("", BROKEN, [CALLED])),
        (CALL[:-16], ("", CALL[:-16], [])),
        ('<tool_call>{"name": 3}</tool_call>', ("", '<tool_call>{"name": 3}</tool_call>', [])),
        ("<tool_call>[1]</tool_call>", ("", "<tool_call>[1]</tool_call>", [])),
        (CALL.replace("1", '"1"'), ("", "", [CALLED])),
        ("", ("", "", [])),
    ],
)
def test_reads_by_the_template_of_the_tokenizer(text: str, expected: Any) -> None:
    assert read(build_own(), text) == expected


def test_a_template_without_reasoning_executes_no_call_inside_of_it() -> None:
    fields = {k: v for k, v in RESPONSE_TEMPLATE["fields"].items() if k != "thinking"}
    chosen = choose_formats(build_tokenizer({**RESPONSE_TEMPLATE, "fields": fields})).tool_calls
    assert chosen is not None
    for prompt_end, thought in (
        ("", f"<think>hm {CALL}</think>"),
        ("<think>\n", f"{CALL}</think>"),
    ):
        parser = chosen.build_parser(ReplyContext(tools=TOOLS, prompt_end=prompt_end))
        assert read(parser, thought + CALL)[1:] == (thought, [CALLED])


def test_thought_that_the_prompt_opens_for_a_template() -> None:
    prompt = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    reasoning, content, _ = read(build_own(prompt), "hm</think>Paris")
    assert (content, reasoning.strip()) == ("Paris", "hm")


def test_without_tools_a_templates_calls_are_text() -> None:
    assert read(build_own(tools=()), CALL) == ("", CALL, [])


_PARTS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "think>", "</", CALL, CALL[:20],
     BROKEN, "text", "\n\n", " ", "{", "<|im_end|>", "é", "\ud800"]
)  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        build,
        build_own,
        lambda: build(prompt_end="<think>\n"),
        lambda: build(prompt_end="</think>\n\n"),
        lambda: build(with_calls=False),
    ],
)
def test_nothing_raises_and_nothing_depends_on_the_pieces(make: Callable[[], TextParser]) -> None:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(_PARTS, max_size=8), st.lists(st.integers(1, 9), min_size=1, max_size=20))
    def check(parts: list[str], sizes: list[int]) -> None:
        text = "".join(parts)
        assert read(make(), text, sizes) == read(make(), text)

    check()


@given(st.lists(_PARTS, max_size=8))
def test_only_tags_and_white_space_are_left_out(parts: list[str]) -> None:
    text = "".join(parts)
    reasoning, content, _ = read(build(with_calls=False), text)
    kept = "".join((reasoning + content).split())
    for tag in ("<think>", "</think>"):
        text = text.replace(tag, "", 1) if tag not in kept else text
    assert len(kept) <= len("".join(text.split())) + len("<think></think>")
