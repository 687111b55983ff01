"""What is said to an SGLang server and how its answers are read. No sockets.

Read from the source of SGLang 0.5.23:

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
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from agentrl_cli.engine.protocol import UNKNOWN_VERSION, Generation, Sampling
from agentrl_cli.errors import EngineError, ServerDownError, UserInputError

#: SGLang whose source was read. Older ones do not name the weights of every token.
SUPPORTED_SGLANG = ">=0.5.23,<0.6"
_OLDEST = (0, 5, 23)

#: Pausing that keeps calls: see above.
PAUSE: dict[str, Any] = {"mode": "retract"}

#: With top_p < 1. One less than SGLang's own limit (``--sampling-mask-max-tokens``, 4096), which
#: asks for some room; a nucleus that is larger is cut to it.
SAMPLING_MASK_TOP_K = 4095

#: SGLang samples greedily below it, and then says the logprobs at temperature 1.
_GREEDY_BELOW = 1e-6


def format_generate(
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    max_model_len: int,
    adapter: str | None,
    stream_interval: int,
) -> dict[str, Any]:
    """The body for ``/generate``, streamed if it may come in several pieces."""
    room = max_model_len - len(prompt_ids)
    max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    params: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "temperature": sampling.temperature,
    }
    body: dict[str, Any] = {"input_ids": list(prompt_ids), "sampling_params": params}
    if _has_nucleus(sampling):
        params |= {"top_p": sampling.top_p, "top_k": SAMPLING_MASK_TOP_K}
        body["return_sampling_mask"] = True
    elif not _is_greedy(sampling):
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
        body["lora_path"] = adapter
    if stream_interval < max_tokens:
        params["stream_interval"] = stream_interval
        body["stream"] = True
    return body


def _is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < _GREEDY_BELOW


def _has_nucleus(sampling: Sampling) -> bool:
    return sampling.top_p < 1 and not _is_greedy(sampling)


class GenerationReader:
    """Reads what was sampled from the replies to one call (one, or the pieces of a stream).

    Args:
        server: its name, for messages.
        sampling: what was asked for.
        version: of the adapter that samples the whole call; None: the server says which weights
            sampled each token.
    """

    def __init__(self, server: str, sampling: Sampling, version: int | None = None) -> None:
        self._server = server
        self._greedy = _is_greedy(sampling)
        self._has_nucleus = _has_nucleus(sampling)
        self._num_top = sampling.num_top_logprobs
        self._version = version
        self._num_read = 0

    def read(self, reply: Mapping[str, Any]) -> Generation:
        """The tokens that ``reply`` adds to those before.

        Raises:
            ServerDownError: the server gave the call up.
            EngineError: the reply is another error, or not what it should be.
        """
        if "error" in reply:
            raise EngineError(f"{self._server} refused the call: {find_message(reply)}")
        try:
            return self._read(reply)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self._server} answered with something else than a completion "
                f"({type(error).__name__}: {error}): {str(reply)[:300]}"
            ) from error

    def _read(self, reply: Mapping[str, Any]) -> Generation:
        meta = reply["meta_info"]
        reason = meta["finish_reason"]
        if reason is not None and reason["type"] not in ("stop", "length"):
            self._raise_abort(reason)
        num_tokens = meta["completion_tokens"]
        num_new, self._num_read = num_tokens - self._num_read, num_tokens
        completion_ids = tuple(_take(reply["output_ids"], num_new))
        logprobs = self._read_logprobs(meta, completion_ids)
        matched = None if reason is None else reason.get("matched")
        return Generation(
            completion_ids=completion_ids,
            rollout_logprobs=logprobs,
            versions=() if reason is None else self._read_versions(meta, num_tokens),
            finish_reason=None if reason is None else reason["type"],
            stop_text=matched if isinstance(matched, str) else None,
            top_logprobs=self._read_tops(meta, logprobs),
        )

    def _raise_abort(self, reason: Mapping[str, Any]) -> NoReturn:
        said = f"({reason['type']}): {reason.get('message')}"
        status = reason.get("status_code")
        if status is not None and 400 <= status < 500:
            raise EngineError(f"{self._server} refused the call {said}")
        # agentrl aborts no calls that are still awaited: the server is ending, or is in trouble.
        raise ServerDownError(f"{self._server} gave the call up {said}")

    def _read_logprobs(
        self, meta: Mapping[str, Any], completion_ids: Sequence[int]
    ) -> tuple[float, ...]:
        num_new = len(completion_ids)
        if self._greedy:
            return (0.0,) * num_new
        if self._has_nucleus:
            entries = _take(meta["output_token_sampling_logprobs"], num_new)
            return tuple(_finite(entry) for entry in entries)
        entries = _take(meta["output_token_logprobs"], num_new)
        if [entry[1] for entry in entries] != list(completion_ids):
            raise ValueError("logprobs of other tokens than those sampled")
        return tuple(_finite(entry[0]) for entry in entries)

    def _read_tops(
        self, meta: Mapping[str, Any], logprobs: Sequence[float]
    ) -> tuple[tuple[tuple[int, float], ...], ...]:
        """The likeliest tokens of each new one, by the distribution that it was sampled from."""
        if not self._num_top or not logprobs:
            return ()
        num_new = len(logprobs)
        tops = _take(meta["output_top_logprobs"], num_new)
        pairs = [[(entry[1], entry[0]) for entry in top] for top in tops]
        if not self._has_nucleus:
            return tuple(_rank(one, self._num_top) for one in pairs)
        masks = _take(meta["output_token_sampling_mask"], num_new)
        plain = _take(meta["output_token_logprobs"], num_new)
        ranked = []
        for one, mask, entry, logprob in zip(pairs, masks, plain, logprobs, strict=True):
            # By what the nucleus leaves out, all of its tokens are likelier.
            raised = logprob - _finite(entry[0])
            kept = [(token, x + raised) for token, x in one if token in mask]
            ranked.append(_rank(kept, self._num_top))
        return tuple(ranked)

    def _read_versions(self, meta: Mapping[str, Any], num_tokens: int) -> tuple[int, ...]:
        if self._version is not None:
            return (self._version,) * num_tokens
        versions: list[int] = []
        for span in meta["weight_versions"]:
            if span["start"] != len(versions):
                raise ValueError(f"weight_versions with a gap: {meta['weight_versions']}")
            versions += [parse_version(span["version"])] * (span["end"] - span["start"])
        if len(versions) != num_tokens:
            raise ValueError(f"weight_versions of {len(versions)} tokens for {num_tokens}")
        return tuple(versions)


def _take(items: Sequence[Any], num_new: int) -> Sequence[Any]:
    if len(items) != num_new:
        raise ValueError(f"{len(items)} items for {num_new} new tokens")
    return items


def format_score(
    token_ids: Sequence[int], start: int, *, adapter: str | None = None
) -> dict[str, Any]:
    """The body for ``/generate`` that asks for the logprobs of tokens from ``start`` (>= 1) on."""
    body: dict[str, Any] = {
        "input_ids": list(token_ids),
        # No prompt logprobs come without sampling one token.
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        # The entry there is always empty; that of the token after it is the first with a logprob.
        "logprob_start_len": start - 1,
    }
    if adapter is not None:
        body["lora_path"] = adapter
    return body


def parse_scores(reply: Mapping[str, Any], num_scores: int, *, server: str) -> list[float]:
    """The logprobs that :func:`format_score` asked for.

    Raises:
        EngineError: the reply has none, or not as many.
    """
    try:
        entries = reply["meta_info"]["input_token_logprobs"][1:]
        scores = [_finite(entry[0]) for entry in entries]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            f"{server} answered with something else than logprobs of a prompt "
            f"({type(error).__name__}: {error}): {str(reply)[:300]}"
        ) from error
    if len(scores) != num_scores:
        raise EngineError(f"{server} gave {len(scores)} logprobs of a prompt, not {num_scores}")
    return scores


def _rank(pairs: Sequence[tuple[int, float | None]], num: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens, best first; fewer where fewer could be drawn."""
    known = [(token, logprob) for token, logprob in pairs if logprob is not None]
    ranked = sorted(known, key=lambda pair: -pair[1])[:num]
    return tuple((token, min(logprob, 0.0)) for token, logprob in ranked if math.isfinite(logprob))


def _finite(logprob: Any) -> float:
    # JSON has no infinity: SGLang sends null for it, and for NaN.
    if logprob is None or not math.isfinite(logprob):
        raise ValueError(f"a logprob is {logprob}")
    return float(logprob)


def format_weights(folder: Path) -> dict[str, Any]:
    """The body for ``/update_weights_from_disk``: keeps calls, drops what old weights cached."""
    return {"model_path": str(folder), "abort_all_requests": False, "flush_cache": True}


def format_version(version: int) -> dict[str, Any]:
    """The body for ``/update_weight_version``."""
    return {"new_version": str(version), "abort_all_requests": False}


def parse_version(text: Any) -> int:
    """The policy version that a weight version of SGLang's stands for (at first: ``default``)."""
    try:
        return int(text)
    except (TypeError, ValueError):
        return UNKNOWN_VERSION


def format_adapter(name: str, folder: Path) -> dict[str, Any]:
    """The body for ``/load_lora_adapter``; ``/unload_lora_adapter`` wants only the name."""
    return {"lora_name": name, "lora_path": str(folder)}


def parse_model_names(models: Mapping[str, Any]) -> list[str]:
    """Names of the model and of all adapters in the answer of ``/v1/models``."""
    return [card["id"] for card in models.get("data", [])]


def check_sglang_version(version: str) -> None:
    """Refuses an SGLang whose source was not read.

    Raises:
        UserInputError: found, supported, and what to type.
    """
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    numbers = tuple(map(int, found.groups())) if found else ()
    if numbers < _OLDEST or numbers[:2] != _OLDEST[:2]:
        raise UserInputError(
            f"SGLang {version or '(unknown)'} was found; this version of agentrl supports SGLang "
            f"{SUPPORTED_SGLANG}. Type pip install 'sglang{SUPPORTED_SGLANG}', or name an "
            "interpreter that has it: engine.python=PATH"
        )


def find_message(reply: Mapping[str, Any]) -> str:
    """What SGLang says went wrong, in whichever of its ways it says so."""
    error = reply.get("error", reply)
    if isinstance(error, Mapping):
        error = error.get("message") or error.get("error_message") or error
    return str(error)
