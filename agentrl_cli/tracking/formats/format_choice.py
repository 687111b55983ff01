"""Which format a model writes: by the name that the user gave, or by its chat template."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.errors import UserInputError, format_nearest
from agentrl_cli.log import get_logger
from agentrl_cli.tracking.formats.call_scanner import (
    ParsedText,
    build_call,
    find_open_reasoning,
    has_open_reasoning,
)
from agentrl_cli.tracking.formats.format_table import (
    REASONING_ALIASES,
    REASONING_BY_TOOL_CALLS,
    REASONING_FORMATS,
    TOOL_CALL_ALIASES,
    TOOL_CALL_FORMATS,
)
from agentrl_cli.tracking.formats.reply_formats import (
    ReasoningFormat,
    ReplyContext,
    ReplyFormats,
    ToolCallFormat,
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
    (("<|tool_list_start|>",), "lfm2"),
    # What is said of pythonic calls: [func_name1(params_name1=params_value1...), ...].
    (("func_name1(", "<|eot|>"), "llama4_pythonic"),
    (("func_name1(",), "pythonic"),
    (("<|header_start|>", '"parameters"'), "llama3_json"),
    (("<|python_start|>", '"parameters"'), "llama3_json"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<function_calls>",), "olmo3"),
    (("<tool_calls>",), "jamba"),
    (("<|action_start|>",), "internlm"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<function_call>",), "granite-20b-fc"),
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
#: What ``auto`` takes where nothing tells the format: that of most models.
FALLBACK = "hermes"
_PROBE_PARAMETERS = {
    "type": "object",
    "properties": {"number": {"type": "integer", "description": ""}},
    "required": ["number"],
}
_REASONING_SIGNS: tuple[tuple[str, str], ...] = (
    ("<seed:think>", "seed_oss"),
    ("[THINK]", "mistral"),
    ("◁think▷", "kimi"),
    ("Here is my thought process:", "granite"),
    ("</think>", "qwen3"),
)


def find_unknown_parsers(tool_call_parser: str, reasoning_parser: str) -> list[str]:
    """What is wrong with the names of parsers, each with the nearest name; empty: nothing."""
    given = (
        ("engine.tool_call_parser", tool_call_parser, TOOL_CALL_NAMES),
        ("engine.reasoning_parser", reasoning_parser, REASONING_NAMES),
    )
    return [
        f"{key}: {name!r} is not known; {format_nearest(name, allowed, max_listed=80)}"
        for key, name, allowed in given
        if name not in allowed
    ]


def choose_formats(
    tokenizer: Any, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
) -> ReplyFormats:
    """The formats that are read, for a tokenizer with a chat template.

    Raises:
        UserInputError: a name is unknown, or needs what the tokenizer does not have.
    """
    problems = find_unknown_parsers(tool_call_parser, reasoning_parser)
    if problems:
        raise UserInputError("\n".join(problems))
    has_template = getattr(tokenizer, "response_template", None) is not None
    if tool_call_parser == "auto":
        tool_call_parser = recognize_tool_calls(tokenizer) or FALLBACK
    if reasoning_parser == "auto":
        reasoning_parser = find_reasoning_parser(tokenizer.chat_template, tool_call_parser)
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
        _check_reads_reasoning(tool_call_parser, reasoning_parser)
        tool_call_parser, reasoning_parser = REASONING_BY_TOOL_CALLS[reasoning_parser], "none"
    return ReplyFormats(
        tool_calls=find_tool_call_format(tool_call_parser),
        reasoning=find_reasoning_format(reasoning_parser),
    )


def find_tool_call_format(name: str) -> ToolCallFormat | None:
    """The format of a name that is not ``auto``; None: calls are not read."""
    return TOOL_CALL_FORMATS.get(TOOL_CALL_ALIASES.get(name, name))


def find_reasoning_format(name: str) -> ReasoningFormat | None:
    """The format of a name that is not ``auto``; None: reasoning is not told apart."""
    return REASONING_FORMATS.get(REASONING_ALIASES.get(name, name))


def recognize_tool_calls(tokenizer: Any) -> str | None:
    """The name that ``auto`` stands for; None: nothing tells the format, and :data:`FALLBACK` is
    taken."""
    template = collect_template_text(tokenizer.chat_template)
    for signs, name in _TOOL_CALL_SIGNS:
        if all(sign in template for sign in signs):
            return name
    if getattr(tokenizer, "response_template", None) is not None:
        return "hf"
    tokens = set(getattr(tokenizer, "all_special_tokens", ()))
    by_token = next((name for sign, name in _TOKEN_SIGNS.items() if sign in tokens), None)
    return _find_written_format(tokenizer) or by_token


def describe_fallback(tokenizer: Any, tool_call_parser: str) -> str | None:
    """What a user has to know where ``auto`` is a guess; None: it is none."""
    if tool_call_parser != "auto" or recognize_tool_calls(tokenizer) is not None:
        return None
    if "tool" not in collect_template_text(tokenizer.chat_template):
        return None  # its agents cannot have tools
    return (
        f"the chat template shows no known format of tool calls, so they are read as {FALLBACK!r}. "
        "Where the model writes them otherwise, type engine.tool_call_parser=NAME"
    )


def _find_written_format(tokenizer: Any) -> str | None:
    """The first format that reads the call which the chat template writes; None: there is none."""
    arguments = {"number": 7}
    tool = {"name": "probe", "description": "", "parameters": _PROBE_PARAMETERS}
    tools = [{"type": "function", "function": tool}]
    call = {"name": "probe", "arguments": arguments}
    calls = [{"id": "probe0001", "type": "function", "function": call}]
    prompt = [{"role": "user", "content": "x"}]
    reply = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        render = functools.partial(tokenizer.apply_chat_template, tools=tools, tokenize=False)
        before, after = render(prompt, add_generation_prompt=True), render([*prompt, reply])
    except Exception as error:  # whatever a template complains of
        _log.debug("the chat template writes no call: %s", error)
        return None
    # Some write an empty reasoning where a reply begins, others do not.
    pairs = enumerate(zip(before, after, strict=False))
    begin = next((at for at, (one, other) in pairs if one != other), len(before))
    written = after[begin:]
    for name, one in TOOL_CALL_FORMATS.items():
        parser = one.build_parser(ReplyContext(tools=tools))
        parsed = parser.feed(written)
        parsed.add(parser.finish())
        functions = [call["function"] for call in parsed.tool_calls]
        is_call = [(f["name"], json.loads(f["arguments"])) for f in functions] == [
            ("probe", arguments)
        ]
        # What ends the turn may be left, but no mark before the call.
        if is_call and written.rstrip().endswith(parsed.content.strip()):
            return name
    return None


def find_reasoning_parser(chat_template: Any, tool_call_parser: str) -> str:
    """The name that ``auto`` stands for; ``none`` where the template knows no reasoning."""
    template = collect_template_text(chat_template)
    if tool_call_parser in RESPONSE_TEMPLATE_NAMES:
        return tool_call_parser
    chosen = find_tool_call_format(tool_call_parser)
    if chosen is not None and chosen.reads_reasoning:
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
        reads_reasoning=True,
    )


def _check_reads_reasoning(tool_call_parser: str, reasoning_parser: str) -> None:
    chosen = find_tool_call_format(tool_call_parser)
    if chosen is not None and not chosen.reads_reasoning:
        raise UserInputError(
            f"engine.reasoning_parser: {reasoning_parser!r} reads calls as well, so it does not go "
            f"with engine.tool_call_parser: {tool_call_parser!r}. Type "
            "engine.tool_call_parser=openai"
        )


class ResponseTemplateParser:
    """transformers' ``ResponseParser``, which raises on what it cannot read, made to continue.

    It is fed character by character, so that nothing depends on the pieces, and so that the
    text of a region that it cannot read is known: that text becomes content.

    Args:
        tokenizer: with a ``response_template``.
        prompt: the last part of the prompt's text, where reasoning may have begun.
        tools: those that were offered; none: calls stay text.
    """

    def __init__(self, tokenizer: Any, prompt: str, tools: Sequence[dict[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools)
        self._pending = ""
        """Text that stands for nothing yet: marks, and what is inside a call."""
        self._parser = self._open(prompt)
        self._before = prompt if find_open_reasoning(prompt) else ""
        """What calls stand behind: those inside of reasoning are none."""

    def feed(self, text: str) -> ParsedText:
        """What is certain after ``text``."""
        parsed = ParsedText()
        for character in text:
            self._pending += character
            try:
                events = self._parser.feed(character)
            except Exception:  # whatever a template's parsers raise
                self._give_up(parsed)
                continue
            self._take(parsed, events)
        return parsed

    def finish(self) -> ParsedText:
        """The rest, when no more text will come."""
        parsed = ParsedText()
        try:
            _, events = self._parser.finalize()
        except Exception:  # an unfinished call, or a field that is missing
            self._give_up(parsed)
            return parsed
        self._take(parsed, events)
        return parsed

    def _open(self, prompt: str) -> Any:
        return self._tokenizer.get_response_parser(prefix=prompt, tools=self._tools or None)

    def _give_up(self, parsed: ParsedText) -> None:
        self._add_content(parsed, self._pending)
        self._pending = ""
        self._parser = self._open("")

    def _add_content(self, parsed: ParsedText, text: str) -> None:
        parsed.content += text
        self._before += text

    def _take(self, parsed: ParsedText, events: Sequence[dict[str, Any]]) -> None:
        for event in events:
            if event["field"] == "thinking":
                # This reasoning is parted from the reply.
                self._before = ""
            if event["field"] == "tool_calls":
                if event["type"] == "region_close":
                    self._take_calls(parsed, event["value"])
            elif event["type"] == "region_chunk":
                text = event["text"]
                if event["field"] == "thinking":
                    parsed.reasoning += text
                else:
                    self._add_content(parsed, text)
                # Marks before the text are gone, what is held back after it is not.
                _, _, self._pending = self._pending.rpartition(text)
        if events and events[-1]["type"] == "region_close":
            self._pending = ""

    def _take_calls(self, parsed: ParsedText, value: Any) -> None:
        found = value if isinstance(value, list) else [value]
        functions = [item.get("function") for item in found if isinstance(item, dict)]
        calls = [
            build_call(function.get("name"), function.get("arguments"))
            for function in functions
            if isinstance(function, dict)
        ]
        valid = [call for call in calls if call is not None]
        is_call = self._tools and valid and len(valid) == len(found)
        if is_call and not has_open_reasoning(self._before):
            parsed.tool_calls.extend(valid)
        else:
            self._add_content(parsed, self._pending)
