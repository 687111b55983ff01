"""What a gateway does not take: too much at once, strangers' keys, pickles."""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import EngineError, UserInputError
from agentrl_cli.records import InteractionStatus, StopReason
from agentrl_cli.tracking import gateway as gateway_module
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway import Limits
from agentrl_cli.tracking.gateway_socket import check_binding
from agentrl_cli.tracking.session import Budget

Open = Callable[..., TrackingClient]
USER: Any = {"role": "user", "content": "hi"}
REPLY: Any = {"role": "assistant", "content": "hello"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": [USER]},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": [USER]},
}
EVERY_PATH = pytest.mark.parametrize("path", list(BODIES))
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def post(client: TrackingClient, path: str, body: Any, key: str | None = None) -> Any:
    return client.gateway.http_client.post(
        f"http://x.invalid{path}",
        content=body if isinstance(body, bytes) else json.dumps(body),
        headers={"Authorization": f"Bearer {key or client.session_key}"},
    )


def read_message(reply: Any) -> str:
    return str(reply.json()["error"]["message"])


def limit(client: TrackingClient, **limits: int) -> None:
    client.gateway.limits = Limits(**limits)


@EVERY_PATH
async def test_large_bodies_and_long_conversations_are_413(open_client: Open, path: str) -> None:
    client = open_client("never")
    limit(client, max_body_bytes=1000, max_messages=3)
    reply = await post(client, path, {**BODIES[path], "user": "x" * 2000})
    assert (reply.status_code, read_message(reply)) == (413, "the body is larger than 1000 bytes")
    key = "input" if path.endswith("responses") else "messages"
    reply = await post(client, path, {**BODIES[path], key: [USER, REPLY, USER, REPLY, USER]})
    assert reply.status_code == 413
    assert "has 5 messages; allowed are 3" in read_message(reply)
    assert client.interactions == ()


async def test_a_body_that_does_not_say_its_length_is_413_too(
    open_client: Open,
) -> None:
    client = open_client("never")
    limit(client, max_body_bytes=1000)
    url = f"{await client.gateway.serve()}/chat/completions"

    async def send_pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b" " * 400

    headers = {"Authorization": f"Bearer {client.session_key}"}
    async with httpx2.AsyncClient() as http:
        reply = await http.post(url, content=send_pieces(), headers=headers)
    assert "content-length" not in reply.request.headers
    assert (reply.status_code, read_message(reply)) == (413, "the body is larger than 1000 bytes")


@EVERY_PATH
async def test_too_many_calls_at_once_are_429_and_may_be_repeated(
    open_client: Open, path: str
) -> None:
    client = open_client("one", "two", "three")
    other = TrackingClient(gateway=client.gateway)
    engine: Any = client.gateway.engine
    engine.gate = asyncio.Event()
    limit(client, max_session_calls=2, max_calls=2)
    running = [asyncio.create_task(post(client, path, BODIES[path])) for _ in range(2)]
    await asyncio.sleep(0.05)
    for asking, message in ((client, "this session has 2 calls in flight"), (other, "2 calls are")):
        reply = await post(asking, path, BODIES[path])
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert "x-should-retry" not in reply.headers
        assert message in read_message(reply)
    engine.gate.set()
    assert [r.status_code for r in await asyncio.gather(*running)] == [200, 200]
    assert (await post(other, path, BODIES[path])).status_code == 200
    await other.close()


@EVERY_PATH
@STREAMED
async def test_every_budget_says_so_in_every_protocol(
    open_client: Open, path: str, stream: bool
) -> None:
    budgets = {
        "rollout.max_turns = 0": (Budget(max_turns=0), StopReason.MAX_TURNS),
        "rollout.max_tokens_per_trajectory = 0": (Budget(max_tokens=0), StopReason.MAX_TOKENS),
        "rollout.timeout_seconds = 0": (Budget(max_seconds=0.0), StopReason.MAX_SECONDS),
    }
    for named, (budget, reason) in budgets.items():
        client = open_client("never", budget=budget)
        reply = await post(client, path, {**BODIES[path], "stream": stream})
        assert (reply.status_code, reply.headers["x-should-retry"]) == (400, "false")
        assert named in read_message(reply)
        assert client.session.stop_reason is reason
        assert client.interactions == ()


@EVERY_PATH
@STREAMED
async def test_the_end_of_the_time_ends_a_call_in_flight(
    open_client: Open, path: str, stream: bool
) -> None:
    client = open_client("The answer is forty two.", budget=Budget(max_seconds=0.2))
    engine: Any = client.gateway.engine
    engine.gate, engine.gate_position = asyncio.Event(), 2
    reply = await post(client, path, {**BODIES[path], "stream": stream})
    assert reply.status_code == (200 if stream else 400)
    assert "rollout.timeout_seconds = 0.2" in reply.text
    [interaction] = client.interactions
    assert interaction.status is InteractionStatus.CANCELLED
    assert client.session.stop_reason is StopReason.MAX_SECONDS
    assert client.export_interactions() == {}
    assert engine.num_aborted == 1


@STREAMED
async def test_calls_at_the_same_time_do_not_overspend_the_tokens(
    open_client: Open, stream: bool
) -> None:
    sampling, budget = Sampling(max_tokens=4), Budget(max_tokens=11)
    client = open_client("a", "b", "c", EngineError("died"), sampling=sampling, budget=budget)
    engine: Any = client.gateway.engine
    engine.gate = asyncio.Event()
    path, *_ = BODIES
    body = {**BODIES[path], "stream": stream}
    running = [asyncio.create_task(post(client, path, body)) for _ in range(3)]
    await asyncio.sleep(0.05)
    # 4 + 4 are spoken for: the third call waits, rather than be cut to 3.
    assert [s.max_tokens for s in engine.samplings] == [4, 4]
    engine.gate.set()
    assert [r.status_code for r in await asyncio.gather(*running)] == [200] * 3
    assert [s.max_tokens for s in engine.samplings] == [4] * 3
    # Each took 2. What fails gives back what it was to have.
    assert (await post(client, path, body)).status_code == 503
    assert engine.samplings[-1].max_tokens == 4
    assert client.session.stop_reason is None
    # Who waits can be cancelled, and is not on record.
    engine.gate, engine.script = asyncio.Event(), ["d", "e"]
    running = [asyncio.create_task(post(client, path, body)) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert len(engine.samplings) == 5
    await client.close()
    assert [r.status_code for r in await asyncio.gather(*running)] == [401] * 2
    assert len(client.interactions) == 5


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" * 100_000, "nested too deep"),
        (b'{"messages": NaN}', "NaN is not JSON"),
        (b'{"a": 1e999}', "the number 1e999 is too large"),
        (b'{"a": 1.5}{', "not JSON"),
        (b"\xff\xfe\xfa", "not JSON"),
        (b"", "not JSON"),
    ],
)
@EVERY_PATH
async def test_no_body_breaks_the_gateway(
    open_client: Open, path: str, body: bytes, message: str
) -> None:
    reply = await post(open_client("never"), path, body)
    assert (reply.status_code, message in read_message(reply)) == (400, True), reply.text


@pytest.mark.parametrize(
    ("host", "key", "message"),
    [
        ("127.0.0.1", None, None),
        ("127.8.8.8", None, None),
        ("localhost", None, None),
        ("::1", None, None),
        ("0.0.0.0", "k" * 16, None),
        ("0.0.0.0", None, "lets other machines in"),
        ("::", None, "lets other machines in"),
        ("10.0.0.5", None, "lets other machines in"),
        ("gpu-box", None, "lets other machines in"),
        ("127.0.0.1", "k" * 15, "has 15 characters"),
    ],
)
def test_other_machines_need_a_chosen_key(host: str, key: str | None, message: str | None) -> None:
    if message is None:
        check_binding(host, key, "--host")
        return
    with pytest.raises(UserInputError, match=message):
        check_binding(host, key, "--host")


async def test_a_session_that_serves_for_ever_forgets(open_client: Open) -> None:
    client = open_client(*"abcdefg", max_kept=3)
    messages: list[Any] = []
    for number in range(7):
        messages.append(USER)
        reply = await client.chat.completions.create(model="m", messages=messages)
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        assert len(client.interactions) <= 3
        assert reply.choices[0].message.content == "abcdefg"[number]
    assert client.interactions[0].messages == tuple(messages[:-1])


@pytest.mark.slow
def test_nothing_is_unpickled_where_sockets_are_read() -> None:
    folder = Path(gateway_module.__file__).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found = {n.split(".")[0] for n in names}
            assert not found & {"pickle", "shelve", "cloudpickle", "dill"}, path
            # What marshal writes is only compared.
            assert "marshal.load" not in path.read_text(), path
