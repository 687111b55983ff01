"""Which format a model writes: by the name that the user gave, or by its chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from agentrl_cli.errors import UserInputError, format_nearest
from agentrl_cli.log import get_logger
from agentrl_cli.tracking.parsers.formats import ReasoningFormat, ReplyFormats, ToolCallFormat
from agentrl_cli.tracking.parsers.response_template import ResponseTemplateParser
from agentrl_cli.tracking.parsers.table import (
    REASONING_ALIASES,
    REASONING_BY_TOOL_CALLS,
    REASONING_FORMATS,
    TOOL_CALL_ALIASES,
    TOOL_CALL_FORMATS,
)

_log = get_logger(__name__)

#: The format that a tokenizer brings itself, by vLLM's and SGLang's names for it.
RESPONSE_TEMPLATE_NAMES = ("hf", "response_template")
TOOL_CALL_NAMES = ("auto", "none", *RESPONSE_TEMPLATE_NAMES, *TOOL_CALL_FORMATS, *TOOL_CALL_ALIASES)
REASONING_NAMES = (
    "auto", "none", *RESPONSE_TEMPLATE_NAMES, *REASONING_FORMATS, *REASONING_BY_TOOL_CALLS,
    *REASONING_ALIASES,
)  # fmt: skip

#: Texts of a chat template that only one format has; the first rule whose texts are all there.
_TOOL_CALL_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), "openai"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<arg_key>",), "glm45"),
    (("<longcat_tool_call>",), "longcat"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool|>", "<|/tool|>"), "phi4_mini_json"),
    (("functools[",), "phi4_mini_json"),
    (("<|tools_prefix|>",), "apertus"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<function_calls>",), "olmo3"),
    (("<tool_calls>",), "jamba"),
    (("<|action_start|>",), "internlm"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<|eot_id|>", '"parameters"'), "llama3_json"),
    (("<|python_tag|>",), "llama3_json"),
)  # fmt: skip
#: Special tokens that tell a format where the template does not.
_TOKEN_SIGNS: Mapping[str, str] = {
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<｜tool▁call▁begin｜>": "deepseek_v31",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json",
}
_REASONING_SIGNS: tuple[tuple[str, str], ...] = (
    ("<seed:think>", "seed_oss"),
    ("[THINK]", "mistral"),
    ("◁think▷", "kimi"),
    ("Here is my thought process:", "granite"),
    ("</think>", "qwen3"),
)


def check_tool_call_parser(name: str) -> None:
    """Refuses a ``tool_call_parser`` that does not exist.

    Raises:
        UserInputError: with the nearest name.
    """
    _check(name, "engine.tool_call_parser", TOOL_CALL_NAMES)


def check_reasoning_parser(name: str) -> None:
    """Refuses a ``reasoning_parser`` that does not exist.

    Raises:
        UserInputError: with the nearest name.
    """
    _check(name, "engine.reasoning_parser", REASONING_NAMES)


def choose_formats(
    tokenizer: Any, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
) -> ReplyFormats:
    """The formats that are read, for a tokenizer with a chat template.

    Raises:
        UserInputError: a name is unknown, or needs what the tokenizer does not have.
    """
    check_tool_call_parser(tool_call_parser)
    check_reasoning_parser(reasoning_parser)
    template = collect_template_text(tokenizer.chat_template)
    has_template = getattr(tokenizer, "response_template", None) is not None
    tokens = set(getattr(tokenizer, "all_special_tokens", ()))
    if tool_call_parser == "auto":
        tool_call_parser = find_tool_call_parser(template, tokens, has_template)
        if tool_call_parser == "hermes" and "<tool_call>" not in template:
            _log.info(
                "the chat template shows no known format of tool calls: they are read as 'hermes'. "
                "Where the model writes them otherwise, type engine.tool_call_parser=NAME"
            )
    if reasoning_parser == "auto":
        reasoning_parser = find_reasoning_parser(template, tool_call_parser)
    own = [n for n in (tool_call_parser, reasoning_parser) if n in RESPONSE_TEMPLATE_NAMES]
    if own and not has_template:
        raise UserInputError(
            f"parser {own[0]!r} reads by the response template of the tokenizer, and "
            f"{getattr(tokenizer, 'name_or_path', '')!r} has none. Type "
            "engine.tool_call_parser=auto engine.reasoning_parser=auto"
        )
    if own:
        return ReplyFormats(tool_calls=_build_own_format(tokenizer))
    if reasoning_parser in REASONING_BY_TOOL_CALLS:
        _check_reads_thoughts(tool_call_parser, reasoning_parser)
        tool_call_parser, reasoning_parser = REASONING_BY_TOOL_CALLS[reasoning_parser], "none"
    return ReplyFormats(
        tool_calls=find_tool_call_format(tool_call_parser),
        reasoning=find_reasoning_format(reasoning_parser),
    )


def find_tool_call_format(name: str) -> ToolCallFormat | None:
    """The format of a name that is not ``auto``; None: calls are not read."""
    return TOOL_CALL_FORMATS.get(TOOL_CALL_ALIASES.get(name, name))


def find_reasoning_format(name: str) -> ReasoningFormat | None:
    """The format of a name that is not ``auto``; None: thoughts are not parted."""
    return REASONING_FORMATS.get(REASONING_ALIASES.get(name, name))


def find_tool_call_parser(
    template: str, special_tokens: Iterable[str] = (), has_response_template: bool = False
) -> str:
    """The name that ``auto`` stands for; ``hermes`` where nothing tells the format."""
    for signs, name in _TOOL_CALL_SIGNS:
        if all(sign in template for sign in signs):
            return name
    if has_response_template:
        return "hf"
    known = set(special_tokens)
    return next((name for sign, name in _TOKEN_SIGNS.items() if sign in known), "hermes")


def find_reasoning_parser(template: str, tool_call_parser: str) -> str:
    """The name that ``auto`` stands for; ``none`` where the template knows no thoughts."""
    if tool_call_parser in RESPONSE_TEMPLATE_NAMES:
        return tool_call_parser
    chosen = find_tool_call_format(tool_call_parser)
    if chosen is not None and chosen.reads_thoughts:
        return "gpt-oss"
    return next((name for sign, name in _REASONING_SIGNS if sign in template), "none")


def collect_template_text(chat_template: Any) -> str:
    """The text of a chat template; of several under names, all of it."""
    if isinstance(chat_template, str):
        return chat_template
    if isinstance(chat_template, Mapping):
        return "\n".join(str(text) for text in chat_template.values())
    return ""


def _build_own_format(tokenizer: Any) -> ToolCallFormat:
    return ToolCallFormat(
        name="hf",
        build_parser=lambda context: ResponseTemplateParser(
            tokenizer, context.prompt_end, context.tools
        ),
        special_texts=None,
        reads_thoughts=True,
    )


def _check_reads_thoughts(tool_call_parser: str, reasoning_parser: str) -> None:
    chosen = find_tool_call_format(tool_call_parser)
    if chosen is not None and not chosen.reads_thoughts:
        raise UserInputError(
            f"engine.reasoning_parser: {reasoning_parser!r} reads calls as well, so it does not go "
            f"with engine.tool_call_parser: {tool_call_parser!r}. Type "
            "engine.tool_call_parser=openai"
        )


def _check(name: str, key: str, allowed: tuple[str, ...]) -> None:
    if name not in allowed:
        raise UserInputError(
            f"{key}: {name!r} is not known; {format_nearest(name, allowed, max_listed=80)}"
        )
