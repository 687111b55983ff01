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


def _objects(calls: Calls, key: str = "arguments") -> list[str]:
    return [_dump({"name": name, key: arguments}) for name, arguments in calls]


def write_hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in _objects(calls))


def write_longcat(calls: Calls) -> str:
    return "".join(
        f"<longcat_tool_call>{text}</longcat_tool_call>\n" for text in _objects(calls)
    ).rstrip("\n")


def write_list(begin: str, end: str = "") -> Callable[[Calls], str]:
    return lambda calls: f"{begin}[{', '.join(_objects(calls))}]{end}"


def write_granite_function(calls: Calls) -> str:
    return "\n".join(f"<function_call> {text}" for text in _objects(calls))


def write_internlm(calls: Calls) -> str:
    return "".join(
        f"<|action_start|><|plugin|>\n{text}\n<|action_end|>"
        for text in _objects(calls, "parameters")
    )


def write_apertus(calls: Calls) -> str:
    pairs = ", ".join(_dump({name: arguments}) for name, arguments in calls)
    return f"<|tools_prefix|>[{pairs}]<|tools_suffix|>"


def write_llama(calls: Calls) -> str:
    return "; ".join(_objects(calls, "parameters"))


def write_mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_dump(arguments)}" for name, arguments in calls)


def write_deepseek_v3(calls: Calls) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_dump(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def write_deepseek_v31(calls: Calls) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_dump(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def write_deepseek_v32(calls: Calls) -> str:
    invokes = []
    for name, arguments in calls:
        lines = "".join(
            f'<｜DSML｜parameter name="{key}" string="{_dump(isinstance(value, str))}">'
            f"{_bare(value)}</｜DSML｜parameter>\n"
            for key, value in arguments.items()
        )
        invokes.append(f'<｜DSML｜invoke name="{name}">\n{lines}</｜DSML｜invoke>')
    inside = "\n".join(invokes)
    return f"<｜DSML｜function_calls>\n{inside}\n</｜DSML｜function_calls>"


def write_kimi(calls: Calls) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{_dump(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def write_function_xml(begin: str, end: str, line: str = "\n") -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        written = []
        for name, arguments in calls:
            lines = "".join(
                f"<parameter={key}>{line}{_bare(value)}{line}</parameter>\n"
                for key, value in arguments.items()
            )
            written.append(f"{begin}\n<function={name}>\n{lines}</function>\n{end}")
        return "\n".join(written)

    return write


def write_minimax(calls: Calls) -> str:
    invokes = []
    for name, arguments in calls:
        lines = "".join(
            f'<parameter name="{key}">{_bare(value)}</parameter>\n'
            for key, value in arguments.items()
        )
        invokes.append(f'<invoke name="{name}">\n{lines}</invoke>')
    inside = "\n".join(invokes)
    return f"<minimax:tool_call>\n{inside}\n</minimax:tool_call>"


def write_glm(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        lines = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        written.append(f"<tool_call>{name}\n{lines}</tool_call>")
    return "\n".join(written)


def write_harmony(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{_dump(arguments)}<|call|>"
        for name, arguments in calls
    )


def _python(calls: Calls) -> list[str]:
    return [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]


def write_python(begin: str = "[", end: str = "]", separator: str = ", ") -> Callable[[Calls], str]:
    return lambda calls: f"{begin}{separator.join(_python(calls))}{end}"


WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": write_hermes,
    "longcat": write_longcat,
    "granite": write_list("<|tool_call|>"),
    "granite-20b-fc": write_granite_function,
    "phi4_mini_json": write_list("functools"),
    "jamba": write_list("<tool_calls>", "</tool_calls>"),
    "internlm": write_internlm,
    "apertus": write_apertus,
    "llama3_json": write_llama,
    "mistral": write_mistral,
    "deepseek_v3": write_deepseek_v3,
    "deepseek_v31": write_deepseek_v31,
    "deepseek_v32": write_deepseek_v32,
    "kimi_k2": write_kimi,
    "qwen3_coder": write_function_xml("<tool_call>", "</tool_call>"),
    "mimo": write_function_xml("<tool_call>", "</tool_call>", ""),
    "seed_oss": write_function_xml("<seed:tool_call>", "</seed:tool_call>"),
    "minimax_m2": write_minimax,
    "glm45": write_glm,
    "openai": write_harmony,
    "pythonic": write_python(),
    "llama4_pythonic": write_python("<|python_start|>[", "]<|python_end|>"),
    "lfm2": write_python("<|tool_call_start|>[", "]<|tool_call_end|>"),
    "olmo3": write_python("<function_calls>", "</function_calls>", "\n"),
}
#: These hold calls alone: text stands in a message of its own, or nowhere.
WITHOUT_TEXT_BEFORE = ("openai", "pythonic")


@pytest.fixture(scope="session")
def writers() -> dict[str, Callable[[Calls], str]]:
    """Format to what writes calls in it."""
    return WRITERS


@pytest.fixture(scope="session")
def tools() -> list[dict[str, Any]]:
    """The tools that the calls are of."""
    return TOOLS
