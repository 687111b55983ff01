"""An SGLang server as the router sees it: :class:`EngineServer` over SGLang's own endpoints.

Written from the source of SGLang 0.5.23, whose request and reply classes hold it in the tests,
and tried against that version's own HTTP application with a stand-in for what lies behind it.
It has never spoken to an SGLang that computes, which needs a GPU.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.lora_adapters import LoraAdapter, LoraAdapters
from agentrl_cli.engine.protocol import (
    Generation,
    Sampling,
    ServerEndpoint,
    check_request,
    check_score,
)
from agentrl_cli.engine.server_http import ServerHttp
from agentrl_cli.engine.sglang.sglang_wire import (
    PAUSE,
    GenerationReader,
    check_sglang_version,
    find_message,
    format_adapter,
    format_generate,
    format_score,
    format_version,
    format_weights,
    parse_model_names,
    parse_scores,
    parse_version,
)
from agentrl_cli.errors import EngineError, ServerDownError
from agentrl_cli.log import get_logger

_logger = get_logger(__name__)

#: Of one request that only changes a flag.
_ADMIN_SECONDS = 30.0
#: ``/health_generate`` answers after one second, or as soon after as a token was made.
_HEALTH_SECONDS = 10.0


class SglangServer:
    """A client of one SGLang server, used on one event loop.

    A call is aborted by closing its connection; SGLang looks for that every few seconds.

    Args:
        endpoint: where it listens.
        config: lengths and deadlines.
    """

    def __init__(self, endpoint: ServerEndpoint, config: EngineConfig) -> None:
        self._endpoint = endpoint
        self._config = config
        self._http = ServerHttp(endpoint)
        self._is_paused = False
        self._is_supported = False
        self._adapters = LoraAdapters()

    @property
    def name(self) -> str:
        """Such as ``sglang-0``."""
        return self._endpoint.name

    @property
    def endpoint(self) -> ServerEndpoint:
        """Where it listens."""
        return self._endpoint

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stream_interval: int = 1,
    ) -> AsyncGenerator[Generation]:
        """Samples one completion in pieces; see :class:`EngineServer`."""
        check_request(prompt_ids, sampling, self._config.max_model_len)
        with self._adapters.hold() as adapter:
            # A call keeps its adapter to its end, so the adapter's version is that of all its
            # tokens; the server's own answer would name the newest.
            reader = GenerationReader(self.name, sampling, adapter.version if adapter else None)
            body = format_generate(
                prompt_ids,
                sampling,
                max_model_len=self._config.max_model_len,
                adapter=adapter.name if adapter else None,
                stream_interval=stream_interval,
            )
            events = self._http.stream_events("/generate", body, leg="generate")
            last: Generation | None = None
            async with aclosing(events):
                async for event in events:
                    last = reader.read(_parse_event(event, self.name))
                    if last.finish_reason is None:
                        yield last
            # Only now: a consumer leaves with the last piece, and a connection that was not read
            # to its end cannot be used again.
            if last is None or last.finish_reason is None:
                raise EngineError(f"{self.name} ended a completion without saying why")
            yield last

    async def score(self, token_ids: Sequence[int], start: int) -> list[float]:
        """Logprobs (nats, temperature 1) of the tokens from position ``start`` on."""
        check_score(token_ids, start, self._config.max_model_len)
        with self._adapters.hold() as adapter:
            reply = await self._http.request_json(
                "POST",
                "/generate",
                format_score(token_ids, start, adapter=adapter.name if adapter else None),
                leg="score",
                timeout_seconds=self._config.generate_timeout_seconds,
            )
        return parse_scores(reply, len(token_ids) - start, server=self.name)

    async def policy_version(self) -> int:
        """The version of the weights that the server reports."""
        return await self._ask_version("policy version")

    async def check_health(self) -> int:
        """The version of its weights, if the server is able to serve.

        Raises:
            UserInputError: its SGLang is not supported.
        """
        try:
            if not self._is_supported:
                reply = await self._get("/server_info", "health check")
                version = reply.get("version") if isinstance(reply, dict) else None
                check_sglang_version(str(version))
                self._is_supported = True
            try:
                if not self._is_paused:
                    await self._http.request(
                        "GET",
                        "/health_generate",
                        leg="health check",
                        timeout_seconds=_HEALTH_SECONDS,
                    )
            except EngineError:
                # A pause that began meanwhile delays the token.
                if not self._is_paused:
                    raise
            return await self._ask_version("health check")
        except ServerDownError:
            # The process that comes after it is not paused, and may be another SGLang.
            self._is_paused = self._is_supported = False
            raise

    async def _ask_version(self, leg: str) -> int:
        reply = await self._get("/model_info", leg)
        if not isinstance(reply, dict) or "weight_version" not in reply:
            raise EngineError(f"{self.name} does not say which weights it holds: {reply}")
        return parse_version(reply["weight_version"])

    async def pause(self) -> None:
        """Freezes calls in flight and holds new ones.

        What calls in flight have computed is dropped: they compute it again when they continue,
        so that their next tokens are of the new weights alone.
        """
        self._is_paused = True
        try:
            await self._post("/pause_generation", PAUSE, "pause")
        except EngineError:
            self._is_paused = False
            raise

    async def resume(self) -> None:
        """Lets calls continue."""
        await self._post("/continue_generation", {}, "resume")
        self._is_paused = False

    async def load_weights(self, folder: Path) -> None:
        """Reads all weights from the safetensors files of ``folder``; calls must be paused.

        Which weights SGLang holds after a failure is not certain: its way back reads the same
        folder again.
        """
        await self._post(
            "/update_weights_from_disk",
            format_weights(folder),
            "load weights",
            self._config.publish_timeout_seconds,
        )

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Serves the peft adapter in ``folder`` from now on.

        Older ones go as soon as no call is sampled with them any more.
        """
        adapter = LoraAdapter(self._adapters.name_next(version), version)
        await self._post(
            "/load_lora_adapter",
            format_adapter(adapter.name, folder),
            "load adapter",
            self._config.publish_timeout_seconds,
        )
        self._adapters.current = adapter
        await self._drop_adapters()

    async def _drop_adapters(self) -> None:
        """Unloads adapters that no call uses, those of an earlier trainer among them."""
        try:
            loaded = parse_model_names(await self._get("/v1/models", "list adapters"))
            # SGLang waits for calls that use one, and those wait for the end of the pause.
            for name in self._adapters.find_unused(loaded):
                await self._post("/unload_lora_adapter", {"lora_name": name}, "drop adapter")
        except ServerDownError:
            raise
        except EngineError as error:
            # It takes memory, no more; the next version tries again.
            _logger.warning("an old adapter stays loaded: %s", error)

    async def set_policy_version(self, version: int) -> None:
        """Names the version of the weights; tokens sampled from now on carry it."""
        await self._post("/update_weight_version", format_version(version), "set policy version")

    async def sleep(self) -> None:
        """Refuses: SGLang frees memory only when it has no call, not even a waiting one.

        Raises:
            EngineError: always.
        """
        raise EngineError(
            f"{self.name} shares a GPU with the trainer, which agentrl does with vLLM only. Give "
            "the trainer a GPU of its own, or type engine.kind=vllm"
        )

    async def wake(self) -> None:
        """Does nothing: it never gave up its memory."""

    async def close(self) -> None:
        """Closes the connections; the process is not touched."""
        await self._http.close()

    async def _get(self, path: str, leg: str) -> Any:
        return await self._http.request_json("GET", path, leg=leg, timeout_seconds=_ADMIN_SECONDS)

    async def _post(
        self, path: str, body: dict[str, Any], leg: str, timeout_seconds: float = _ADMIN_SECONDS
    ) -> None:
        reply = await self._http.request_json(
            "POST", path, body, leg=leg, timeout_seconds=timeout_seconds
        )
        if isinstance(reply, dict) and reply.get("success") is False:
            raise EngineError(f"{leg}: {self.name} says: {find_message(reply)}")


def _parse_event(event: bytes, server: str) -> dict[str, Any]:
    try:
        reply = json.loads(event)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        raise EngineError(f"{server} streamed something that is no JSON object: {event[:300]!r}")
    return reply
