"""A vLLM server as the router sees it: :class:`EngineServer` over vLLM's own endpoints."""

from __future__ import annotations

import asyncio
import base64
import itertools
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.lora_adapters import LoraAdapter, LoraAdapters
from agentrl_cli.engine.protocol import (
    UNKNOWN_VERSION,
    Generation,
    Sampling,
    ServerEndpoint,
    check_request,
    check_score,
)
from agentrl_cli.engine.server_http import HttpStatusError, Method, ServerHttp
from agentrl_cli.engine.vllm.vllm_wire import (
    GENERATE_PATH,
    GivenUpError,
    check_vllm_version,
    expand_spans,
    find_meaning,
    format_generate,
    format_score,
    is_greedy,
    parse_object,
    parse_piece,
    parse_score,
    parse_version,
)
from agentrl_cli.errors import EngineError

#: A server on a busy core answers late.
_HEALTH_SECONDS = 10.0
#: Endpoints that vLLM opens only on request.
_HOW_TO_OPEN = {
    GENERATE_PATH: "--enable-scale-out",
    "/v1/load_lora_adapter": "--enable-lora and the variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
    "/v1/unload_lora_adapter": "--enable-lora and the variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
}
_OPEN_FOR_TRAINING = "the variable VLLM_SERVER_DEV_MODE=1"


class CacheSalts:
    """The salts of a server's requests, all of whose weight changes go through this one client.

    Keys and values that old weights made must not serve new ones. vLLM keeps them apart by a
    salt, which is therefore another one after every change; a policy version alone would not
    do, as a trainer that resumes may publish the same number again with other weights.
    """

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._num_changes = 0
        self._is_changing = False

    def begin_change(self) -> None:
        """The weights may change from now on, until :meth:`end_change`."""
        self._num_changes += 1
        self._is_changing = True

    def end_change(self) -> None:
        """The weights stay as they are."""
        self._is_changing = False

    def make(self) -> str:
        """The salt of a request sent now."""
        salt = f"{self._nonce}-{self._num_changes}"
        # A call sent during a change may start with the old weights and continue with the new
        # ones: it shares its cache with no other call.
        return f"{salt}-{next(self._numbers)}" if self._is_changing else f"{salt}-settled"


class VllmServer:
    """A client of one vLLM server; see :class:`~agentrl_cli.engine.protocol.EngineServer`.

    Lives on one event loop. The server may die and be restarted meanwhile.
    """

    def __init__(self, endpoint: ServerEndpoint, config: EngineConfig) -> None:
        self._endpoint = endpoint
        self._config = config
        self._http = ServerHttp(endpoint)
        self._salts = CacheSalts()
        self._adapters = LoraAdapters()
        self._checking = asyncio.Lock()
        self._is_supported = False

    @property
    def name(self) -> str:
        """What the logs call it."""
        return self._endpoint.name

    @property
    def endpoint(self) -> ServerEndpoint:
        """Where it listens."""
        return self._endpoint

    def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stream_interval: int = 1,
    ) -> AsyncGenerator[Generation]:
        """Samples one completion piece by piece; what cannot be served is refused at once."""
        check_request(prompt_ids, sampling, self._config.max_model_len)
        return self._stream(prompt_ids, sampling, stream_interval)

    async def _stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, stream_interval: int
    ) -> AsyncGenerator[Generation]:
        room = self._config.max_model_len - len(prompt_ids)
        with self._vllm_errors("generate", GENERATE_PATH):
            await self._check_version()
            with self._adapters.hold() as adapter:
                body = format_generate(
                    prompt_ids,
                    sampling,
                    max_tokens=min(room, sampling.max_tokens or room),
                    cache_salt=self._salts.make(),
                    adapter=adapter.name if adapter else None,
                    stream_interval=stream_interval,
                )
                greedy, num_top = is_greedy(sampling), sampling.num_top_logprobs
                num_tokens, last = 0, None
                events = self._http.stream_events(GENERATE_PATH, body, leg="generate")
                async with aclosing(events):
                    async for event in events:
                        piece, spans = parse_piece(event, greedy=greedy, num_top=num_top)
                        num_tokens += len(piece.completion_ids)
                        if piece.finish_reason is None:
                            yield piece
                        else:
                            last = piece
                # Only now: a consumer leaves with the last piece, and a connection that was not
                # read to its end cannot be used again.
                if last is None:
                    raise GivenUpError("it ended a completion without a finish_reason")
                if adapter is not None:
                    versions = (adapter.version,) * num_tokens
                else:
                    versions = expand_spans(spans, num_tokens)
                if UNKNOWN_VERSION in versions:
                    raise GivenUpError(
                        "its weights have no policy version: it was restarted and waits for the "
                        "current ones, or it was never given one"
                    )
                yield replace(last, versions=versions)

    async def score(self, token_ids: Sequence[int], start: int) -> list[float]:
        """Logprobs (nats, temperature 1) of the tokens from position ``start`` on."""
        check_score(token_ids, start, self._config.max_model_len)
        with self._vllm_errors("score", GENERATE_PATH), self._adapters.hold() as adapter:
            body = format_score(token_ids, self._salts.make(), adapter.name if adapter else None)
            limit = self._config.generate_timeout_seconds
            reply = await self._http.request(
                "POST", GENERATE_PATH, body, leg="score", timeout_seconds=limit
            )
        return parse_score(reply, token_ids, start)

    async def check_health(self) -> int:
        """Its policy version, if it can serve and is a supported vLLM."""
        # The first is answered by the process that listens, the second by the one that computes.
        _, weight_info = [await self._get(path) for path in ("/health", "/weight_info")]
        await self._check_version()
        return parse_version(parse_object(weight_info).get("weight_version"))

    async def _get(self, path: str) -> bytes:
        return await self._http.request(
            "GET", path, leg="health check", timeout_seconds=_HEALTH_SECONDS
        )

    async def _check_version(self) -> None:
        """Refuses a vLLM that is not supported; asks once.

        Raises:
            UserInputError: found, supported, and what to type.
        """
        if self._is_supported:
            return
        async with self._checking:
            if not self._is_supported:
                reply = await self._get("/version")
                check_vllm_version(str(parse_object(reply).get("version", "")))
                self._is_supported = True

    async def policy_version(self) -> int:
        """The version of its weights that the server reports; UNKNOWN_VERSION: never set."""
        reply = await self._ask("GET", "/weight_info", leg="asking for the policy version")
        return parse_version(parse_object(reply).get("weight_version"))

    async def pause(self) -> None:
        """Freezes calls in flight and holds new ones.

        What the frozen calls have computed is dropped: they compute it again when they continue,
        so that each of their tokens is sampled by the weights of its version alone.
        """
        self._salts.begin_change()
        try:
            await self._ask("POST", "/pause?mode=keep&clear_cache=true", leg="pause")
        except BaseException:
            self._salts.end_change()
            raise

    async def resume(self) -> None:
        """Lets calls continue."""
        await self._ask("POST", "/resume", leg="resume")
        self._salts.end_change()

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
        self._adapters.current = LoraAdapter(name, version)
        models = await self._ask("GET", "/v1/models", leg="listing adapters")
        loaded = [str(model.get("id")) for model in parse_object(models).get("data", [])]
        for unused in self._adapters.find_unused(loaded):
            body = {"lora_name": unused}
            await self._ask("POST", "/v1/unload_lora_adapter", body, leg="unloading an adapter")

    async def join_broadcast(self, unique_id: bytes, world_size: int) -> None:
        """Makes the server's workers enter the trainer's NCCL group, as ranks 1 and up."""
        info = {
            "rank_offset": 1,
            "world_size": world_size,
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode("ascii"),
            # One broadcast for each tensor: nothing to agree on but names, types and shapes.
            "packed": False,
        }
        body, leg = {"init_info": info}, "entering the NCCL group"
        await self._ask("POST", "/init_weight_transfer_engine", body, leg=leg)

    async def receive_broadcast(
        self, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> None:
        """Takes one broadcast for each tensor; see :class:`BroadcastReceiver`."""
        info = {
            "names": list(names),
            "dtype_names": list(dtype_names),
            "shapes": [list(shape) for shape in shapes],
        }
        await self._ask("POST", "/start_weight_update", {}, leg="beginning a weight update")
        await self._ask("POST", "/update_weights", {"update_info": info}, leg="receiving weights")
        # The version is set by itself, as in every kind of transfer.
        await self._ask("POST", "/finish_weight_update", {}, leg="finishing a weight update")

    async def set_policy_version(self, version: int) -> None:
        """Names the version of the weights; tokens sampled from now on carry it."""
        body = {"new_version": str(version)}
        await self._ask("POST", "/update_weight_version", body, leg="setting the policy version")

    async def sleep(self) -> None:
        """Moves weights to the CPU and drops keys and values, once no call needs them."""
        limit = self._config.generate_timeout_seconds + self._config.publish_timeout_seconds
        path = "/sleep?level=1&mode=wait"
        await self._ask("POST", path, leg="making room for the trainer", timeout_seconds=limit)

    async def wake(self) -> None:
        """Takes the memory back and continues, with the weights from before."""
        await self._ask("POST", "/wake_up", leg="taking the memory back")

    async def close(self) -> None:
        """Closes the connections; the process is not touched."""
        await self._http.close()

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

    @contextmanager
    def _vllm_errors(self, leg: str, path: str) -> Iterator[None]:
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
            if error.status == 404 and error.server_message == "Not Found":
                how = _HOW_TO_OPEN.get(path, _OPEN_FOR_TRAINING)
                raise EngineError(f"{error}. Start the server with {how}") from None
            raise


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
