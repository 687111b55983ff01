"""The gateway as its clients see it: the official SDK, in process and over a socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import EngineError, EngineTimeoutError
from agentrl_cli.records import InteractionStatus
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway import get_gateway
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


async def test_logprobs_are_those_of_the_engine(open_client: Open) -> None:
    client = open_client("The answer", "The answer")
    completion = await create(client, logprobs=True)
    [interaction] = client.interactions
    content = completion.choices[0].logprobs.content
    assert tuple(t.logprob for t in content) == interaction.rollout_logprobs
    streamed = [
        t.logprob
        async for chunk in await create(client, logprobs=True, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for t in choice.logprobs.content
    ]
    assert tuple(streamed) == interaction.rollout_logprobs


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0..role is 'robot'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "text parts only",
        ),
        ({"temperature": 11}, "temperature must be from 0 to 10"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"max_tokens": 0}, "max_tokens must be a whole number"),
        ({"n": 0}, "n must be a whole number"),
        ({"stop": [""]}, "none of them empty"),
        ({"tools": [{"type": "web_search"}]}, "built-in tools"),
        ({"tool_choice": "required"}, "no tools are given"),
        ({"frequency_penalty": 0.5}, "frequency_penalty = 0.5 is not supported"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"extra_body": {"temprature": 1}}, "did you mean 'temperature'"),
        ({"response_format": {"type": "xml"}}, "allowed: text, json_object, json_schema"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(
    open_client: Open, options: dict[str, Any], message: str
) -> None:
    client = open_client("never")
    with pytest.raises(openai.BadRequestError, match=message):
        await create(client, **options)
    assert client.interactions == ()


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


@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_prompt_has_openais_code(open_client: Open, stream: bool) -> None:
    client = open_client(max_model_len=5)
    with pytest.raises(openai.BadRequestError) as caught:
        await create(client, stream=stream)
    assert caught.value.code == "context_length_exceeded"


async def test_turn_budget_refuses_further_calls(open_client: Open) -> None:
    client = open_client("a", "b", "c", budget=Budget(max_turns=2))
    await create(client)
    await create(client)
    assert client.session.budget_exceeded is None
    with pytest.raises(openai.BadRequestError, match="max_turns = 2") as caught:
        await create(client)
    assert caught.value.code == "budget_exceeded"
    assert client.session.budget_exceeded == "rollout.max_turns = 2"
    assert len(client.interactions) == 2


async def test_token_budget_limits_calls_then_refuses(open_client: Open) -> None:
    client = open_client("The answer", "b", budget=Budget(max_tokens=3))
    await create(client)
    [first] = client.gateway.engine.samplings  # type: ignore[attr-defined]
    assert first.max_tokens == 3
    assert len(client.interactions[0].completion_ids) == 3
    with pytest.raises(openai.BadRequestError, match="max_tokens_per_trajectory = 3"):
        await create(client)


async def test_a_key_opens_its_own_session_alone(open_client: Open) -> None:
    client = open_client("a", "b")
    gateway = client.gateway
    other = TrackingClient(gateway=gateway)
    await create(client)
    assert (len(client.interactions), len(other.interactions)) == (1, 0)
    stranger = openai.AsyncOpenAI(
        api_key="sk-wrong", base_url="http://x.invalid/v1", http_client=gateway.http_client
    )
    with pytest.raises(openai.AuthenticationError, match="opens no session"):
        await create(stranger)
    await client.close()
    with pytest.raises(openai.AuthenticationError):
        await create(client)
    assert gateway.num_open_sessions == 1
    assert len(client.interactions) == 1, "records stay readable"


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


async def test_answers_on_the_socket_do_not_wait_for_acknowledgements(
    open_client: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_options: list[tuple[int, ...]] = []
    original = socket.socket.setsockopt

    def record(connection: socket.socket, *option: Any) -> None:
        set_options.append(option)
        original(connection, *option)

    client = open_client("a")
    base_url = await client.gateway.serve()
    monkeypatch.setattr(socket.socket, "setsockopt", record)

    def ask() -> bytes:
        # A plain socket sets no option itself: what is recorded is the server's.
        with socket.create_connection(("127.0.0.1", int(base_url.split(":")[2][:-3]))) as plain:
            plain.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return plain.recv(100)

    assert b"401" in await asyncio.to_thread(ask)
    assert (socket.IPPROTO_TCP, socket.TCP_NODELAY, True) in set_options


async def test_hanging_up_on_the_socket_aborts_the_call(open_client: Open) -> None:
    client = open_client("never read")
    engine: Any = client.gateway.engine
    engine.gate = asyncio.Event()
    base_url = await client.gateway.serve()
    async with httpx2.AsyncClient() as http:
        with pytest.raises(httpx2.ReadTimeout):
            await http.post(
                f"{base_url}/chat/completions",
                json={"model": "m", "messages": [USER]},
                headers={"Authorization": f"Bearer {client.session_key}"},
                timeout=0.3,
            )
    for _ in range(200):
        if client.interactions:
            break
        await asyncio.sleep(0.01)
    assert client.interactions[0].status is InteractionStatus.CANCELLED
    assert engine.num_aborted == 1


async def test_bodies_that_are_no_json_get_a_400(open_client: Open) -> None:
    client = open_client()
    headers = {"Authorization": f"Bearer {client.session_key}"}
    http = client.gateway.http_client
    url = "http://x.invalid/v1/chat/completions"
    reply = await http.post(url, content=b"{", headers=headers)
    assert (reply.status_code, "not JSON" in reply.text) == (400, True)
    reply = await http.post(url, content=b"[]", headers=headers)
    assert (reply.status_code, "JSON object" in reply.text) == (400, True)
    reply = await http.post("http://x.invalid/v1/embeddings", headers=headers)
    assert reply.status_code == 404
    assert "POST /v1/chat/completions" in reply.text


async def test_copies_of_the_client_share_its_session(open_client: Open) -> None:
    client = open_client("a")
    copied = client.with_options(timeout=3.0)
    assert isinstance(copied, TrackingClient)
    await create(copied)
    assert len(client.interactions) == 1


async def test_one_engine_has_one_gateway(open_client: Open) -> None:
    gateway = open_client().gateway
    tokenizer = gateway.template.tokenizer
    one = TrackingClient(engine=gateway.engine, tokenizer=tokenizer)
    two = TrackingClient(engine=gateway.engine, tokenizer=tokenizer)
    assert one.gateway is two.gateway is get_gateway(gateway.engine, tokenizer)
    assert one.session_key != two.session_key
    await one.gateway.close()


async def test_many_sessions_do_not_mix(open_client: Open) -> None:
    client = open_client(*[lambda prompt: prompt.split("user\n")[1].split("<|im_end|>")[0]] * 300)
    gateway = client.gateway

    async def run(number: int) -> None:
        mine = TrackingClient(gateway=gateway)
        message: Any = {"role": "user", "content": f"I am {number}"}
        messages = [message]
        for _ in range(3):
            reply = (await create(mine, messages=messages)).choices[0].message
            assert reply.content == f"I am {number}"
            messages += [reply.model_dump(exclude_none=True), message]
        assert len(mine.interactions) == 3
        assert len(mine.export_interactions()) == 1
        await mine.close()

    await asyncio.gather(*(run(n) for n in range(100)))
    assert gateway.num_open_sessions == 1
