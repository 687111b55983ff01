"""Replies as models of every family write them, by their published chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

Arguments = dict[str, Any]
Calls = Sequence[tuple[str, Arguments]]


def make_tool(name: str, **types: Any) -> dict[str, Any]:
    properties = {
        key: kind if isinstance(kind, dict) else {"type": kind} for key, kind in types.items()
    }
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    make_tool("get_weather", city="string", days="integer"),
    make_tool("note", text="string", tags="array", urgent="boolean", more="object"),
    make_tool("now"),
]


def _dump(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False)


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else _dump(value)


def write_each(
    call: str, separator: str = "", *, begin: str = "", end: str = "", parameter: str = ""
) -> Callable[[Calls], str]:
    """Writes every call by the template ``call``, its arguments by ``parameter``."""

    def write(calls: Calls) -> str:
        written = []
        for number, (name, arguments) in enumerate(calls):
            lines = "".join(
                parameter.format(key=key, value=_bare(value), is_text=_dump(isinstance(value, str)))
                for key, value in arguments.items()
            )
            written.append(
                call.format(name=name, number=number, arguments=_dump(arguments), lines=lines)
            )
        return begin + separator.join(written) + end

    return write


OBJECT = '{{"name": "{name}", "arguments": {arguments}}}'
PARAMETERS_OBJECT = OBJECT.replace('arguments"', 'parameters"')


def write_list(begin: str, end: str = "") -> Callable[[Calls], str]:
    return write_each(OBJECT, ", ", begin=f"{begin}[", end=f"]{end}")


def write_function_xml(begin: str, end: str, line: str = "\n") -> Callable[[Calls], str]:
    return write_each(
        f"{begin}\n<function={{name}}>\n{{lines}}</function>\n{end}",
        "\n",
        parameter=f"<parameter={{key}}>{line}{{value}}{line}</parameter>\n",
    )


def _python(calls: Calls) -> list[str]:
    return [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]


def write_python(begin: str = "[", end: str = "]", separator: str = ", ") -> Callable[[Calls], str]:
    return lambda calls: f"{begin}{separator.join(_python(calls))}{end}"


WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": write_each(f"<tool_call>\n{OBJECT}\n</tool_call>", "\n"),
    "longcat": write_each(f"<longcat_tool_call>{OBJECT}</longcat_tool_call>", "\n"),
    "granite": write_list("<|tool_call|>"),
    "granite-20b-fc": write_each(f"<function_call> {OBJECT}", "\n"),
    "phi4_mini_json": write_list("functools"),
    "jamba": write_list("<tool_calls>", "</tool_calls>"),
    "internlm": write_each(f"<|action_start|><|plugin|>\n{PARAMETERS_OBJECT}\n<|action_end|>"),
    "apertus": write_each(
        '{{"{name}": {arguments}}}', ", ", begin="<|tools_prefix|>[", end="]<|tools_suffix|>"
    ),
    "llama3_json": write_each(PARAMETERS_OBJECT, "; "),
    "mistral": write_each("[TOOL_CALLS]{name}[ARGS]{arguments}"),
    "deepseek_v3": write_each(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        "\n",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": write_each(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": write_each(
        '<｜DSML｜invoke name="{name}">\n{lines}</｜DSML｜invoke>',
        "\n",
        begin="<｜DSML｜function_calls>\n",
        end="\n</｜DSML｜function_calls>",
        parameter='<｜DSML｜parameter name="{key}" string="{is_text}">'
        "{value}</｜DSML｜parameter>\n",
    ),
    "kimi_k2": write_each(
        "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        "{arguments}<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    ),
    "qwen3_coder": write_function_xml("<tool_call>", "</tool_call>"),
    "mimo": write_function_xml("<tool_call>", "</tool_call>", ""),
    "seed_oss": write_function_xml("<seed:tool_call>", "</seed:tool_call>"),
    "minimax_m2": write_each(
        '<invoke name="{name}">\n{lines}</invoke>',
        "\n",
        begin="<minimax:tool_call>\n",
        end="\n</minimax:tool_call>",
        parameter='<parameter name="{key}">{value}</parameter>\n',
    ),
    "glm45": write_each(
        "<tool_call>{name}\n{lines}</tool_call>",
        "\n",
        parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    "openai": write_each(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
        "<|start|>assistant",
    ),
    "pythonic": write_python(),
    "llama4_pythonic": write_python("<|python_start|>[", "]<|python_end|>"),
    "lfm2": write_python("<|tool_call_start|>[", "]<|tool_call_end|>"),
    "olmo3": write_python("<function_calls>", "</function_calls>", "\n"),
}


@pytest.fixture(scope="session")
def writers() -> dict[str, Callable[[Calls], str]]:
    """Format to what writes calls in it."""
    return WRITERS


@pytest.fixture(scope="session")
def tools() -> list[dict[str, Any]]:
    """The tools that the calls are of."""
    return TOOLS
