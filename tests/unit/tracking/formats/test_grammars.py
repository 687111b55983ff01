"""What sampling is constrained to is what models write: xgrammar is the judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agentrl_cli.tracking.formats.format_table import TOOL_CALL_FORMATS
from agentrl_cli.tracking.formats.reply_formats import ReplyFormats
from agentrl_cli.tracking.protocols.model_request import ReplyRules
from agentrl_cli.tracking.structured_output import build_structural_tag

xgrammar = pytest.importorskip("xgrammar")

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Bern", "days": 3}),
    ("get_weather", {"city": "Rome", "days": 1}),
]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    "name", sorted(name for name, one in TOOL_CALL_FORMATS.items() if one.grammar is not None)
)
def test_what_models_write_is_allowed(
    name: str,
    number: int,
    tools: Sequence[dict[str, Any]],
    writers: dict[str, Callable[[Any], str]],
) -> None:
    from xgrammar.testing import _is_grammar_accept_string

    tag = build_structural_tag(
        ReplyRules(tool_choice="required"),
        tools[:1],
        ReplyFormats(tool_calls=TOOL_CALL_FORMATS[name]),
    )
    grammar = xgrammar.Grammar.from_structural_tag(tag)
    # DeepSeek V3.2 leaves an empty line before its calls, also where no text precedes them.
    text = ("\n\n" if name == "deepseek_v32" else "") + writers[name](CALLS[:number])
    assert _is_grammar_accept_string(grammar, text), text
    assert not _is_grammar_accept_string(grammar, text.replace("get_weather", "other"))
    assert not _is_grammar_accept_string(grammar, text[:-1])
