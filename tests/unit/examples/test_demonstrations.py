"""A warm start's conversations are those that the agent has: prompt, tools and all."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

pytestmark = pytest.mark.openai_agents


async def test_the_calculators_demonstrations_are_what_the_sdk_sends() -> None:
    pytest.importorskip("agents")
    from agents import OpenAIProvider, RunConfig, Runner

    from examples.calculator_tools.agent import build_agent
    from examples.calculator_tools.demonstrations import build_demonstrations

    [shown] = build_demonstrations(num_rows=1)
    replies = [m for m in shown["messages"] if m["role"] == "assistant"]
    requests: list[dict[str, Any]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        choice = {"index": 0, "finish_reason": "stop", "message": replies[len(requests)]}
        requests.append(json.loads(request.content))
        body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
        return httpx2.Response(200, json={**body, "choices": [choice]})

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as http_client:
        client = AsyncOpenAI(api_key="k", base_url="http://test/v1", http_client=http_client)
        provider = OpenAIProvider(openai_client=client, use_responses=False)
        result = await Runner.run(
            build_agent(),
            shown["messages"][1]["content"],
            run_config=RunConfig(model_provider=provider, tracing_disabled=True),
        )
    assert result.final_output == shown["messages"][-1]["content"]
    first, last = requests
    assert first["messages"] == shown["messages"][:2]
    # As text: the order of the keys decides the tokens.
    assert json.dumps(first["tools"]) == json.dumps(shown["tools"])
    called, returned = last["messages"][2:]
    assert called["tool_calls"] == shown["messages"][2]["tool_calls"]
    assert returned["content"] == shown["messages"][3]["content"]
