"""The check of checkpoints without agentrl reads calls as servers do."""

from __future__ import annotations

import pytest

CALL = '{"name": "calculate", "arguments": {"expression": "1 + 2"}}'


@pytest.mark.parametrize(
    ("text", "num_calls"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", 1),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", 2),
        # vLLM and agentrl take it for a call, too.
        (f"<tool_call>\n{CALL}", 1),
        (CALL, 0),
        ("<tool_call>{not JSON}</tool_call>", 0),
        ('<tool_call>{"name": "calculate", "arguments": "1 + 2"}</tool_call>', 0),
    ],
)
def test_calls_are_found_with_and_without_the_closing_mark(text: str, num_calls: int) -> None:
    for package in ("agents", "anthropic", "langgraph"):
        pytest.importorskip(package)
    from benchmarks.transformers_check import _find_tool_calls

    calls = _find_tool_calls(text)
    assert len(calls) == num_calls
    assert all(call["arguments"] == {"expression": "1 + 2"} for call in calls)
