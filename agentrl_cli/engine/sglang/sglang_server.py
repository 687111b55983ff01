"""A client of an SGLang server.

Written from the source of SGLang 0.5.23, whose request and reply classes hold it in the tests,
and tried against that version's own HTTP application with a stand-in for what lies behind it.
It has never spoken to an SGLang that computes, which needs a GPU. From that source:

- ``/generate`` streams everything sampled so far with every piece, save with
  ``--incremental-streaming-output``, with which servers are started here: only what is new.
- ``output_token_logprobs`` are after temperature, but before top_p. The logprobs of the
  distribution sampled from come with ``return_sampling_mask``, which needs a finite ``top_k``.
- ``pause_generation`` in the mode ``retract`` keeps calls: their keys and values are dropped and
  computed again, by the new weights, when they continue. (``in_place`` keeps old keys and values
  and makes the update fail; ``abort``, the default, ends the calls.)
- ``update_weight_version`` aborts all calls unless it is told not to.
- Tokens name the weights that sampled them in ``weight_versions``, which the last piece has.
- ``sampling_seed`` counts only with ``--enable-deterministic-inference``.
- ``structural_tag`` is kept by xgrammar (``--grammar-backend``'s default), its masks applied before
  temperature and top_p; all logprobs are those after it. What ends a constrained text are the
  end tokens of the model's configuration files, and no ``stop_token_ids``.
- The likeliest tokens are ``output_top_logprobs``, before top_p too: with a nucleus those in
  ``output_token_sampling_mask`` count, their logprobs raised as that of the sampled token is.
  (``sampling_logprobs_mode`` would give all, but ``/generate`` passes over it.)
- A call is aborted by closing its connection; SGLang looks for that every few seconds.
- Unloading an adapter waits for the calls that use it, and those wait for the end of a pause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.engine_server import EngineServer, LoraAdapter
from agentrl_cli.engine.protocol import Generation, Sampling, ServerEndpoint
from agentrl_cli.errors import EngineError, ServerDownError

#: With top_p < 1. One less than SGLang's own limit (``--sampling-mask-max-tokens``, 4096), which
#: asks for some room; a nucleus that is larger is cut to it.
SAMPLING_MASK_TOP_K = 4095


class SglangServer(EngineServer):
    """A client of one SGLang server."""

    _GENERATE_PATH = "/generate"
    #: Answers after one second, or as soon after as a token was made.
    _HEALTH_PATH = "/health_generate"
    _VERSION_PATH = "/model_info"
    _ADAPTERS_PATH = ""
    #: Below it SGLang says the logprobs at temperature 1.
    _GREEDY_BELOW = 1e-6
    _LOAD_METRICS: ClassVar[Mapping[str, str]] = {
        "num_running": "sglang:num_running_reqs",
        "num_waiting": "sglang:num_queue_reqs",
        "cache_use": "sglang:token_usage",
    }

    def __init__(self, endpoint: ServerEndpoint, config: EngineConfig) -> None:
        super().__init__(endpoint, config)
        self._is_paused = False

    def _format_generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        adapter: LoraAdapter | None,
        stream_interval: int,
    ) -> dict[str, Any]:
        params: dict[str, Any] = {
            "max_new_tokens": max_tokens,
            "temperature": sampling.temperature,
        }
        body: dict[str, Any] = {
            "input_ids": list(prompt_ids),
            "sampling_params": params,
            "priority": sampling.priority,
        }
        if self._has_nucleus(sampling):
            params |= {"top_p": sampling.top_p, "top_k": SAMPLING_MASK_TOP_K}
            body["return_sampling_mask"] = True
        elif not self._is_greedy(sampling):
            body["return_logprob"] = True
        if sampling.num_top_logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": sampling.num_top_logprobs}
        if sampling.structural_tag is not None:
            params["structural_tag"] = sampling.structural_tag
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        if sampling.stop_token_ids:
            params["stop_token_ids"] = list(sampling.stop_token_ids)
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        if adapter is not None:
            body["lora_path"] = adapter.name
        if stream_interval < max_tokens:
            params["stream_interval"] = stream_interval
            body["stream"] = True
        return body

    def _has_nucleus(self, sampling: Sampling) -> bool:
        return sampling.top_p < 1 and not self._is_greedy(sampling)

    def _read_piece(
        self, reply: dict[str, Any], sampling: Sampling, num_before: int
    ) -> tuple[Generation, Any]:
        meta, ids = reply["meta_info"], reply["output_ids"]
        end = meta["finish_reason"] or {"type": None}
        if end["type"] not in (None, "stop", "length"):
            self._raise_abort(end)
        if meta["completion_tokens"] != num_before + len(ids):
            raise ValueError(f"{len(ids)} tokens that follow {num_before} others")
        logprobs = [0.0] * len(ids)
        if not self._is_greedy(sampling):
            logprobs = self._read_logprobs(meta, ids, self._has_nucleus(sampling))
        wants_tops = sampling.num_top_logprobs and ids
        tops = self._read_tops(meta, sampling, logprobs) if wants_tops else []
        piece = self._build_piece(sampling, ids, logprobs, tops, end["type"], end.get("matched"))
        return piece, meta.get("weight_versions")

    def _raise_abort(self, end: Mapping[str, Any]) -> NoReturn:
        said = f"({end['type']}): {end.get('message')}"
        status = end.get("status_code")
        if status is not None and 400 <= status < 500:
            raise EngineError(f"{self.name} refused the call {said}")
        # agentrl aborts no calls that are still awaited: the server is ending, or is in trouble.
        raise ServerDownError(f"{self.name} gave the call up {said}")

    @staticmethod
    def _read_logprobs(meta: Mapping[str, Any], ids: Sequence[int], has_nucleus: bool) -> list[Any]:
        if has_nucleus:
            return list(meta["output_token_sampling_logprobs"])
        entries = meta["output_token_logprobs"]
        if [entry[1] for entry in entries] != ids:
            raise ValueError("logprobs of other tokens than those sampled")
        return [entry[0] for entry in entries]

    def _read_tops(
        self, meta: Mapping[str, Any], sampling: Sampling, logprobs: Sequence[float]
    ) -> list[list[tuple[int, Any]]]:
        """The likeliest tokens of each new one, by the distribution that it was sampled from."""
        tops = [[(entry[1], entry[0]) for entry in top] for top in meta["output_top_logprobs"]]
        if not self._has_nucleus(sampling):
            return tops
        masks, plain = meta["output_token_sampling_mask"], meta["output_token_logprobs"]
        # By what the nucleus leaves out, all of its tokens are likelier.
        return [
            [(token, x + (logprob - entry[0])) for token, x in top if token in mask]
            for top, mask, entry, logprob in zip(tops, masks, plain, logprobs, strict=True)
        ]

    async def check_health(self) -> int:
        try:
            if not self._is_paused:
                return await super().check_health()
        except EngineError:
            # A pause that began meanwhile delays the token.
            if not self._is_paused:
                raise
        return await self.policy_version()

    async def pause(self) -> None:
        self._is_paused = True
        try:
            await self._ask("POST", "/pause_generation", {"mode": "retract"}, leg="pause")
        except EngineError:
            self._is_paused = False
            raise

    async def resume(self) -> None:
        await self._ask("POST", "/continue_generation", {}, leg="resume")
        self._is_paused = False

    async def load_weights(self, folder: Path) -> None:
        # Keeps calls, and drops what old weights cached.
        body = {"model_path": str(folder), "abort_all_requests": False, "flush_cache": True}
        await self._ask("POST", "/update_weights_from_disk", body, leg="loading weights")

    async def set_policy_version(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._ask("POST", "/update_weight_version", body, leg="setting the policy version")
