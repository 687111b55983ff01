"""What the OpenAI Agents SDK really sends, against what the built-in model has learned."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl_cli.models.calculator_tasks import CALCULATE_TOOL, SYSTEM_PROMPT
from builders.calculator_agent import build_calculator_agent

pytestmark = pytest.mark.openai_agents

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "calculate", "arguments": '{"expression": "47+38"}'},
}


async def test_the_sdk_sends_the_prompt_of_the_demonstrations(ask_sdk: Any) -> None:
    replies = [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "85"},
    ]
    requests, answer = await ask_sdk(build_calculator_agent(), "What is 47 plus 38?", replies)
    assert answer == "85"
    for request in requests:
        assert request["messages"][:2] == [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": "What is 47 plus 38?"},
        ]
        # As text: the order of the keys decides the tokens.
        assert json.dumps(request["tools"]) == json.dumps([CALCULATE_TOOL])
    assert requests[1]["messages"][-1]["role"] == "tool"
    assert requests[1]["messages"][-1]["content"] == "85"
