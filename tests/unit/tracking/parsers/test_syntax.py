"""What sampling is held to is what models write, and what is read: xgrammar is the judge."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agentrl_cli.tracking.parsers.table import TOOL_CALL_FORMATS

xgrammar = pytest.importorskip("xgrammar")

HELD = sorted(
    name
    for name, one in TOOL_CALL_FORMATS.items()
    if one.syntax is not None and not one.reads_thoughts
)
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Bern", "days": 3}),
    ("get_weather", {"city": "Rome", "days": 1}),
]


def build_grammar(name: str, tools: Sequence[dict[str, Any]]) -> Any:
    """The calls of the format as a structural tag."""
    syntax = TOOL_CALL_FORMATS[name].syntax
    assert syntax is not None
    tags = []
    for tool in tools:
        function = tool["function"]
        content: dict[str, Any] = {
            "type": "json_schema",
            "json_schema": {**function["parameters"], "required": ["city", "days"]},
            "style": syntax.arguments_style,
        }
        if syntax.after_name_pattern:
            parts = [
                {"type": "regex", "pattern": syntax.after_name_pattern},
                {"type": "const_string", "value": syntax.before_arguments},
                content,
            ]
            content = {"type": "sequence", "elements": parts}
        tags.append(
            {
                "type": "tag",
                "begin": syntax.begin(function["name"]),
                "content": content,
                "end": syntax.end,
            }
        )
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": syntax.separator,
        "at_least_one": True,
    }
    around = [
        {"type": "const_string", "value": text}
        for text in (syntax.section_begin, syntax.section_end)
    ]
    elements = [around[0], calls, around[1]] if syntax.section_begin else [calls]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    return xgrammar.Grammar.from_structural_tag(json.dumps(tag))


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", HELD)
def test_what_models_write_is_allowed(
    name: str,
    number: int,
    tools: Sequence[dict[str, Any]],
    writers: dict[str, Callable[[Any], str]],
) -> None:
    from xgrammar.testing import _is_grammar_accept_string

    grammar = build_grammar(name, tools[:1])
    text = writers[name](CALLS[:number])
    assert _is_grammar_accept_string(grammar, text), text
    assert not _is_grammar_accept_string(grammar, text.replace("get_weather", "other"))
    assert not _is_grammar_accept_string(grammar, text[:-1])
