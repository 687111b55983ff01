"""The formats of tool calls and reasoning, by the names that users know from vLLM and SGLang."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from agentrl_cli.tracking.formats.call_scanner import CallReader, CallScanner
from agentrl_cli.tracking.formats.harmony import SPECIAL_TEXTS, HarmonyParser
from agentrl_cli.tracking.formats.json_calls import (
    BareJsonCalls,
    JsonCalls,
    MistralCalls,
    NamedCalls,
)
from agentrl_cli.tracking.formats.python_calls import PythonCalls
from agentrl_cli.tracking.formats.reply_formats import (
    CallSyntax,
    ReasoningFormat,
    ReplyContext,
    ToolCallFormat,
)
from agentrl_cli.tracking.formats.xml_calls import ArgumentTypes, XmlCalls

#: The section's beginning and end, a call's, and what stands before its arguments.
_DEEPSEEK_MARKS = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
_KIMI_MARKS = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_end|>", "<|tool_call_argument_begin|>",
)  # fmt: skip
_DSML = "｜DSML｜"


def _scan(reader: CallReader) -> Callable[[ReplyContext], CallScanner]:
    return lambda context: CallScanner(reader, context.prompt_end)


def _list_format(
    name: str,
    begin: str,
    end: str = "",
    *,
    other_start: str = "",
    keys: tuple[str, ...] = ("arguments",),
) -> ToolCallFormat:
    """A format of a list of objects with ``name`` and arguments between two marks.

    Args:
        name: of the format.
        begin: the mark before the list.
        end: the mark after it; empty: the list ends itself.
        other_start: another spelling of ``begin``.
        keys: of the arguments.
    """
    marks = tuple(mark for mark in (begin, other_start, end) if mark)
    starts = tuple(mark for mark in (begin, other_start) if mark)
    return ToolCallFormat(
        name=name,
        build_parser=_scan(JsonCalls(starts=starts, end=end, is_listed=True, keys=keys)),
        grammar=CallSyntax(
            section_begin=f"{begin}[",
            before_name='{"name": "',
            before_arguments='", "arguments": ',
            end="}",
            section_end=f"]{end}",
            separator=", ",
        ),
        special_texts=marks,
    )


def _object_format(
    name: str,
    starts: tuple[str, ...],
    end: str,
    *,
    around: str = "",
    separator: str = "\n",
    keys: tuple[str, ...] = ("arguments",),
    special_texts: tuple[str, ...] | None = None,
    grammar: str | None = None,
) -> ToolCallFormat:
    """A format of one object with ``name`` and arguments between two marks.

    Args:
        name: of the format.
        starts: the mark before a call, and other spellings of it.
        end: the mark after it; empty: the object ends the call.
        around: white space inside the marks.
        separator: what stands between calls.
        keys: of the arguments; the first is what the model writes.
        special_texts: tokens that spell the marks; None: each mark is one.
        grammar: xgrammar's name for the format; None: it has none.
    """
    marks = tuple(mark for mark in (*starts, end) if mark)
    return ToolCallFormat(
        name=name,
        build_parser=_scan(JsonCalls(starts=starts, end=end, keys=keys)),
        grammar=grammar
        or CallSyntax(
            before_name=f'{starts[0]}{around}{{"name": "',
            before_arguments=f'", "{keys[0]}": ',
            end=f"}}{around if end else ''}{end}",
            separator=separator,
        ),
        special_texts=marks if special_texts is None else special_texts,
        end_of_call=end or None,
    )


def _scan_tags(**tags: Any) -> Callable[[ReplyContext], CallScanner]:
    return lambda context: CallScanner(
        XmlCalls(types=ArgumentTypes(context.tools), **tags), context.prompt_end
    )


def _function_format(
    name: str,
    section: str,
    section_end: str,
    *,
    has_lines: bool = True,
    grammar: str | None = None,
) -> ToolCallFormat:
    """A format of ``<function=NAME><parameter=KEY>VALUE</parameter></function>``."""
    return ToolCallFormat(
        name=name,
        build_parser=_scan_tags(
            section=section,
            call_begin="<function=",
            call_header_end=">",
            key_begin="<parameter=",
            key_pattern=re.compile(r"(?P<key>[^<\n]+)"),
            value_end="</parameter>",
            call_end="</function>",
            closers=(section_end,),
            has_lines=has_lines,
        ),
        grammar=grammar
        or CallSyntax(
            before_name=f"{section}\n<function=",
            before_arguments=">\n",
            arguments_style="qwen_xml",
            end=f"\n</function>\n{section_end}",
        ),
        special_texts=(section, section_end),
        end_of_call=section_end,
    )


def _invoke_format(
    name: str, section: str, section_end: str, mark: str = "", *, grammar: str | None = None
) -> ToolCallFormat:
    """A format of ``<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>``.

    With a mark in every tag, keys say whether their values are text.
    """
    attribute = r'(?:\s+string="(?P<is_text>true|false)")?' if mark else ""
    return ToolCallFormat(
        name=name,
        build_parser=_scan_tags(
            section=section,
            call_begin=f'<{mark}invoke name="',
            call_header_end='">',
            key_begin=f"<{mark}parameter name=",
            key_pattern=re.compile(rf'"(?P<key>[^"\n]+)"{attribute}'),
            value_end=f"</{mark}parameter>",
            call_end=f"</{mark}invoke>",
            closers=(section_end,),
        ),
        grammar=grammar
        or CallSyntax(
            section_begin=f"{section}\n",
            before_name='<invoke name="',
            before_arguments='">\n',
            arguments_style="minimax_xml",
            end="\n</invoke>",
            section_end=f"\n{section_end}",
        ),
        special_texts=tuple(text for text in (section, section_end, mark) if text),
        end_of_call=f"</{mark}invoke>",
    )


def _named_format(
    name: str,
    marks: tuple[str, str, str, str, str],
    grammar: str,
    *,
    is_fenced: bool = False,
    is_numbered: bool = False,
) -> ToolCallFormat:
    """A format of names and JSON between marks: DeepSeek's and Kimi's.

    Args:
        name: of the format.
        marks: as :data:`_DEEPSEEK_MARKS`.
        grammar: xgrammar's name for the format.
        is_fenced: a type stands before the name, and the JSON in a code block.
        is_numbered: what stands in the name's place is the call's id.
    """
    section, section_end, begin, end, separator = marks
    reader = NamedCalls(
        section=section,
        before_name=(begin, f"function{separator}") if is_fenced else (begin,),
        before_arguments=("```json",) if is_fenced else (separator,),
        end=("```", end) if is_fenced else (end,),
        closers=(section_end,),
        is_numbered=is_numbered,
    )
    return ToolCallFormat(
        name=name,
        build_parser=_scan(reader),
        grammar=grammar,
        special_texts=marks,
        end_of_call=end,
    )


def _python_format(
    name: str, start: str = "", end: str = "", *, is_listed: bool = True, needs_start: bool = True
) -> ToolCallFormat:
    reader = PythonCalls(
        start=start,
        end=end,
        is_listed=is_listed,
        starts=tuple(filter(None, (start, "" if needs_start else "["))),
        closers=(end,) if end and is_listed else (),
        # A bracket in the middle of text begins no list of calls.
        first_starts=("[",),
    )
    return ToolCallFormat(
        name=name,
        build_parser=_scan(reader),
        special_texts=tuple(mark for mark in (start, end) if mark),
    )


_HERMES = _object_format("hermes", ("<tool_call>",), "</tool_call>", around="\n", grammar="qwen_3")
_LLAMA = ToolCallFormat(
    name="llama3_json",
    build_parser=_scan(BareJsonCalls()),
    grammar=CallSyntax(
        before_name='{"name": "', before_arguments='", "parameters": ', end="}", separator="; "
    ),
    special_texts=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
)
_MISTRAL = ToolCallFormat(
    name="mistral",
    build_parser=_scan(MistralCalls()),
    grammar=CallSyntax(before_name="[TOOL_CALLS]", before_arguments="[ARGS]", end="", separator=""),
    special_texts=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
)
_GLM = ToolCallFormat(
    name="glm45",
    build_parser=_scan_tags(
        call_begin="<tool_call>",
        key_begin="<arg_key>",
        key_end="</arg_key>",
        key_pattern=re.compile(r"(?P<key>[^<]*)"),
        value_begin="<arg_value>",
        value_end="</arg_value>",
        call_end="</tool_call>",
    ),
    grammar="glm_4_7",
    special_texts=(
        "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    ),
    end_of_call="</tool_call>",
)  # fmt: skip
_HARMONY = ToolCallFormat(
    name="openai",
    build_parser=lambda context: HarmonyParser(context.tools),
    special_texts=SPECIAL_TEXTS,
    end_of_call="<|call|>",
    reads_reasoning=True,
)
_APERTUS = ToolCallFormat(
    name="apertus",
    build_parser=_scan(
        JsonCalls(starts=("<|tools_prefix|>",), end="<|tools_suffix|>", is_listed=True, keys=())
    ),
    special_texts=("<|tools_prefix|>", "<|tools_suffix|>"),
)
_LFM2 = _python_format("lfm2", "<|tool_call_start|>", "<|tool_call_end|>")
_QWEN3_CODER = _function_format(
    "qwen3_coder", "<tool_call>", "</tool_call>", grammar="qwen_3_coder"
)

TOOL_CALL_FORMATS: dict[str, ToolCallFormat] = {
    one.name: one
    for one in (
        _HERMES,
        _QWEN3_CODER,
        _function_format(
            "mimo", "<tool_call>", "</tool_call>", has_lines=False
        ),
        _function_format("seed_oss", "<seed:tool_call>", "</seed:tool_call>"),
        _invoke_format("minimax_m2", "<minimax:tool_call>", "</minimax:tool_call>"),
        _invoke_format(
            "deepseek_v32",
            f"<{_DSML}function_calls>",
            f"</{_DSML}function_calls>",
            _DSML,
            grammar="deepseek_v3_2",
        ),
        _named_format("deepseek_v3", _DEEPSEEK_MARKS, "deepseek_r1", is_fenced=True),
        _named_format("deepseek_v31", _DEEPSEEK_MARKS, "deepseek_v3_1"),
        _named_format("kimi_k2", _KIMI_MARKS, "kimi", is_numbered=True),
        _GLM,
        _HARMONY,
        _LLAMA,
        _MISTRAL,
        _object_format("longcat", ("<longcat_tool_call>",), "</longcat_tool_call>"),
        _list_format("granite", "<|tool_call|>", other_start="<tool_call>"),
        _object_format("granite-20b-fc", ("<function_call>",), "", around=" "),
        _list_format(
            "phi4_mini_json",
            "functools",
            other_start="<|tool_call|>",
            keys=("arguments", "parameters"),
        ),
        _list_format("jamba", "<tool_calls>", "</tool_calls>"),
        _object_format(
            "internlm",
            ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
            "<|action_end|>",
            around="\n",
            separator="",
            keys=("parameters", "arguments"),
            special_texts=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        ),
        _APERTUS,
        _python_format("pythonic", needs_start=False),
        _python_format(
            "llama4_pythonic", "<|python_start|>", "<|python_end|>", needs_start=False
        ),
        _python_format("olmo3", "<function_calls>", "</function_calls>", is_listed=False),
        _LFM2,
    )
}  # fmt: skip

#: Other names of vLLM and SGLang for the same formats.
TOOL_CALL_ALIASES: dict[str, str] = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_json": "hermes",
    "granite4": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "nanbeige": "qwen3_coder",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "gpt-oss": "openai",
    "glm": "glm45",
    "glm47": "glm45",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "minimax-m2": "minimax_m2",
    "hunyuan_a13b": "jamba",
    "interns1": "internlm",
}

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    one.name: one
    for one in (
        ReasoningFormat(name="qwen3"),
        ReasoningFormat(name="deepseek_r1", begins_inside=True),
        ReasoningFormat(name="seed_oss", begin="<seed:think>", end="</seed:think>"),
        ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]"),
        ReasoningFormat(name="kimi", begin="◁think▷", end="◁/think▷"),
        ReasoningFormat(
            name="granite", begin="Here is my thought process:", end="Here is my response:"
        ),
    )
}
#: Served by the parser of the tool calls, which reads reasoning as well.
REASONING_BY_TOOL_CALLS: dict[str, str] = {"gpt-oss": "openai", "openai_gptoss": "openai"}
REASONING_ALIASES: dict[str, str] = {
    "deepseek-r1": "deepseek_r1",
    "qwen3-thinking": "deepseek_r1",
    "deepseek_v3": "qwen3",
    "deepseek-v3": "qwen3",
    "glm45": "qwen3",
    "glm47": "qwen3",
    "kimi_k2": "qwen3",
    "nemotron_v3": "qwen3",
    "nemotron_3": "qwen3",
    "mimo": "qwen3",
    "olmo3": "qwen3",
    "step3": "deepseek_r1",
    "step3p5": "qwen3",
    "minimax_m2": "deepseek_r1",
    "minimax": "deepseek_r1",
    "interns1": "qwen3",
    "holo2": "qwen3",
}
