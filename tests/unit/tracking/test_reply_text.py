"""Tokens to a reply: nothing depends on how they come, whatever the tokenizer and the tokens."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.tracking.formats.call_scanner import ParsedText
from agentrl_cli.tracking.formats.format_choice import choose_formats
from agentrl_cli.tracking.model_calls import ReplyReader
from agentrl_cli.tracking.protocols.model_request import ModelRequest
from agentrl_cli.tracking.template import ChatTemplate, make_template_inputs

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEXTS = [
    "What is the weather in Zürich? 😀",
    '{"name": "f", "arguments": {"x": 1}}',
    "\n\n",
    "}} {",
]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"]
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "[TOOL_CALLS]", "[ARGS]"]


def build_byte_level() -> Any:
    """As Qwen's and Llama's: every byte is a token of its own if need be."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS * 2, trainer)
    return finish(backend)


def build_byte_fallback() -> Any:
    """As Mistral's and Llama 2's: words begin with a mark, unknown characters are bytes."""
    pieces = sorted({c for text in TEXTS for c in text.replace(" ", "▁") if ord(c) < 128} | {"▁"})
    vocabulary = {token: number for number, token in enumerate(["<unk>", *pieces])}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    merges = [("▁", "t"), ("n", "a")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return finish(backend)


def finish(backend: Tokenizer) -> Any:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *SPECIALS[3:]]})
    tokenizer.add_tokens([mark for mark in MARKS if mark not in SPECIALS])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


TOKENIZERS = {"byte level": build_byte_level(), "byte fallback": build_byte_fallback()}
PARSERS = [("none", "none"), ("hermes", "qwen3"), ("mistral", "none"), ("openai", "auto")]


def build_template(kind: str, parsers: tuple[str, str]) -> ChatTemplate:
    tokenizer = TOKENIZERS[kind]
    return ChatTemplate(tokenizer, choose_formats(tokenizer, *parsers))


def describe(parsed: ParsedText) -> Any:
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in parsed.tool_calls]
    return parsed.content, parsed.reasoning, calls


def read_whole(template: ChatTemplate, ids: list[int], stop: Any = (), prompt: str = "") -> Any:
    return describe(open_reader(template, stop, prompt).read(ids))


def read_in_pieces(
    template: ChatTemplate, ids: list[int], sizes: list[int], stop: Any = (), prompt: str = ""
) -> Any:
    reader, parsed, at, number = open_reader(template, stop, prompt), ParsedText(), 0, 0
    while at < len(ids):
        size = sizes[number % len(sizes)]
        parsed.add(reader.feed(ids[at : at + size]))
        at, number = at + size, number + 1
    parsed.add(reader.finish())
    return describe(parsed)


def open_reader(template: ChatTemplate, stop: Any, prompt: str) -> ReplyReader:
    request = ModelRequest(
        messages=(),
        inputs=make_template_inputs([TOOL], {}),
        sampling=Sampling(stop=tuple(stop)),
        parse_tools=True,
    )
    return ReplyReader(template, request, template.encode(prompt))


def encode(kind: str, text: str) -> list[int]:
    return TOKENIZERS[kind].encode(text, add_special_tokens=False)


@pytest.mark.parametrize("parsers", PARSERS, ids=lambda p: p[0])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_give_what_the_whole_gives(kind: str, parsers: tuple[str, str]) -> None:
    template = build_template(kind, parsers)
    size = len(TOKENIZERS[kind])
    texts = [*MARKS, *SPECIALS, *TEXTS, "é", "😀", "stop", "<|channel|>final<|message|>"]
    parts = st.lists(
        st.sampled_from([encode(kind, text) for text in texts])
        | st.lists(st.integers(0, size - 1), max_size=4),
        max_size=8,
    )
    sizes = st.lists(st.integers(1, 5), min_size=1, max_size=8)
    stops = st.sampled_from([(), ("stop",), ("}}", "😀"), ("</tool_call>", "\n")])
    prompts = st.sampled_from(["", "<|im_start|>assistant\n<think>\n"])

    @settings(max_examples=80, deadline=None)
    @given(parts, sizes, stops, prompts)
    def check(pieces: list[list[int]], sizes: list[int], stop: Any, prompt: str) -> None:
        ids = [token_id for piece in pieces for token_id in piece]
        assert read_in_pieces(template, ids, sizes, stop, prompt) == read_whole(
            template, ids, stop, prompt
        )

    check()


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_thought_text_and_call_of_one_reply(kind: str) -> None:
    template = build_template(kind, ("hermes", "qwen3"))
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    ids = encode(kind, f"<think>\nhm 😀\n</think>\n\nI look.\n{call}<|im_end|>")
    expected = ("I look.\n", "hm 😀", [("f", '{"x": 1}')])
    assert read_whole(template, ids) == expected
    assert read_in_pieces(template, ids, [1]) == expected


def test_special_tokens_are_shown_to_the_format_that_means_something_by_them() -> None:
    ids = encode("byte level", 'text[TOOL_CALLS]f[ARGS]{"x": 1}<|im_end|>')
    calls = read_whole(build_template("byte level", ("mistral", "none")), ids)
    assert calls == ("text", "", [("f", '{"x": 1}')])
    # To any other they are nothing.
    hidden = read_whole(build_template("byte level", ("hermes", "none")), ids)
    assert hidden == ('textf{"x": 1}', "", [])


def test_thought_opened_by_the_prompt() -> None:
    template = build_template("byte level", ("hermes", "auto"))
    assert template.formats.reasoning is None  # the template shows none
    template = build_template("byte level", ("hermes", "qwen3"))
    ids = encode("byte level", "hm\n</think>\n\nParis<|im_end|>")
    opened = "<|im_start|>assistant\n<think>\n"
    assert read_whole(template, ids, (), opened) == ("Paris", "hm", [])
    assert read_whole(template, ids, (), "<|im_start|>assistant\n")[0] == "hm\n</think>\n\nParis"


@pytest.mark.parametrize(("prompt", "begin"), [("", "<think>"), ("<think>\n", ""), ("", "[THINK]")])
def test_call_in_reasoning_that_nobody_reads_is_text(prompt: str, begin: str) -> None:
    tokenizer = copy.deepcopy(TOKENIZERS["byte level"])
    # As Mistral's: a mark that no format means anything by would be left out of the text.
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    template = ChatTemplate(tokenizer, choose_formats(tokenizer, "hermes", "none"))
    end = begin.replace("[", "[/") if begin.startswith("[") else "</think>"
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    thought = f"{begin}hm {call}{end}"
    ids = tokenizer.encode(f"{thought}{call}<|im_end|>", add_special_tokens=False)
    expected = (thought, "", [("f", '{"x": 1}')])
    assert read_whole(template, ids, (), prompt) == expected
    assert read_in_pieces(template, ids, [1], (), prompt) == expected


def test_stop_text_ends_the_reply_before_anything_is_parsed() -> None:
    template = build_template("byte level", ("hermes", "qwen3"))
    ids = encode("byte level", "<think>hm stop</think>Paris")
    assert read_whole(template, ids, ("stop",)) == ("", "hm", [])


def test_character_that_was_cut_in_two_shows_as_one_that_is_unknown() -> None:
    template = build_template("byte level", ("none", "none"))
    ids = encode("byte level", "a😀")
    assert read_in_pieces(template, ids[:-1], [1]) == read_whole(template, ids[:-1])
    assert read_whole(template, ids[:-1])[0] == "a�"
    assert json.dumps(read_whole(template, ids)[0], ensure_ascii=False) == '"a😀"'
