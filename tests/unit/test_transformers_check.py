"""The check of checkpoints without agentrl reads calls as servers do."""

import pytest

CALL = '{"name": "calculate", "arguments": {"expression": "1 + 2"}}'


@pytest.mark.openai_agents
def test_calls_are_found_with_and_without_the_closing_mark() -> None:
    for package in ("agents", "anthropic", "langgraph"):
        pytest.importorskip(package)
    from benchmarks.transformers_check import _find_tool_calls

    closed = f"<tool_call>\n{CALL}\n</tool_call>"
    # The third is one for vLLM and agentrl, too.
    texts = (closed, closed + closed, f"<tool_call>{CALL}", CALL, "<tool_call>{no}</tool_call>")
    assert [len(_find_tool_calls(text)) for text in texts] == [1, 2, 1, 0, 0]
