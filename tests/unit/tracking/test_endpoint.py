"""Calls passed on to an OpenAI-compatible endpoint: another gateway, on a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import EngineError
from agentrl_cli.records import InteractionStatus
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.endpoint import EndpointGateway
from agentrl_cli.tracking.session import Budget

Open = Callable[..., TrackingClient]
USER: Any = {"role": "user", "content": "What is the weather in Paris?"}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.fixture
async def connect(open_client: Open) -> AsyncIterator[Callable[..., Any]]:
    """Opens a client whose calls go to an endpoint that follows a script."""
    gateways: list[EndpointGateway] = []

    async def connect_one(*script: Any, **options: Any) -> tuple[TrackingClient, Any]:
        served = open_client(*script, max_model_len=options.pop("max_model_len", 4096))
        gateway = EndpointGateway(
            await served.gateway.serve(),
            served.session_key,
            "remote-model",
            timeout_seconds=10.0,
            max_retries=0,
        )
        gateways.append(gateway)
        session = gateway.open_session(**options)
        client = TrackingClient(gateway=gateway, session=session)
        return client, served.gateway.engine  # type: ignore[attr-defined]

    yield connect_one
    for gateway in gateways:
        await gateway.close()


async def create(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return await client.chat.completions.create(**{"model": "m", "messages": [USER], **options})


@pytest.mark.parametrize("stream", [False, True])
async def test_conversation_is_recorded_without_tokens(connect: Any, stream: bool) -> None:
    client, _ = await connect("Look. " + CALL, "It rains")
    first = await create(client, tools=[TOOL], stream=stream)
    if stream:
        deltas = [c.choices[0].delta async for c in first if c.choices]
        assert "".join(d.content or "" for d in deltas) == "Look. "
    [one] = client.interactions
    assert one.reply is not None
    [call] = one.reply["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    reply = await create(client, messages=[USER, one.reply, result], tools=[TOOL])
    assert reply.choices[0].message.content == "It rains"
    one, two = client.interactions
    assert two.parent_id == one.id
    assert (two.break_cause, two.completion_ids) == (None, ())
    if not stream:
        assert one.num_completion_tokens > 0
    client.set_final_reward(1.0)
    client.apply_reward_discount()
    assert [i.turn_return for i in client.interactions] == [1.0, 1.0]
    assert client.export_interactions() == {}, "nothing of it can be trained on"


async def test_sampling_and_model_name_reach_the_endpoint(connect: Any) -> None:
    client, engine = await connect("a", "b", sampling=Sampling(max_tokens=9, temperature=0.5))
    await create(client)
    await create(client, temperature=0.1)
    assert [(s.max_tokens, s.temperature) for s in engine.samplings] == [(9, 0.5), (9, 0.1)]
    [model] = (await client.models.list()).data
    assert model.id == "remote-model"


async def test_refusals_of_the_endpoint_come_in_its_own_words(connect: Any) -> None:
    client, _ = await connect(EngineError("the far server died"), max_model_len=4096)
    with pytest.raises(openai.InternalServerError, match="the far server died") as caught:
        await create(client)
    assert caught.value.status_code == 503
    with pytest.raises(openai.BadRequestError, match="temprature"):
        await create(client, extra_body={"temprature": 1})
    assert [i.status for i in client.interactions] == [InteractionStatus.FAILED] * 2


async def test_budget_holds_for_endpoints(connect: Any) -> None:
    client, _ = await connect("a", budget=Budget(max_turns=1))
    await create(client)
    with pytest.raises(openai.BadRequestError, match="max_turns = 1"):
        await create(client)


async def test_unreachable_endpoint_is_an_engine_error() -> None:
    gateway = EndpointGateway(
        "http://127.0.0.1:9/v1", "key", "m", timeout_seconds=2.0, max_retries=0
    )
    client = TrackingClient(gateway=gateway)
    with pytest.raises(openai.InternalServerError, match="the endpoint did not answer"):
        await create(client)
    assert isinstance(client.session.engine_error, EngineError)
    await gateway.close()
