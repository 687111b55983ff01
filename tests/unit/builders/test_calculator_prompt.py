"""What the OpenAI Agents SDK really sends, against what the built-in model has learned."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from agentrl_cli.models.calculator_tasks import CALCULATE_TOOL, SYSTEM_PROMPT
from builders.calculator_agent import build_calculator_agent

pytestmark = pytest.mark.openai_agents

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "calculate", "arguments": '{"expression": "47+38"}'},
}


async def test_the_sdk_sends_the_prompt_of_the_demonstrations() -> None:
    from agents import OpenAIProvider, RunConfig, Runner

    requests: list[dict[str, Any]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        requests.append(json.loads(request.content))
        message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        if len(requests) == 2:
            message = {"role": "assistant", "content": "85"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
        return httpx2.Response(200, json={**body, "choices": [choice]})

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as http_client:
        client = AsyncOpenAI(api_key="k", base_url="http://test/v1", http_client=http_client)
        provider = OpenAIProvider(openai_client=client, use_responses=False)
        result = await Runner.run(
            build_calculator_agent(),
            "What is 47 plus 38?",
            run_config=RunConfig(model_provider=provider, tracing_disabled=True),
        )
    assert result.final_output == "85"
    for request in requests:
        assert request["messages"][:2] == [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": "What is 47 plus 38?"},
        ]
        # As text: the order of the keys decides the tokens.
        assert json.dumps(request["tools"]) == json.dumps([CALCULATE_TOOL])
    assert requests[1]["messages"][-1]["role"] == "tool"
    assert requests[1]["messages"][-1]["content"] == "85"
