"""A client of a vLLM server.

Completions come from ``/inference/v1/generate``: token ids both ways, and the weight version of
every token.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.engine_server import EngineServer, LoraAdapter
from agentrl_cli.engine.protocol import Generation, Sampling, ServerEndpoint
from agentrl_cli.errors import EngineError, ServerDownError

GENERATE_PATH = "/inference/v1/generate"


class VllmServer(EngineServer):
    """A client of one vLLM server, which takes broadcasts (:class:`BroadcastReceiver`) too."""

    _GENERATE_PATH = GENERATE_PATH
    _HEALTH_PATH = "/health"
    _VERSION_PATH = "/weight_info"
    _ADAPTERS_PATH = "/v1"
    _GREEDY_BELOW = 1e-5
    _LOAD_METRICS: ClassVar[Mapping[str, str]] = {
        "num_running": "vllm:num_requests_running",
        "num_waiting": "vllm:num_requests_waiting",
        "cache_use": "vllm:kv_cache_usage_perc",
    }

    def __init__(self, endpoint: ServerEndpoint, config: EngineConfig) -> None:
        super().__init__(endpoint, config)
        self._salt: str | None = secrets.token_hex(8)
        """Keeps what old weights have cached from calls of new ones, by being another one after
        every change (a policy version would not do: a trainer that resumes may publish the same
        number again with other weights). None while the weights change."""

    def _make_salt(self) -> str:
        # A call sent during a change may start with the old weights and continue with the new
        # ones: it shares its cache with no other call.
        return self._salt or secrets.token_hex(8)

    @property
    def cache_salt(self) -> str | None:
        return self._salt

    def take_cache_salt(self, salt: str | None) -> None:
        self._salt = salt

    def _format_generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        adapter: LoraAdapter | None,
        stream_interval: int,
    ) -> dict[str, Any]:
        stop = [text for text in sampling.stop if text]
        params: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": 0.0 if self._is_greedy(sampling) else sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "seed": sampling.seed,
            # The sampled token is counted among them, wherever it ranks.
            "logprobs": sampling.num_top_logprobs + 1 if sampling.num_top_logprobs else 0,
            "stream_interval": stream_interval,
            # Text is made only where it is looked at: it costs the server as much as the rest.
            "detokenize": bool(stop),
        }
        if stop:
            # A stop text may be spelled by special tokens, such as an end tag of a template.
            params |= {"stop": stop, "skip_special_tokens": False}
        body = self._format_body(prompt_ids, params, adapter)
        body["stream"] = stream_interval < max_tokens
        body["priority"] = sampling.priority
        if sampling.structural_tag is not None:
            params["structured_outputs"] = {"structural_tag": sampling.structural_tag}
            # The tag itself says where reasoning may stand; a reasoning parser must not bypass it.
            body["reasoning_ended"] = True
        return body

    def _format_body(
        self, token_ids: Sequence[int], params: dict[str, Any], adapter: LoraAdapter | None
    ) -> dict[str, Any]:
        body = {
            "token_ids": list(token_ids),
            "sampling_params": params,
            "cache_salt": self._make_salt(),
        }
        return body if adapter is None else {**body, "model": adapter.name}

    def _read_piece(
        self, reply: dict[str, Any], sampling: Sampling, num_before: int
    ) -> tuple[Generation, Any]:
        [choice] = reply["choices"]
        content = (choice.get("logprobs") or {}).get("content") or []
        if [item["token_id"] for item in content] != choice["token_ids"]:
            raise ValueError("logprobs of other tokens than those sampled")
        reason = choice.get("finish_reason")
        if reason == "abort":
            raise ServerDownError(f"{self.name} aborted the completion")
        # The sampled token is among its likeliest, wherever it ranks.
        tops = [
            [(top["token_id"], top["logprob"]) for top in item["top_logprobs"]]
            for item in content
            if sampling.num_top_logprobs
        ]
        logprobs = [item["logprob"] for item in content]
        stop = choice.get("stop_reason")
        piece = self._build_piece(sampling, choice["token_ids"], logprobs, tops, reason, stop)
        return piece, choice.get("weight_versions")

    async def pause(self) -> None:
        self._salt = None
        try:
            await self._ask("POST", "/pause?mode=keep&clear_cache=true", leg="pause")
        except BaseException:
            self._salt = secrets.token_hex(8)
            raise

    async def resume(self) -> None:
        await self._ask("POST", "/resume", leg="resume")
        self._salt = secrets.token_hex(8)

    async def load_weights(self, folder: Path) -> None:
        # A server that started with weights of its own making refuses to read others.
        overrides = {"load_config": {"load_format": "auto"}}
        config = {"method": "update_config", "kwargs": {"overrides": overrides}}
        await self._ask("POST", "/collective_rpc", config, leg="preparing to load weights")
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._ask("POST", "/collective_rpc", load, leg="loading weights")

    async def load_adapter(self, folder: Path, version: int) -> None:
        """See :class:`EngineServer`.

        Raises:
            EngineError: also where calls without an adapter are in flight.
        """
        num_base_calls = self._num_calls[None]
        if num_base_calls:
            # Measured on 0.32 for CPU: in one batch with calls of an adapter, those of none are
            # computed with it too, and are off by nats.
            raise EngineError(
                f"loading an adapter: {num_base_calls} calls without one are in flight on "
                f"{self.name}, which vLLM would compute wrongly beside it. Publish the first "
                "adapter before the first call"
            )
        await super().load_adapter(folder, version)

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
        """Takes one broadcast for each tensor, in this order, as its new weights."""
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
        body = {"new_version": str(version)}
        await self._ask("POST", "/update_weight_version", body, leg="setting the policy version")

    async def sleep(self) -> None:
        """Moves weights to the CPU and drops keys and values, once no call needs them."""
        limit = self._config.generate_timeout_seconds + self._config.publish_timeout_seconds
        path = "/sleep?level=1&mode=wait"
        await self._ask("POST", path, leg="making room for the trainer", timeout_seconds=limit)

    async def wake(self) -> None:
        await self._ask("POST", "/wake_up", leg="taking the memory back")
