"""A vLLM server as the router sees it: :class:`EngineServer` over vLLM's own endpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

from agentrl_cli.config.engine import EngineConfig
from agentrl_cli.engine.adapters import Adapter, Adapters
from agentrl_cli.engine.http import HttpStatusError, Method, ServerHttp, shorten
from agentrl_cli.engine.protocol import Generation, Sampling
from agentrl_cli.engine.request_check import check_request, check_score
from agentrl_cli.engine.server import ServerEndpoint
from agentrl_cli.engine.vllm_broadcast import join_broadcast, receive_broadcast
from agentrl_cli.engine.vllm_calls import GENERATE_LEG, VllmCalls
from agentrl_cli.engine.vllm_replies import (
    GivenUpError,
    find_meaning,
    parse_score,
    parse_version,
)
from agentrl_cli.engine.vllm_version import check_vllm_version
from agentrl_cli.engine.vllm_weights import WeightState
from agentrl_cli.engine.vllm_wire import (
    COMPLETIONS_PATH,
    GENERATE_PATH,
    format_score,
    format_score_completion,
)
from agentrl_cli.errors import EngineError
from agentrl_cli.log import get_logger

_log = get_logger(__name__)

#: A server on a busy core answers late; one that died is found out by its process.
_HEALTH_SECONDS = 10.0
#: Endpoints that vLLM has only when it is told to.
_HOW_TO_OPEN = {
    "/v1/load_lora_adapter": "--enable-lora and the variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
    "/v1/unload_lora_adapter": "--enable-lora and the variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
}
_OPEN_FOR_TRAINING = "the variable VLLM_SERVER_DEV_MODE=1"


class VllmServer:
    """A client of one vLLM server; see :class:`~agentrl_cli.engine.server.EngineServer`.

    Lives on one event loop. The server may die and be started again meanwhile.
    """

    def __init__(self, endpoint: ServerEndpoint, config: EngineConfig, *, model_name: str) -> None:
        self._endpoint = endpoint
        self._config = config
        self._model_name = model_name
        self._http = ServerHttp(endpoint)
        self._weights = WeightState()
        self._adapters = Adapters()
        self._calls = VllmCalls(self._http, self._weights, self._adapters, self.policy_version)
        self._connecting = asyncio.Lock()
        self._knows_versions: bool | None = None
        """Whether it has /inference/v1/generate; None: not asked yet."""

    @property
    def name(self) -> str:
        """What the logs call it."""
        return self._endpoint.name

    @property
    def endpoint(self) -> ServerEndpoint:
        """Where it listens."""
        return self._endpoint

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self._model_name

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> Generation:
        """Samples one completion within ``engine.generate_timeout_seconds``."""
        limit = self._config.generate_timeout_seconds
        ids: list[int] = []
        logprobs: list[float] = []
        tops: list[tuple[tuple[int, float], ...]] = []
        stream = self.stream(
            prompt_ids, sampling, session_id=session_id, stream_interval=self._config.max_model_len
        )
        try:
            async with asyncio.timeout(limit), aclosing(stream) as pieces:
                async for piece in pieces:
                    ids += piece.completion_ids
                    logprobs += piece.rollout_logprobs
                    tops += piece.top_logprobs
        except TimeoutError:
            raise self._http.timed_out(GENERATE_LEG, limit) from None
        return Generation(
            completion_ids=tuple(ids),
            rollout_logprobs=tuple(logprobs),
            versions=piece.versions,
            finish_reason=piece.finish_reason,
            stop_text=piece.stop_text,
            top_logprobs=tuple(tops),
        )

    def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session_id: str = "",
        stream_interval: int = 1,
    ) -> AsyncGenerator[Generation]:
        """Samples one completion piece by piece; what cannot be served is refused at once."""
        check_request(prompt_ids, sampling, self._config.max_model_len)
        return self._stream(prompt_ids, sampling, stream_interval)

    async def _stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, stream_interval: int
    ) -> AsyncGenerator[Generation]:
        room = self._config.max_model_len - len(prompt_ids)
        max_tokens = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        with self._vllm_errors(GENERATE_LEG):
            is_new = await self._connect()
            make = self._calls.stream_versioned if is_new else self._calls.stream_unversioned
            async with aclosing(make(prompt_ids, sampling, max_tokens, stream_interval)) as pieces:
                async for piece in pieces:
                    yield piece

    async def score(self, token_ids: Sequence[int], start: int) -> list[float]:
        """Logprobs (nats, temperature 1) of the tokens from position ``start`` on."""
        check_score(token_ids, start, self._config.max_model_len)
        with self._vllm_errors("score"), self._adapters.hold() as adapter:
            is_new = await self._connect()
            path = GENERATE_PATH if is_new else COMPLETIONS_PATH
            make = format_score if is_new else format_score_completion
            body = make(token_ids, self._weights.make_salt(), adapter.name if adapter else None)
            limit = self._config.generate_timeout_seconds
            reply = await self._http.request("POST", path, body, leg="score", timeout_seconds=limit)
        return parse_score(reply, token_ids, start)

    async def check_health(self) -> int:
        """Its policy version, if it can serve and is a vLLM that this version knows."""
        # The first is answered by the process that listens, the second by the one that computes.
        _, weight_info = [
            await self._http.request(
                "GET", path, leg="health check", timeout_seconds=_HEALTH_SECONDS
            )
            for path in ("/health", "/weight_info")
        ]
        await self._connect()
        return _read_version(weight_info)

    async def policy_version(self) -> int:
        """The version that the server says its weights have; UNKNOWN_VERSION: never set."""
        reply = await self._ask("GET", "/weight_info", leg="asking for the policy version")
        return _read_version(reply)

    async def pause(self) -> None:
        """Freezes calls in flight and holds new ones.

        What the frozen calls have computed is dropped: they compute it anew when they go on,
        so that each of their tokens is sampled by the weights of its version alone.
        """
        self._weights.begin_change()
        try:
            await self._ask("POST", "/pause?mode=keep&clear_cache=true", leg="pause")
        except BaseException:
            self._weights.end_change()
            raise

    async def resume(self) -> None:
        """Lets them go on."""
        await self._ask("POST", "/resume", leg="resume")
        self._weights.end_change()

    async def load_weights(self, folder: Path) -> None:
        """Reads all weights from the safetensors files of ``folder``; calls must be paused.

        A server that failed in it has lost its weights: its next completion kills it, unless
        another load succeeds before.
        """
        path = _find_files(folder, "*.safetensors")
        # A server that started with weights of its own making refuses to read others.
        overrides = {"load_config": {"load_format": "auto"}}
        config = {"method": "update_config", "kwargs": {"overrides": overrides}}
        await self._ask("POST", "/collective_rpc", config, leg="preparing to load weights")
        load = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._ask("POST", "/collective_rpc", load, leg="loading weights")
        self._weights.epoch += 1

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Serves the peft adapter in ``folder`` from now on, as ``version``.

        Calls in flight stay with the adapter they began with. One that no call uses any more
        is unloaded.
        """
        if self._adapters.num_base_calls:
            # Measured on 0.32 for CPU: in one batch with calls of an adapter, those of none are
            # computed with it too, and are off by nats.
            raise EngineError(
                f"loading an adapter: {self._adapters.num_base_calls} calls without one are in "
                f"flight on {self.name}, which vLLM would compute wrongly beside it. Publish the "
                "first adapter before the first call"
            )
        name = self._adapters.name_next(version)
        body = {"lora_name": name, "lora_path": _find_files(folder, "adapter_config.json")}
        await self._ask("POST", "/v1/load_lora_adapter", body, leg="loading an adapter")
        self._adapters.current = Adapter(name, version)
        models = await self._ask("GET", "/v1/models", leg="listing adapters")
        loaded = [str(model.get("id")) for model in _read(models).get("data", [])]
        for unused in self._adapters.find_unused(loaded):
            body = {"lora_name": unused}
            await self._ask("POST", "/v1/unload_lora_adapter", body, leg="unloading an adapter")

    async def join_broadcast(self, unique_id: bytes, world_size: int) -> None:
        """Enters the NCCL group of ``unique_id``; see :class:`BroadcastReceiver`."""
        await join_broadcast(self._post_leg, unique_id, world_size)

    async def receive_broadcast(
        self, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> None:
        """Takes one broadcast for each tensor; see :class:`BroadcastReceiver`."""
        await receive_broadcast(self._post_leg, names, dtype_names, shapes)
        self._weights.epoch += 1

    async def set_policy_version(self, version: int) -> None:
        """Says which version the weights are; tokens sampled from now on carry it."""
        body = {"new_version": str(version)}
        await self._ask("POST", "/update_weight_version", body, leg="setting the policy version")

    async def sleep(self) -> None:
        """Moves weights to the CPU and drops keys and values, once no call needs them."""
        limit = self._config.generate_timeout_seconds + self._config.publish_timeout_seconds
        path = "/sleep?level=1&mode=wait"
        await self._ask("POST", path, leg="making room for the trainer", timeout_seconds=limit)

    async def wake(self) -> None:
        """Takes the memory back and goes on, with the weights from before."""
        await self._ask("POST", "/wake_up", leg="taking the memory back")

    async def close(self) -> None:
        """Closes the connections; the process is not touched."""
        await self._http.close()

    async def _connect(self) -> bool:
        """Whether the server has /inference/v1/generate; asked once, with its version."""
        if self._knows_versions is not None:
            return self._knows_versions
        async with self._connecting:
            if self._knows_versions is None:
                reply = await self._http.request(
                    "GET", "/version", leg="version check", timeout_seconds=_HEALTH_SECONDS
                )
                check_vllm_version(str(_read(reply).get("version", "")))
                self._knows_versions = await self._has_generate()
            return self._knows_versions

    async def _has_generate(self) -> bool:
        try:
            # Not a valid request: where the endpoint is, it says so.
            await self._http.request(
                "POST",
                GENERATE_PATH,
                {},
                leg="asking for endpoints",
                timeout_seconds=_HEALTH_SECONDS,
            )
        except HttpStatusError as error:
            if error.status == 404:
                _log.warning(
                    "%s lacks %s (start it with --enable-scale-out): using %s, which is slower "
                    "around weight updates",
                    *(self.name, GENERATE_PATH, COMPLETIONS_PATH),
                )
                return False
            if error.status not in (400, 422):
                raise
        return True

    async def _ask(
        self,
        method: Method,
        path: str,
        body: object = None,
        *,
        leg: str,
        timeout_seconds: float | None = None,
    ) -> bytes:
        """One leg of an update, within ``engine.publish_timeout_seconds`` if not said otherwise."""
        limit = timeout_seconds or self._config.publish_timeout_seconds
        with self._vllm_errors(leg, path):
            return await self._http.request(method, path, body, leg=leg, timeout_seconds=limit)

    async def _post_leg(self, path: str, body: object, leg: str) -> bytes:
        return await self._ask("POST", path, body, leg=leg)

    @contextmanager
    def _vllm_errors(self, leg: str, path: str = "") -> Iterator[None]:
        """Raises what an error of vLLM means."""
        try:
            yield
        except GivenUpError as error:
            raise self._http.went_down(leg, str(error)) from None
        except HttpStatusError as error:
            meaning = find_meaning(error.server_message)
            if isinstance(meaning, GivenUpError):
                raise self._http.went_down(leg, str(meaning)) from None
            if meaning is not None:
                raise meaning from None
            if path and error.status == 404 and error.server_message == "Not Found":
                how = _HOW_TO_OPEN.get(path, _OPEN_FOR_TRAINING)
                raise EngineError(f"{error}. Start the server with {how}") from None
            raise


def _read(reply: bytes) -> dict[str, Any]:
    """The JSON object of a reply.

    Raises:
        EngineError: it is something else.
    """
    try:
        parsed = json.loads(reply)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise EngineError(f"vLLM sent something that is no JSON object: {shorten(reply)}")
    return parsed


def _read_version(weight_info: bytes) -> int:
    return parse_version(_read(weight_info).get("weight_version"))


def _find_files(folder: Path, pattern: str) -> str:
    """The absolute path of a folder that holds a file like ``pattern``.

    Raises:
        EngineError: it holds none. vLLM would lose the weights it has in trying to read them.
    """
    if not any(folder.glob(pattern)):
        raise EngineError(
            f"no weights to load: {folder} holds no {pattern}. Trainer and servers need a folder "
            "that all of them see: engine.weight_transfer.dir=PATH"
        )
    return str(folder.absolute())
