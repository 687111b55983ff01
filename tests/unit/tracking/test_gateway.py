"""The gateway as its clients see it: the official SDK, in process and over a socket."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Callable
from typing import Any

import openai
import pytest

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import EngineError, EngineTimeoutError, UserInputError
from agentrl_cli.records import InteractionStatus
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway import Gateway
from agentrl_cli.tracking.gateway_socket import open_listener
from agentrl_cli.tracking.session import Budget

Open = Callable[..., TrackingClient]
USER: Any = {"role": "user", "content": "What is the weather in Paris?"}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


async def create(client: openai.AsyncOpenAI, **options: Any) -> Any:
    options = {"model": "m", "messages": [USER], **options}
    return await client.chat.completions.create(**options)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("The answer is forty two.", {}),
        ("Ünïcödé 😀 is split over tokens", {}),
        ("Let me see. " + CALL, {"tools": [TOOL]}),
        (CALL + CALL, {"tools": [TOOL]}),
        ("<tool_call> nothing", {"tools": [TOOL]}),
        (CALL, {}),
        ("one STOP two", {"stop": "STOP"}),
        ("one STO", {"stop": ["STOP", "x"]}),
    ],
)
async def test_streamed_reply_equals_the_whole_one(
    open_client: Open, text: str, options: dict[str, Any]
) -> None:
    client = open_client(text, text)
    whole = await create(client, **options)
    stream = client.chat.completions.stream(model="m", messages=[USER], **options)
    num_events = 0
    async with stream as events:
        async for _ in events:
            num_events += 1
        final = await events.get_final_completion()
    assert num_events > 3
    one, other = whole.choices[0], final.choices[0]
    assert (one.message.content or "") == (other.message.content or "")
    assert one.finish_reason == other.finish_reason
    calls = [
        [(c.function.name, c.function.arguments) for c in m.tool_calls or []]
        for m in (one.message, other.message)
    ]
    assert calls[0] == calls[1]
    first, second = client.interactions
    assert first.completion_ids == second.completion_ids
    assert second.status is InteractionStatus.COMPLETED


async def test_text_reaches_the_reader_before_the_reply_is_over(open_client: Open) -> None:
    client = open_client("The answer is forty two.")
    engine: Any = client.gateway.engine
    engine.gate, engine.gate_position = asyncio.Event(), 3
    stream = await create(client, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    assert client.interactions == ()
    await stream.close()
    assert engine.num_aborted == 1
    [left] = client.interactions
    assert left.status is InteractionStatus.CANCELLED


async def test_stream_reports_usage_and_records_before_the_end(open_client: Open) -> None:
    client = open_client("The answer")
    stream = await create(client, stream=True, stream_options={"include_usage": True})
    recorded_at_end = None
    usage = None
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].finish_reason:
            recorded_at_end = client.interactions[0].status
        usage = chunk.usage or usage
    assert recorded_at_end is InteractionStatus.COMPLETED
    [interaction] = client.interactions
    assert usage.completion_tokens == len(interaction.completion_ids)
    assert usage.prompt_tokens == len(interaction.prompt_ids)


async def test_request_parameters_reach_the_engine(open_client: Open) -> None:
    client = open_client("a", "b", sampling=Sampling(max_tokens=50, temperature=0.7))
    await create(client, temperature=0.2, top_p=0.5, max_completion_tokens=7, stop=["x"])
    await create(client, max_tokens=500)
    engine: Any = client.gateway.engine
    first, second = engine.samplings
    assert (first.temperature, first.top_p, first.max_tokens, first.stop) == (0.2, 0.5, 7, ("x",))
    assert (second.temperature, second.max_tokens) == (0.7, 50), "gconfig.max_tokens is a limit"


async def test_seeded_session_seeds_every_call_differently(open_client: Open) -> None:
    client = open_client("a", "b", "c", sampling=Sampling(seed=1))
    await create(client)
    await create(client, n=2)
    seeds = [s.seed for s in client.gateway.engine.samplings]  # type: ignore[attr-defined]
    assert None not in seeds
    assert len(set(seeds)) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineError("server died"), 503, "engine_error"),
        (EngineTimeoutError("took 600 s"), 504, "engine_timeout"),
        (ValueError("a bug"), 500, "gateway_error"),
    ],
)
async def test_errors_of_the_engine_have_status_and_are_not_retried(
    open_client: Open, error: Exception, status: int, code: str, stream: bool
) -> None:
    client = open_client(error, "second try")
    with pytest.raises(openai.APIStatusError) as caught:
        await create(client.with_options(max_retries=2), stream=stream)
    assert caught.value.status_code == status
    assert caught.value.code == code
    assert str(error) in caught.value.message
    [failed] = client.interactions
    assert failed.status is InteractionStatus.FAILED
    assert client.session.engine_error is (error if isinstance(error, EngineError) else None)


async def test_token_budget_limits_calls_then_refuses(open_client: Open) -> None:
    client = open_client("The answer", "b", budget=Budget(max_tokens=3))
    await create(client)
    [first] = client.gateway.engine.samplings  # type: ignore[attr-defined]
    assert first.max_tokens == 3
    assert len(client.interactions[0].completion_ids) == 3
    assert client.session.budget_exceeded is None
    with pytest.raises(openai.BadRequestError, match="max_tokens_per_trajectory = 3") as caught:
        await create(client)
    assert caught.value.code == "budget_exceeded"
    assert client.session.budget_exceeded == "rollout.max_tokens_per_trajectory = 3"
    assert len(client.interactions) == 1


async def test_a_key_opens_its_own_session_alone(open_client: Open) -> None:
    client = open_client("a", "b")
    gateway = client.gateway
    other = TrackingClient(gateway=gateway)
    await create(client)
    assert (len(client.interactions), len(other.interactions)) == (1, 0)
    await client.close()
    with pytest.raises(openai.AuthenticationError, match="opens no session"):
        await create(client)
    assert gateway.num_open_sessions == 1
    assert len(client.interactions) == 1, "records stay readable"
    key = other.session_key
    for wrong in ("sk-wrong", key[:-1], key + "x", "Ω"):
        headers = [(b"authorization", f"Bearer {wrong}".encode())]
        reply = await gateway.http_client.post("http://x.invalid/v1/responses", headers=headers)
        assert reply.status_code == 401


async def test_socket_serves_the_same_sessions(open_client: Open) -> None:
    client = open_client("over the wire", "streamed over the wire")
    base_url = await client.gateway.serve()
    assert base_url.startswith("http://127.0.0.1:")
    assert await client.gateway.serve() == base_url
    async with openai.AsyncOpenAI(base_url=base_url, api_key=client.session_key) as remote:
        reply = await create(remote)
        stream = await create(remote, stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
        [model] = (await remote.models.list()).data
    assert reply.choices[0].message.content == "over the wire"
    assert text == "streamed over the wire"
    assert model.id == "scripted"
    assert len(client.interactions) == 2


def test_answers_on_the_socket_do_not_wait_for_acknowledgements() -> None:
    # asyncio turns off Nagle's algorithm for sockets that name their protocol.
    with open_listener(0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


async def test_other_paths_are_404_and_the_served_ones_named(open_client: Open) -> None:
    client = open_client()
    headers = {"Authorization": f"Bearer {client.session_key}"}
    url = "http://x.invalid/v1/embeddings"
    reply = await client.gateway.http_client.post(url, headers=headers)
    assert (reply.status_code, "POST /v1/chat/completions" in reply.text) == (404, True)


async def test_one_engine_has_one_gateway(open_client: Open) -> None:
    gateway = open_client().gateway
    tokenizer = gateway.template.tokenizer
    one = TrackingClient(engine=gateway.engine, tokenizer=tokenizer)
    two = TrackingClient(engine=gateway.engine, tokenizer=tokenizer)
    assert one.gateway is two.gateway
    assert one.session_key != two.session_key
    await one.gateway.close()


@pytest.mark.parametrize("taker", [Gateway, TrackingClient])
def test_options_of_the_configuration_are_those_of_gateway_and_client(taker: Any) -> None:
    parameters = inspect.signature(taker).parameters
    for name, default in EngineConfig().list_reading_options().items():
        assert parameters[name].default == default


async def test_client_reads_by_the_parser_it_was_given(make_engine: Any, tokenizer: Any) -> None:
    options = {"engine": make_engine("[f(x=1)]"), "tokenizer": tokenizer}
    client = TrackingClient(tool_call_parser="pythonic", **options)
    [call] = (await create(client, tools=[TOOL])).choices[0].message.tool_calls
    assert call.function.arguments == '{"x": 1}'
    await client.gateway.close()
    with pytest.raises(UserInputError, match="did you mean 'hermes'"):
        TrackingClient(tool_call_parser="hermess", **options)
