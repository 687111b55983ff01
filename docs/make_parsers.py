"""Writes docs/parsers.md from the tables of formats: ``python docs/make_parsers.py``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentrl_cli.tracking.formats.format_table import (
    REASONING_ALIASES,
    REASONING_BY_TOOL_CALLS,
    REASONING_FORMATS,
    TOOL_CALL_ALIASES,
    TOOL_CALL_FORMATS,
)

PAGE = Path(__file__).with_name("parsers.md")

#: Who writes a format, and what a call looks like.
CALLS: Mapping[str, tuple[str, str]] = {
    "hermes": (
        "Qwen2.5, Qwen3, QwQ, Hermes, Granite 4",
        '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
    ),
    "qwen3_coder": (
        "Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5",
        "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>",
    ),
    "mimo": (
        "MiMo: values as they are, line breaks around them included",
        "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>",
    ),
    "seed_oss": (
        "Seed-OSS",
        "<seed:tool_call><function=f><parameter=x>1</parameter></function></seed:tool_call>",
    ),
    "minimax_m2": (
        "MiniMax M2",
        '<minimax:tool_call><invoke name="f"><parameter name="x">1</parameter></invoke>'
        "</minimax:tool_call>",
    ),
    "deepseek_v32": (
        "DeepSeek V3.2",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="false">1'
        "</｜DSML｜parameter></｜DSML｜invoke>",
    ),
    "deepseek_v3": (
        "DeepSeek V3, R1",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f ```json {...}```<｜tool▁call▁end｜>",
    ),
    "deepseek_v31": (
        "DeepSeek V3.1",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>",
    ),
    "kimi_k2": (
        "Kimi K2",
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>",
    ),
    "glm45": (
        "GLM 4.5 to 4.7",
        "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>",
    ),
    "openai": (
        "gpt-oss",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>",
    ),
    "llama3_json": ("Llama 3.1 to 3.3, Llama 4", '{"name": "f", "parameters": {...}}'),
    "mistral": (
        "Mistral, Magistral, Devstral",
        '[TOOL_CALLS]f[ARGS]{...}, or [TOOL_CALLS] [{"name": "f", "arguments": {...}}]',
    ),
    "longcat": ("LongCat", '<longcat_tool_call>{"name": "f", ...}</longcat_tool_call>'),
    "granite": ("Granite 3", '<|tool_call|>[{"name": "f", "arguments": {...}}]'),
    "granite-20b-fc": ("Granite 20B function calling", '<function_call> {"name": "f", ...}'),
    "phi4_mini_json": ("Phi-4-mini", 'functools[{"name": "f", "arguments": {...}}]'),
    "jamba": ("Jamba, Hunyuan A13B", '<tool_calls>[{"name": "f", ...}]</tool_calls>'),
    "internlm": ("InternLM 2, Intern-S1", '<|action_start|><|plugin|>{"name": "f", ...}'),
    "apertus": ("Apertus", '<|tools_prefix|>[{"f": {"x": 1}}]<|tools_suffix|>'),
    "pythonic": ("Llama 3.2, ToolACE, Gemma 3", "[f(x=1), g()]"),
    "llama4_pythonic": ("Llama 4", "<|python_start|>[f(x=1)]<|python_end|>, or [f(x=1)]"),
    "olmo3": ("Olmo 3", "<function_calls>f(x=1)</function_calls>"),
    "lfm2": ("LFM2", "<|tool_call_start|>[f(x=1)]<|tool_call_end|>"),
}
REASONING: Mapping[str, str] = {
    "qwen3": "Qwen3, GLM 4.5, DeepSeek V3.1, Kimi K2, Nemotron, Olmo 3",
    "deepseek_r1": "DeepSeek R1, QwQ, Qwen3 Thinking, MiniMax M2",
    "seed_oss": "Seed-OSS",
    "mistral": "Magistral",
    "kimi": "Kimi-VL",
    "granite": "Granite 3",
}

_HEAD = """# Tool calls and reasoning: which parser reads what

Made by `python docs/make_parsers.py` from the tables in `agentrl_cli/tracking/formats/`.

A model writes tool calls and reasoning as text. `engine.tool_call_parser` and
`engine.reasoning_parser` say how that text is parsed, by the names that vLLM and SGLang use for
the formats. Both are `auto` by default: the format is recognised by the model's chat template, and
`agentrl train --config C --dry-run` shows the choice. Where the template shows no known mark, the
format is the one that can parse the call which the template renders; where there is none, calls are
parsed as `hermes`, and the terminal says so. `none` leaves the text as it is.

Whatever a model writes:

- Nothing raises. A call that is malformed or cut off stays in `content`; valid calls beside it
  are kept.
- Text around calls stays in `content`, without their tags. `arguments` is one JSON object as text.
- Everything inside the reasoning belongs to it, even what looks like a call. Where no reasoning
  parser takes it out, it is part of `content`, and a call between `<think>` and `</think>` (or the
  marks of Seed-OSS, Mistral and Kimi) is text all the same.
- An XML argument whose closing tag is missing, so that the next argument would become part of it,
  makes the whole call text.
- Strings in Python-like calls need not escape apostrophes, line breaks and backslashes. Where two
  readings are possible, the call stays text.
- A reply that was cut off keeps its `finish_reason` `length`, and counts as truncated, also where
  it holds a complete call.
- A streamed reply is the same as one that is not streamed, however its tokens are split.
- Special tokens that mean something in a format (`[TOOL_CALLS]`, `<|channel|>`) are visible only to
  its parser.

## Tool calls

"Constrained" says whether `tool_choice: required` (or a named tool) and strict tools can constrain
sampling to the format.

"""
_MIDDLE = """
`hf` (SGLang: `response_template`) parses by the tokenizer's own response template, with
transformers' `ResponseParser`, and reads the reasoning too. `auto` uses it where the tokenizer has
one and the chat template matches no other format. Sampling cannot be constrained to it.

## Reasoning

Where the prompt ends inside the reasoning (the chat template opens `<think>`), the reply begins
inside it. With `deepseek_r1` it always does, unless the prompt has closed it.

"""
_TAIL = """
`gpt-oss` (vLLM: `openai_gptoss`) is parsed together with the tool calls of `openai`, since both are
one grammar.

Reasoning is returned as `reasoning_content` and recognised however a framework sends it back: as
`reasoning_content` or `reasoning`, between tags inside the content, or not at all.
`engine.keep_reasoning` decides what becomes of its tokens in the next prompt. With `false` they
stay where the chat template shows reasoning; where it strips them, they are missing from the prompt
too, and the prefix mismatch is recorded as `thinking_stripped`. With `true` they always stay.

## Why not the parsers of vLLM, SGLang or transformers

They were measured against the promises above. vLLM's parsers are available only by importing vLLM
(15 to 20 s, and a package that the trainer need not have), or through its server's
`/v1/chat/completions/derender`, which does not stream and does not exist for the embedded engine.
In 22 of these formats they were given a broken call with a valid one after it: vLLM 0.32's parsers
raise in 4 (`granite`, `mistral`, `deepseek_v31`, `internlm`) and lose the valid call in 10 more.
transformers' `ResponseParser` raises on a call that is not JSON, drops the text before a second
region of content, and ends a call at a closing tag inside an argument; it is used for tokenizers
that have a response template, wrapped so that it keeps the promises.

vLLM's parsers are the reference for well-formed calls: where vLLM is installed, a test parses one,
two and three calls, calls after text, and no call, in each format, with its parser and with ours.
`hermes` is compared on calls that are not quite in its form, too: `parameters` instead of
`arguments`, no arguments, a list, a call that was cut off. All of these stay text, and a call whose
JSON is complete where the reply ends, before `</tool_call>`, is a call. It differs in three points:
line breaks inside JSON strings are accepted, `NaN` is not, and arguments given as a JSON string are
parsed. Eight of these texts only ours can parse: several calls with a list among the arguments
(`phi4_mini_json`), several calls (`internlm`), calls after text (`llama4_pythonic`), and a list of
strings with apostrophes (`lfm2`).
"""


def format_page() -> str:
    """The whole page."""
    return _HEAD + _format_calls() + _MIDDLE + _format_reasoning() + _TAIL


def _format_calls() -> str:
    lines = [
        "| name | other names | models | a call | parser | constrained | checked against |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in TOOL_CALL_FORMATS.items():
        models, example = CALLS[name]
        judge = f"vLLM's `{name}`" if name != "openai" else "messages written by hand"
        held = "yes" if one.grammar is not None else "no"
        cells = [
            f"`{name}`", _list_names(TOOL_CALL_ALIASES, name), models, f"`{_escape(example)}`",
            f"`{_find_module(name)}`", held, judge,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _format_reasoning() -> str:
    lines = ["| name | other names | models | reasoning |", "|---|---|---|---|"]
    for name, one in REASONING_FORMATS.items():
        example = f"`{one.begin}` ... `{one.end}`"
        names = _list_names(REASONING_ALIASES, name)
        lines.append(f"| `{name}` | {names} | {REASONING[name]} | {example} |")
    for name in REASONING_BY_TOOL_CALLS:
        lines.append(f"| `{name}` | | gpt-oss | `<|channel|>analysis` |".replace("<|", "<\\|"))
    return "\n".join(lines).replace("l|>", "l\\|>") + "\n"


def _find_module(name: str) -> str:
    """The file of the reader."""
    modules = {
        "xml_calls.py": ("qwen3_coder", "mimo", "seed_oss", "minimax_m2", "deepseek_v32", "glm45"),
        "python_calls.py": ("pythonic", "llama4_pythonic", "olmo3", "lfm2"),
        "harmony.py": ("openai",),
    }
    return next((file for file, names in modules.items() if name in names), "json_calls.py")


def _list_names(aliases: Mapping[str, str], name: str) -> str:
    return ", ".join(f"`{alias}`" for alias, target in aliases.items() if target == name)


def _escape(text: str) -> str:
    """A cell of a table may not hold a bare bar."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(format_page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
