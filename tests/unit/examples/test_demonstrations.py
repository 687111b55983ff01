"""A warm start's conversations are those that the agent has: prompt, tools and all."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.openai_agents


async def test_the_calculators_demonstrations_are_what_the_sdk_sends(ask_sdk: Any) -> None:
    pytest.importorskip("agents")
    from examples.calculator_tools.agent import build_agent
    from examples.calculator_tools.demonstrations import build_demonstrations

    [shown] = build_demonstrations(num_rows=1)
    replies = [m for m in shown["messages"] if m["role"] == "assistant"]
    question = shown["messages"][1]["content"]
    (first, last), answer = await ask_sdk(build_agent(), question, replies)
    assert answer == shown["messages"][-1]["content"]
    assert first["messages"] == shown["messages"][:2]
    # As text: the order of the keys decides the tokens.
    assert json.dumps(first["tools"]) == json.dumps(shown["tools"])
    called, returned = last["messages"][2:]
    assert called["tool_calls"] == shown["messages"][2]["tool_calls"]
    assert returned["content"] == shown["messages"][3]["content"]
