"""What several rooms' unit tests need."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI


@pytest.fixture
def ask_sdk() -> Callable[..., Any]:
    """Runs an agent of the OpenAI Agents SDK on a question, with a model that gives these replies;
    what the SDK sent, and its final output."""

    async def ask(
        agent: Any, question: str, replies: Sequence[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], str]:
        from agents import OpenAIProvider, RunConfig, Runner

        requests: list[dict[str, Any]] = []

        def answer(request: httpx2.Request) -> httpx2.Response:
            choice = {"index": 0, "finish_reason": "stop", "message": replies[len(requests)]}
            requests.append(json.loads(request.content))
            body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
            return httpx2.Response(200, json={**body, "choices": [choice]})

        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as http_client:
            client = AsyncOpenAI(api_key="k", base_url="http://test/v1", http_client=http_client)
            provider = OpenAIProvider(openai_client=client, use_responses=False)
            config = RunConfig(model_provider=provider, tracing_disabled=True)
            result = await Runner.run(agent, question, run_config=config)
        return requests, result.final_output

    return ask
