"""Calls passed on to an OpenAI-compatible endpoint: another gateway, on a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import EngineError
from agentrl_cli.records import InteractionStatus
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.endpoint import EndpointGateway
from agentrl_cli.tracking.gateway_socket import GatewaySocket
from agentrl_cli.tracking.session import Budget

Open = Callable[..., TrackingClient]
USER: Any = {"role": "user", "content": "What is the weather in Paris?"}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
KEY = "a-key-of-the-endpoint-12345"
COMPLETION: dict[str, Any] = {
    "id": "chatcmpl-x",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hey"}}
    ],
}
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
    replayed = {**one.reply, "name": "agent"}
    reply = await create(client, messages=[USER, replayed, result], tools=[TOOL])
    assert reply.choices[0].message.content == "It rains"
    one, two = client.interactions
    assert two.parent_id == one.id
    assert (two.mismatch_cause, two.completion_ids) == (None, ())
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


@pytest.fixture
async def connect_to() -> AsyncIterator[Callable[..., Any]]:
    """Opens a client whose calls go to an endpoint that answers whatever it is told to."""
    opened: list[Any] = []

    async def connect_one(reply: Any, **options: Any) -> tuple[TrackingClient, list[Any]]:
        bodies: list[Any] = []

        async def handle(request: Request) -> Response:
            bodies.append(await request.json())
            return reply if isinstance(reply, Response) else JSONResponse(reply)

        routes = [Route("/v1/chat/completions", handle, methods=["POST"])]
        server = GatewaySocket(Router(routes), knows=lambda _: True)
        gateway = EndpointGateway(
            server.open_socket(), KEY, "m", timeout_seconds=10.0, max_retries=0
        )
        opened.extend((server.close_socket, gateway.close))
        return TrackingClient(gateway=gateway, session=gateway.open_session(**options)), bodies

    yield connect_one
    for close in reversed(opened):
        await close()


async def test_an_endpoint_may_give_every_reply_the_same_id(connect_to: Any) -> None:
    client, _ = await connect_to(COMPLETION)
    first = await create(client)
    said = first.choices[0].message.model_dump(exclude_none=True)
    await create(client, messages=[USER, said, USER])
    one, two = client.interactions
    assert (one.id, two.parent_id) == (first.id, one.id)
    assert two.id != one.id
    client.set_final_reward(1.0)
    client.apply_reward_discount(0.5)
    assert [i.turn_return for i in client.interactions] == [0.5, 1.0]


@pytest.mark.parametrize(
    "reply",
    [
        {},
        [1],
        {**COMPLETION, "choices": []},
        {**COMPLETION, "choices": None},
        {**COMPLETION, "choices": [{"index": 0}]},
        *[
            Response(text, media_type="text/event-stream")
            for text in (
                "",
                "data: [DONE]\n\n",
                "data: {}\n\n",
                "data: {\n\n",
                f'data: {{"error": {{"message": "{KEY} ran dry"}}}}\n\n',
            )
        ],
    ],
    ids=lambda reply: reply.body.decode() if isinstance(reply, Response) else str(reply),
)
async def test_what_is_no_completion_is_an_engine_error(connect_to: Any, reply: Any) -> None:
    client, _ = await connect_to(reply)

    async def read() -> list[Any]:
        stream = isinstance(reply, Response)
        answer = await create(client, stream=stream)
        return [event async for event in answer] if stream else [answer]

    with pytest.raises(openai.APIError) as caught:
        await read()
    assert "the endpoint's" in str(caught.value)
    assert KEY not in str(caught.value)
    [failed] = client.interactions
    assert failed.status is InteractionStatus.FAILED
    assert KEY not in str(failed.error)
    assert isinstance(client.session.engine_error, EngineError)
    client.session._last_active -= 10
    assert client.session.idle_seconds >= 10, "no call is in flight"


async def test_the_length_of_a_reply_is_limited_under_the_agents_own_name(connect_to: Any) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 6, "total_tokens": 7}
    sampling, budget = Sampling(max_tokens=100), Budget(max_tokens=20)
    reply = {**COMPLETION, "usage": usage}
    client, bodies = await connect_to(reply, sampling=sampling, budget=budget)
    await create(client, max_tokens=500)
    await create(client, max_completion_tokens=7, temperature=None)
    await create(client)
    limits = [
        {k: v for k, v in body.items() if k not in ("model", "messages", "stream")}
        for body in bodies
    ]
    assert limits == [
        {"max_tokens": 20},
        {"max_completion_tokens": 7},
        {"max_completion_tokens": 8},
    ]


async def test_an_endpoints_key_is_not_shown_and_not_stored(connect_to: Any) -> None:
    refusal = {"error": {"message": f"Incorrect API key: {KEY}"}}
    client, _ = await connect_to(JSONResponse(refusal, status_code=401))
    with pytest.raises(openai.AuthenticationError, match=r"Incorrect API key: \*\*\*"):
        await create(client)
    assert "Incorrect API key: ***" in (client.interactions[0].error or "")


async def test_unreachable_endpoint_is_an_engine_error() -> None:
    gateway = EndpointGateway(
        "http://127.0.0.1:9/v1", "key", "m", timeout_seconds=2.0, max_retries=0
    )
    client = TrackingClient(gateway=gateway)
    with pytest.raises(openai.InternalServerError, match="the endpoint did not answer"):
        await create(client)
    assert isinstance(client.session.engine_error, EngineError)
    await gateway.close()
