"""Tokenizers that bring their own response template: transformers reads, and never raises here."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from agentrl_cli.tracking.formats.call_scanner import ParsedText
from agentrl_cli.tracking.formats.format_choice import choose_formats
from agentrl_cli.tracking.formats.reply_formats import ReplyContext

TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}},
    }
]
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
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "f", "arg</tool_call>'


def build_tokenizer(template: dict[str, Any]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"x": 0, "<|im_end|>": 1}, unk_token="x"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.response_template = template
    return tokenizer


def read(
    text: str, sizes: list[int] | None = None, prompt: str = "", tools: Any = TOOLS
) -> tuple[str, str, list[tuple[str, Any]]]:
    chosen = choose_formats(build_tokenizer(RESPONSE_TEMPLATE)).tool_calls
    assert chosen is not None
    assert chosen.special_texts is None
    parser = chosen.build_parser(ReplyContext(tools=tools, prompt_end=prompt))
    parsed, at, number = ParsedText(), 0, 0
    while at < len(text):
        size = sizes[number % len(sizes)] if sizes else len(text)
        parsed.add(parser.feed(text[at : at + size]))
        at, number = at + size, number + 1
    parsed.add(parser.finish())
    calls = [
        (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in parsed.tool_calls
    ]
    return parsed.content, parsed.reasoning, calls


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Paris<|im_end|>", ("Paris", "", [])),
        ("<think>hm</think>Paris<|im_end|>", ("Paris", "hm", [])),
        (f"{CALL}\n{CALL}<|im_end|>", ("", "", [("f", {"x": 1})] * 2)),
        (f"I look.\n{CALL}", ("I look.", "", [("f", {"x": 1})])),
        (f"<think>maybe {CALL}</think>{CALL}", ("", f"maybe {CALL}", [("f", {"x": 1})])),
        # What transformers raises on stays text; what comes after is read.
        (BROKEN, (BROKEN, "", [])),
        (f"{BROKEN} {CALL}", (BROKEN, "", [("f", {"x": 1})])),
        (CALL[:-16], (CALL[:-16], "", [])),
        ('<tool_call>{"name": 3}</tool_call>', ('<tool_call>{"name": 3}</tool_call>', "", [])),
        ("<tool_call>[1]</tool_call>", ("<tool_call>[1]</tool_call>", "", [])),
        (CALL.replace("1", '"1"'), ("", "", [("f", {"x": 1})])),
        ("", ("", "", [])),
    ],
)
def test_reads_by_the_template_of_the_tokenizer(text: str, expected: Any) -> None:
    assert read(text) == expected


def test_thought_that_the_prompt_opens() -> None:
    prompt = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    content, reasoning, _ = read("hm</think>Paris", prompt=prompt)
    assert (content, reasoning.strip()) == ("Paris", "hm")


def test_without_tools_calls_are_text() -> None:
    assert read(CALL, tools=()) == (CALL, "", [])


_PARTS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, BROKEN, "text", "\n", " ", "{",
     "<", "<|im_end|>", "é", "\ud800"]
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(_PARTS, max_size=7), st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_nothing_raises_and_nothing_depends_on_the_pieces(
    parts: list[str], sizes: list[int]
) -> None:
    text = "".join(parts)
    assert read(text, sizes) == read(text)
