"""The client of a vLLM server, against a server that makes faults (all else: tests/e2e/vllm)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.protocol import (
    UNKNOWN_VERSION,
    EngineServer,
    Generation,
    Sampling,
    ServerEndpoint,
    join_pieces,
)
from agentrl_cli.engine.vllm.vllm_server import VllmServer
from agentrl_cli.errors import (
    ContextLengthError,
    EngineError,
    EngineTimeoutError,
    ServerDownError,
    UserInputError,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CONFIG = EngineConfig(max_model_len=64, generate_timeout_seconds=5.0, publish_timeout_seconds=0.3)
ONE = Sampling(max_tokens=1)


class FaultyVllm:
    """Answers as vLLM does, save where a test says otherwise."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.requests: list[tuple[str, Any]] = []
        self.version = "7"
        self.models = ["m"]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.path, body))
        if request.path in self.handlers:
            return await self.handlers[request.path](request)
        if request.path == "/version":
            return web.json_response({"version": "0.32.0"})
        if request.path == "/weight_info":
            return web.json_response({"weight_version": self.version})
        if request.path == "/update_weight_version":
            self.version = body["new_version"]
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": name} for name in self.models]})
        if request.path == "/v1/load_lora_adapter":
            self.models.append(body["lora_name"])
            return web.Response(text="Success")
        if request.path == "/v1/unload_lora_adapter":
            self.models.remove(body["lora_name"])
        if request.path == "/inference/v1/generate":
            if "token_ids" not in body:
                return web.json_response({"error": {"message": "missing"}}, status=400)
            return await stream(request, make_piece([1, 2]), make_piece([3], self.version, 3))
        return web.json_response({})

    def bodies(self, path: str) -> list[Any]:
        return [body for where, body in self.requests if where == path]

    def answer(self, path: str, body: Any, status: int = 200) -> None:
        async def handler(request: web.Request) -> web.StreamResponse:
            return web.json_response(body, status=status)

        self.handlers[path] = handler


async def stream(request: web.Request, *events: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def make_piece(ids: list[int], version: str | None = None, end: int = 0) -> dict[str, Any]:
    """An event of /inference/v1/generate, the last one if it has a version."""
    content = [{"token_id": token, "logprob": -float(token)} for token in ids]
    choice: dict[str, Any] = {"token_ids": ids, "logprobs": {"content": content}}
    if version is not None:
        choice["finish_reason"] = "length"
        choice["weight_versions"] = [{"version": version, "start": 0, "end": end}]
    return {"choices": [choice]}


class TestedServer(VllmServer):
    """Gives completions as a whole, too."""

    __test__ = False

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        return join_pieces([piece async for piece in self.stream(prompt_ids, sampling)])


@pytest.fixture
async def vllm() -> FaultyVllm:
    return FaultyVllm()


@pytest.fixture
async def server(vllm: FaultyVllm, serve: Any, tmp_path: Path) -> AsyncIterator[TestedServer]:
    log = tmp_path / "vllm-0.log"
    log.write_text("the last words\n")
    url = await serve(vllm.handle)
    endpoint = ServerEndpoint(name="vllm-0", base_url=url, api_key="k", log_path=str(log))
    client = TestedServer(endpoint, CONFIG)
    yield client
    await client.close()


async def collect(server: TestedServer, sampling: Sampling = ONE) -> list[Generation]:
    return [piece async for piece in server.stream([5], sampling)]


async def test_it_is_an_engine_server(server: TestedServer) -> None:
    assert isinstance(server, EngineServer)
    assert server.name == "vllm-0"


async def test_a_completion_has_the_versions_of_all_its_tokens(server: TestedServer) -> None:
    first, last = await collect(server)
    assert (first.completion_ids, first.versions, first.finish_reason) == ((1, 2), (), None)
    assert (last.completion_ids, last.versions) == ((3,), (7, 7, 7))
    whole = await server.generate([5], ONE)
    assert whole.completion_ids == (1, 2, 3)
    assert whole.rollout_logprobs == (-1.0, -2.0, -3.0)
    assert (whole.versions, whole.finish_reason) == ((7, 7, 7), "length")


async def test_no_more_is_asked_for_than_there_is_room(
    server: TestedServer, vllm: FaultyVllm
) -> None:
    for max_tokens in (None, 100, 3):
        await server.generate([5] * 54, Sampling(max_tokens=max_tokens))
    bodies = vllm.bodies("/inference/v1/generate")
    assert [body["sampling_params"]["max_tokens"] for body in bodies] == [10, 10, 3]


async def test_what_cannot_be_served_is_not_sent(server: TestedServer, vllm: FaultyVllm) -> None:
    for ids, sampling in (([5] * 64, ONE), ([], ONE), ([5], Sampling(top_p=0))):
        with pytest.raises(EngineError):
            server.stream(ids, sampling)
    assert vllm.requests == []


async def test_the_version_is_asked_once_and_an_unknown_one_refused(
    server: TestedServer, vllm: FaultyVllm
) -> None:
    await asyncio.gather(server.check_health(), *(server.generate([5], ONE) for _ in range(5)))
    assert len(vllm.bodies("/version")) == 1
    other = TestedServer(server.endpoint, CONFIG)
    vllm.answer("/version", {"version": "0.29.1"})
    for call in (other.check_health(), other.generate([5], ONE)):
        with pytest.raises(UserInputError, match=r"vLLM 0\.29\.1 was found"):
            await call
    await other.close()


async def test_a_health_check_gives_the_version_and_asks_for_it_once(
    server: TestedServer, vllm: FaultyVllm
) -> None:
    vllm.version = "12"
    assert await server.check_health() == 12
    assert len(vllm.bodies("/weight_info")) == 1


async def test_a_server_whose_engine_died_is_down(server: TestedServer, vllm: FaultyVllm) -> None:
    await server.generate([5], ONE)
    said = {"error": {"message": "EngineCore encountered an issue. See stack trace", "code": 500}}
    vllm.answer("/inference/v1/generate", said, 500)
    vllm.answer("/pause", said, 500)
    vllm.answer("/health", {}, 503)
    for call in (server.generate([5], ONE), server.pause(), server.check_health()):
        with pytest.raises(ServerDownError, match="vllm-0"):
            await call


async def test_an_aborted_completion_may_be_finished_elsewhere(
    server: TestedServer, vllm: FaultyVllm
) -> None:
    await server.check_health()
    aborted = make_piece([3], "7", 3)
    aborted["choices"][0]["finish_reason"] = "abort"
    vllm.handlers["/inference/v1/generate"] = lambda r: stream(r, make_piece([1, 2]), aborted)
    pieces = server.stream([5], ONE)
    assert (await anext(pieces)).completion_ids == (1, 2)
    with pytest.raises(ServerDownError, match="aborted"):
        await anext(pieces)


async def test_weights_without_a_version_sample_nothing(
    server: TestedServer, vllm: FaultyVllm
) -> None:
    """As after the process was started again."""
    vllm.version = "default"
    assert await server.policy_version() == UNKNOWN_VERSION
    with pytest.raises(ServerDownError, match="no policy version"):
        await server.generate([5], ONE)


async def test_spans_that_do_not_fit_the_tokens_are_refused(
    server: TestedServer, vllm: FaultyVllm
) -> None:
    await server.check_health()
    vllm.handlers["/inference/v1/generate"] = lambda r: stream(r, make_piece([1, 2], "7", 3))
    with pytest.raises(EngineError, match=r"\(7: 0 to 3\) do not cover the 2 tokens"):
        await server.generate([5], ONE)


async def test_a_completion_without_an_end_is_no_completion(
    server: TestedServer, vllm: FaultyVllm
) -> None:
    await server.check_health()
    vllm.handlers["/inference/v1/generate"] = lambda r: stream(r, make_piece([1, 2]))
    with pytest.raises(ServerDownError, match="without a finish_reason"):
        await server.generate([5], ONE)


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError("nobody waits that long")


@pytest.mark.parametrize(
    ("path", "leg"),
    [
        ("/pause", "pause"),
        ("/resume", "resume"),
        ("/collective_rpc", "preparing to load weights"),
        ("/update_weight_version", "setting the policy version"),
        ("/weight_info", "asking for the policy version"),
        ("/v1/load_lora_adapter", "loading an adapter"),
    ],
)
async def test_every_leg_of_a_publication_has_a_deadline(
    server: TestedServer, vllm: FaultyVllm, path: str, leg: str, tmp_path: Path
) -> None:
    vllm.handlers[path] = hang
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "adapter_config.json").touch()
    legs: dict[str, Callable[[], Awaitable[object]]] = {
        "/pause": server.pause,
        "/resume": server.resume,
        "/collective_rpc": lambda: server.load_weights(tmp_path),
        "/update_weight_version": lambda: server.set_policy_version(1),
        "/weight_info": server.policy_version,
        "/v1/load_lora_adapter": lambda: server.load_adapter(tmp_path, 1),
    }
    with pytest.raises(EngineTimeoutError) as caught:
        await legs[path]()
    message = str(caught.value)
    assert message.startswith(f"{leg}: vllm-0 (http://127.0.0.1:")
    assert "within 0.3 s" in message
    assert message.endswith("\n  the last words")


@pytest.mark.parametrize(
    ("path", "how"),
    [
        ("/inference/v1/generate", "--enable-scale-out"),
        ("/pause", "VLLM_SERVER_DEV_MODE=1"),
        ("/v1/load_lora_adapter", "--enable-lora and the variable VLLM_ALLOW_RUNTIME_LORA"),
    ],
)
async def test_endpoints_that_are_not_open_are_named_with_what_opens_them(
    server: TestedServer, vllm: FaultyVllm, path: str, how: str, tmp_path: Path
) -> None:
    vllm.answer(path, {"detail": "Not Found"}, 404)
    (tmp_path / "adapter_config.json").touch()
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "/pause": server.pause,
        "/v1/load_lora_adapter": lambda: server.load_adapter(tmp_path, 1),
    }
    with pytest.raises(EngineError, match=f"Start the server with .*{how}"):
        await calls.get(path, lambda: server.generate([5], ONE))()


async def test_weights_are_read_from_a_folder_that_has_some(
    server: TestedServer, vllm: FaultyVllm, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=r"holds no \*\.safetensors"):
        await server.load_weights(tmp_path)
    assert vllm.requests == []
    (tmp_path / "model.safetensors").touch()
    await server.load_weights(tmp_path)
    prepare, load = vllm.bodies("/collective_rpc")
    assert prepare["kwargs"] == {"overrides": {"load_config": {"load_format": "auto"}}}
    assert load == {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}


async def test_adapters_carry_their_own_version_and_leave_when_nobody_uses_them(
    server: TestedServer, vllm: FaultyVllm, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").touch()
    vllm.models.append("agentrl-adapter-of-a-trainer-that-died")
    await server.load_adapter(tmp_path, 3)
    assert len(vllm.models) == 2
    pieces = server.stream([5], ONE)
    await anext(pieces)
    await server.load_adapter(tmp_path, 4)
    # The call in flight keeps its adapter loaded, and its version.
    assert len(vllm.models) == 3
    assert (await anext(pieces)).versions == (3, 3, 3)
    await pieces.aclose()
    assert (await server.generate([5], ONE)).versions == (4, 4, 4)
    asked = [body.get("model") for body in vllm.bodies("/inference/v1/generate")]
    assert [str(name).rpartition("-")[2] for name in asked] == ["v3", "v4"]
    await server.load_adapter(tmp_path, 4)
    assert len(vllm.models) == 2


async def test_an_adapter_waits_for_nobody_who_is_sampled_without_one(
    server: TestedServer, vllm: FaultyVllm, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").touch()
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 3}]
    last = make_piece([3], "7", 3)
    last["choices"][0]["weight_versions"] = spans
    vllm.handlers["/inference/v1/generate"] = lambda r: stream(r, make_piece([1, 2]), last)
    pieces = server.stream([5], ONE)
    await anext(pieces)
    with pytest.raises(EngineError, match="1 calls without one are in flight on vllm-0"):
        await server.load_adapter(tmp_path, 8)
    assert (await anext(pieces)).versions == (7, 8, 8)
    await pieces.aclose()
    await server.load_adapter(tmp_path, 8)
    assert (await server.generate([5], ONE)).versions == (8, 8, 8)


async def test_a_server_with_less_room_than_configured_says_so(
    server: TestedServer, vllm: FaultyVllm
) -> None:
    await server.check_health()
    said = "The decoder prompt (length 40) is longer than the maximum model length of 32. Make"
    vllm.handlers["/inference/v1/generate"] = lambda r: stream(r, {"error": {"message": said}})
    with pytest.raises(ContextLengthError, match="40 tokens"):
        await server.generate([5] * 40, ONE)
    vllm.answer("/inference/v1/generate", {"error": {"message": said}}, 400)
    with pytest.raises(ContextLengthError, match="40 tokens"):
        await server.score([5] * 40, 1)


async def test_answers_that_are_no_json_objects_are_shown(
    server: TestedServer, vllm: FaultyVllm
) -> None:
    for body in (["x"], "y"):
        vllm.answer("/weight_info", body)
        with pytest.raises(EngineError, match="no JSON object"):
            await server.policy_version()
    vllm.answer("/weight_info", {})
    with pytest.raises(EngineError, match="None"):
        await server.policy_version()
