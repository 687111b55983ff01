"""Servers that make faults, for the clients of servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.engine_server import EngineServer
from agentrl_cli.engine.protocol import Generation, Sampling, ServerEndpoint, join_pieces
from agentrl_cli.engine.sglang.sglang_server import SglangServer
from agentrl_cli.engine.vllm.vllm_server import GENERATE_PATH, VllmServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CONFIG = EngineConfig(max_model_len=64, generate_timeout_seconds=5.0, publish_timeout_seconds=0.3)


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError("nobody waits that long")


class FaultyServer:
    """Answers as a server of its kind does, save where a test says otherwise."""

    hang = staticmethod(hang)

    def __init__(self, kind: str) -> None:
        self.is_vllm = kind == "vllm"
        self.generate_path = GENERATE_PATH if self.is_vllm else "/generate"
        self.version_path = "/weight_info" if self.is_vllm else "/model_info"
        self.adapters_path = "/v1" if self.is_vllm else ""
        self.answers: dict[str, Handler | Any] = {}
        self.asked: list[tuple[str, Any]] = []
        self.version = "7"
        self.models = ["m"]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer secret-key"
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.path, body))
        answer = self.answers.get(request.path)
        if answer is None:
            answer = self._answer(request.path, body)
        return await answer(request) if callable(answer) else web.json_response(answer)

    def _answer(self, path: str, body: Any) -> Any:
        if path == self.version_path:
            return {"weight_version": self.version}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/v1/models":
            return {"data": [{"id": name} for name in self.models]}
        if path == f"{self.adapters_path}/load_lora_adapter":
            self.models.append(body["lora_name"])
        if path == f"{self.adapters_path}/unload_lora_adapter":
            self.models.remove(body["lora_name"])
        if path == self.generate_path:
            return self.stream(*self.make_pieces([1, 2], [3]))
        return {}

    def bodies(self, path: str | None = None) -> list[Any]:
        path = path or self.generate_path
        return [body for where, body in self.asked if where == path]

    def make_pieces(self, *pieces: list[int], reason: Any = "length", **last: Any) -> list[Any]:
        """The events of a completion, of which the last one has a reason to end and ``last``."""
        events, num_tokens = [], 0
        for ids in pieces:
            num_tokens += len(ids)
            pairs = [(token, -float(token)) for token in ids]
            if self.is_vllm:
                content = [{"token_id": token, "logprob": x} for token, x in pairs]
                piece = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": None}
                events.append({"choices": [piece]})
            else:
                piece = {"completion_tokens": num_tokens, "finish_reason": None}
                piece["output_token_logprobs"] = [[x, token, None] for token, x in pairs]
                events.append({"output_ids": ids, "meta_info": piece})
        piece["weight_versions"] = [{"version": self.version, "start": 0, "end": num_tokens}]
        is_named = self.is_vllm or reason is None
        piece["finish_reason"] = reason if is_named else {"type": reason, "matched": None}
        piece.update(last)
        return events

    @staticmethod
    def stream(*events: Any, then: str = "end") -> Handler:
        """Streams the events, and then ends or breaks the connection."""

        async def handle(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for event in events:
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if then == "break":
                assert request.transport is not None
                request.transport.abort()
            await response.write(b"data: [DONE]\n\n")
            return response

        return handle


@pytest.fixture
def kind() -> str:
    """Of the server; modules and tests have others."""
    return "vllm"


@pytest.fixture
async def faulty(kind: str) -> FaultyServer:
    return FaultyServer(kind)


@pytest.fixture
async def server(faulty: FaultyServer, kind: str, tmp_path: Path) -> AsyncIterator[EngineServer]:
    """A client of the faulty server."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", faulty.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    log = tmp_path / "server.log"
    log.write_text("the last words with secret-key\n")
    endpoint = ServerEndpoint(
        name=f"{kind}-0",
        base_url=f"http://127.0.0.1:{runner.addresses[0][1]}",
        api_key="secret-key",
        log_path=str(log),
    )
    client = (VllmServer if kind == "vllm" else SglangServer)(endpoint, CONFIG)
    yield client
    await client.close()
    await runner.cleanup()


@pytest.fixture
def generate(server: EngineServer) -> Callable[..., Awaitable[Generation]]:
    """A completion as a whole: ``await generate([5], top_p=0.9)``."""

    async def sample(prompt_ids: Sequence[int] = (5,), **sampling: Any) -> Generation:
        return join_pieces(
            [piece async for piece in server.stream(prompt_ids, Sampling(**sampling))]
        )

    return sample
