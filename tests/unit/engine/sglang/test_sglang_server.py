"""The SGLang client against a server that misbehaves; no SGLang is behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
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
from agentrl_cli.engine.sglang import sglang_server as sglang
from agentrl_cli.engine.sglang.sglang_server import SglangServer
from agentrl_cli.engine.sglang.sglang_wire import (
    GenerationReader,
    check_sglang_version,
    parse_scores,
    parse_version,
)
from agentrl_cli.errors import (
    ContextLengthError,
    EngineError,
    EngineTimeoutError,
    ServerDownError,
    UserInputError,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Faulty:
    """A server whose endpoints do what a test says, and keep what they were asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answers: dict[str, Handler | dict[str, Any]] = {
            "/server_info": {"version": "0.5.23"},
            "/model_info": {"weight_version": "default"},
            "/health_generate": {},
            "/v1/models": {"data": []},
        }

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer secret-key"
        body = await request.read()
        self.asked.append((request.path, json.loads(body) if body else None))
        answer = self.answers.get(request.path, {"success": True})
        return web.json_response(answer) if isinstance(answer, dict) else await answer(request)

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


@pytest.fixture
async def faulty() -> Faulty:
    return Faulty()


@pytest.fixture
async def server(faulty: Faulty, serve: Any, tmp_path: Path) -> AsyncIterator[SglangServer]:
    log = tmp_path / "sglang-0.log"
    log.write_text("loading\nlast words with secret-key\n")
    url = await serve(faulty.handle)
    client = SglangServer(
        ServerEndpoint(name="sglang-0", base_url=url, api_key="secret-key", log_path=str(log)),
        EngineConfig(kind="sglang", max_model_len=16, generate_timeout_seconds=0.5),
    )
    yield client
    await client.close()


def reply(ids: list[int], *, finish: dict[str, Any] | None, **meta: Any) -> dict[str, Any]:
    return {
        "output_ids": ids,
        "meta_info": {
            "completion_tokens": len(ids),
            "output_token_logprobs": [[-0.5, token_id, None] for token_id in ids],
            "finish_reason": finish,
            "weight_versions": [{"version": "3", "start": 0, "end": len(ids)}],
            **meta,
        },
    }


STOP = {"type": "stop", "matched": 2}


def events(*items: dict[str, Any] | str, then: str = "end") -> Handler:
    """A handler that streams the items, then ends, breaks the connection, or hangs."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for item in items:
            data = item if isinstance(item, str) else json.dumps(item)
            await response.write(f"data: {data}\n\n".encode())
        if then == "break":
            assert request.transport is not None
            request.transport.abort()
        if then == "hang":
            await asyncio.sleep(60)
        return response

    return handle


async def collect(
    server: SglangServer,
    prompt_ids: Sequence[int] = (1, 2),
    sampling: Sampling | None = None,
    **kwargs: Any,
) -> Generation:
    async with aclosing(server.stream(prompt_ids, sampling or Sampling(), **kwargs)) as stream:
        return join_pieces([piece async for piece in stream])


def test_it_is_an_engine_server(server: SglangServer) -> None:
    assert isinstance(server, EngineServer)


async def test_a_server_that_dies_in_a_stream_is_told_from_one_that_refuses(
    server: SglangServer, faulty: Faulty
) -> None:
    first = reply([5], finish=None)
    faulty.answers["/generate"] = events(first, then="break")
    with pytest.raises(ServerDownError, match="sglang-0"):
        await collect(server)
    faulty.answers["/generate"] = events(
        first, {"error": {"message": "no such adapter", "code": 400}}, "[DONE]"
    )
    with pytest.raises(EngineError, match="no such adapter") as caught:
        await collect(server)
    assert not isinstance(caught.value, ServerDownError)


async def test_a_stream_must_say_how_it_ended(server: SglangServer, faulty: Faulty) -> None:
    faulty.answers["/generate"] = events(reply([5], finish=None), "[DONE]")
    with pytest.raises(EngineError, match="without saying why"):
        await collect(server)


async def test_a_short_call_is_not_streamed(server: SglangServer, faulty: Faulty) -> None:
    """It comes in one piece anyway; faulty answers as JSON where it has no handler."""
    faulty.answers["/generate"] = reply([5, 2], finish=STOP)
    [piece] = [p async for p in server.stream([1], Sampling(max_tokens=2), stream_interval=2)]
    assert (piece.completion_ids, piece.finish_reason) == ((5, 2), "stop")
    [(_, body)] = [asked for asked in faulty.asked if asked[0] == "/generate"]
    assert "stream" not in body


async def test_what_was_streamed_before_an_abort_is_kept(
    server: SglangServer, faulty: Faulty
) -> None:
    abort = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    faulty.answers["/generate"] = events(
        reply([5, 6], finish=None), reply([5, 6], finish=abort), "[DONE]"
    )
    async with aclosing(server.stream([1, 2], Sampling(), stream_interval=2)) as stream:
        assert (await anext(stream)).completion_ids == (5, 6)
        with pytest.raises(ServerDownError, match="Aborted"):
            await anext(stream)


async def test_a_call_that_sglang_cannot_serve_is_not_tried_elsewhere(
    server: SglangServer, faulty: Faulty
) -> None:
    abort = {"type": "abort", "message": "Sampling support exceeds", "status_code": 400}
    faulty.answers["/generate"] = events(reply([], finish=abort), "[DONE]")
    with pytest.raises(EngineError, match="Sampling support exceeds") as caught:
        await collect(server)
    assert not isinstance(caught.value, ServerDownError)


async def test_closing_the_stream_closes_the_connection(
    server: SglangServer, faulty: Faulty
) -> None:
    hears = asyncio.Event()
    stream_and_hang = events(reply([5], finish=None), then="hang")

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await stream_and_hang(request)
        except asyncio.CancelledError:
            hears.set()
            raise

    faulty.answers["/generate"] = handle
    async with aclosing(server.stream([1, 2], Sampling())) as stream:
        assert (await anext(stream)).completion_ids == (5,)
    async with asyncio.timeout(5):
        await hears.wait()


async def test_a_failed_update_is_an_error_though_the_status_says_200(
    server: SglangServer, faulty: Faulty
) -> None:
    faulty.answers["/update_weights_from_disk"] = {"success": False, "message": "bad file"}
    with pytest.raises(EngineError, match="load weights: sglang-0 says: bad file"):
        await server.load_weights(Path("/nowhere"))


async def test_a_prompt_without_room_is_refused_before_it_is_sent(
    server: SglangServer, faulty: Faulty
) -> None:
    with pytest.raises(ContextLengthError):
        await collect(server, [1] * 16)
    assert faulty.asked == []


async def test_a_call_asks_for_no_more_than_there_is_room(
    server: SglangServer, faulty: Faulty
) -> None:
    faulty.answers["/generate"] = reply([5, 2], finish=STOP)
    generation = await collect(server, [1] * 10, Sampling(max_tokens=50))
    assert faulty.asked[0][1]["sampling_params"]["max_new_tokens"] == 6
    assert generation.completion_ids == (5, 2)
    assert generation.versions == (3, 3)


async def test_a_server_that_nobody_versioned_says_so(server: SglangServer, faulty: Faulty) -> None:
    assert await server.policy_version() == UNKNOWN_VERSION
    faulty.answers["/model_info"] = {"weight_version": "12"}
    assert await server.policy_version() == 12


async def test_a_health_check_gives_the_version_and_asks_for_it_once(
    server: SglangServer, faulty: Faulty
) -> None:
    faulty.answers["/model_info"] = {"weight_version": "12"}
    assert await server.check_health() == 12
    assert faulty.paths().count("/model_info") == 1


async def test_an_unsupported_sglang_is_refused_with_what_to_type(
    server: SglangServer, faulty: Faulty
) -> None:
    faulty.answers["/server_info"] = {"version": "0.4.9"}
    with pytest.raises(UserInputError, match=r"0\.4\.9.*supports SGLang >=0\.5\.23.*pip install"):
        await server.check_health()


async def test_health_is_not_asked_for_a_token_that_a_pause_holds_back(
    server: SglangServer, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "_HEALTH_SECONDS", 0.2)

    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    faulty.answers["/health_generate"] = hang
    with pytest.raises(EngineTimeoutError, match="health check"):
        await server.check_health()
    checking = asyncio.create_task(server.check_health())
    await asyncio.sleep(0.05)
    await server.pause()
    await checking
    faulty.asked.clear()
    await server.check_health()
    assert "/health_generate" not in faulty.paths()
    await server.resume()
    with pytest.raises(EngineTimeoutError):
        await server.check_health()


async def test_calls_in_flight_keep_their_adapter_and_its_version(
    server: SglangServer, faulty: Faulty
) -> None:
    """SGLang waits for an adapter's calls before it drops it: asked in a pause, for ever."""
    await server.load_adapter(Path("/a/4"), 4)
    [(_, loaded)] = [item for item in faulty.asked if item[0] == "/load_lora_adapter"]
    release = asyncio.Event()

    async def slowly(request: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.json_response(reply([5, 2], finish=STOP))

    faulty.answers["/generate"] = slowly
    call = asyncio.create_task(collect(server))
    while "/generate" not in faulty.paths():
        await asyncio.sleep(0.01)
    cards = ["m", loaded["lora_name"], "agentrl-adapter-of-a-trainer-that-died", "theirs"]
    faulty.answers["/v1/models"] = {"data": [{"id": card} for card in cards]}
    faulty.asked.clear()
    await server.load_adapter(Path("/a/5"), 5)
    dropped = [body["lora_name"] for path, body in faulty.asked if path == "/unload_lora_adapter"]
    assert dropped == ["agentrl-adapter-of-a-trainer-that-died"]
    release.set()
    assert (await call).versions == (4, 4)
    assert (await collect(server)).versions == (5, 5)
    faulty.asked.clear()
    await server.load_adapter(Path("/a/6"), 6)
    assert ("/unload_lora_adapter", {"lora_name": loaded["lora_name"]}) in faulty.asked


async def test_an_adapter_that_cannot_be_dropped_costs_memory_and_nothing_else(
    server: SglangServer, faulty: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    faulty.answers["/v1/models"] = {"data": [{"id": "agentrl-adapter-1-0"}]}
    faulty.answers["/unload_lora_adapter"] = {"success": False, "error_message": "in use"}
    await server.load_adapter(Path("/a/4"), 4)
    assert "in use" in caplog.text


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ({"completion_tokens": 3}, "3 new tokens"),
        ({"output_token_logprobs": [[-0.5, 5, None], [-0.5, 9, None]]}, "other tokens"),
        ({"output_token_logprobs": [[None, 5, None], [-0.5, 2, None]]}, "logprob is None"),
        ({"weight_versions": [{"version": "3", "start": 1, "end": 2}]}, "gap"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 1}]}, "of 1 tokens for 2"),
        ({"weight_versions": None}, "something else"),
    ],
)
def test_a_reply_that_does_not_add_up_is_refused(broken: dict[str, Any], problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        GenerationReader("sglang-0", Sampling()).read(reply([5, 2], finish=STOP, **broken))


@pytest.mark.parametrize("temperature", [0.0, 1e-7])
def test_greedy_tokens_have_logprob_zero(temperature: float) -> None:
    read = GenerationReader("sglang-0", Sampling(temperature=temperature)).read
    assert read(reply([5, 2], finish=STOP)).rollout_logprobs == (0.0, 0.0)


def test_with_top_p_the_logprobs_are_those_after_it() -> None:
    masked = reply([5, 2], finish=STOP, output_token_sampling_logprobs=[-0.1, -0.2])
    read = GenerationReader("sglang-0", Sampling(top_p=0.9)).read
    assert read(masked).rollout_logprobs == (-0.1, -0.2)


def test_scores_skip_the_entry_before_the_first() -> None:
    # Of SGLang's own making: the entry at logprob_start_len has no logprob.
    entries = [[None, 6, None], [-1.5, 7, None], [-2.5, 8, None]]
    answer = {"meta_info": {"input_token_logprobs": entries}}
    assert parse_scores(answer, 2, server="sglang-0") == [-1.5, -2.5]
    with pytest.raises(EngineError, match="2 logprobs of a prompt, not 3"):
        parse_scores(answer, 3, server="sglang-0")
    with pytest.raises(EngineError, match="something else"):
        parse_scores({"meta_info": {}}, 2, server="sglang-0")


@pytest.mark.parametrize("start", [0, 3])
async def test_only_tokens_after_the_first_have_a_score(
    start: int, server: SglangServer, faulty: Faulty
) -> None:
    with pytest.raises(EngineError, match=f"score from position {start} of 2 tokens"):
        await server.score([5, 6], start)
    assert faulty.asked == []


@pytest.mark.parametrize("version", ["0.5.22", "0.6.0", "1.5.23", "", "None"])
def test_other_versions_are_not_supported(version: str) -> None:
    with pytest.raises(UserInputError, match=r">=0\.5\.23,<0\.6"):
        check_sglang_version(version)


def test_later_versions_of_the_series_are_supported() -> None:
    check_sglang_version("0.5.23")
    check_sglang_version("0.5.30.post1")


@pytest.mark.parametrize(("text", "version"), [("7", 7), ("default", -1), (None, -1)])
def test_a_version_is_a_number_or_unknown(text: str | None, version: int) -> None:
    assert parse_version(text) == version
