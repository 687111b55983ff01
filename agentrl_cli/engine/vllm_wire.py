"""What is said to vLLM: the bodies of its requests.

Two endpoints make completions: ``/inference/v1/generate`` (token ids both ways, the weight
version of every token) and the older ``/v1/completions`` (no versions).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl_cli.engine.protocol import Sampling

GENERATE_PATH = "/inference/v1/generate"
COMPLETIONS_PATH = "/v1/completions"

#: vLLM samples greedily below it.
_GREEDY_BELOW = 1e-5


def is_greedy(sampling: Sampling) -> bool:
    """Whether each token is the most probable one."""
    return sampling.temperature < _GREEDY_BELOW


def format_generate(
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    max_tokens: int,
    cache_salt: str,
    adapter: str | None,
    stream_interval: int,
) -> dict[str, Any]:
    """A request to ``/inference/v1/generate``, streamed if it may come in several pieces."""
    stop = [text for text in sampling.stop if text]
    params: dict[str, Any] = {
        **_format_sampling(sampling, max_tokens),
        # The sampled token is counted among them, wherever it ranks.
        "logprobs": sampling.num_top_logprobs + 1 if sampling.num_top_logprobs else 0,
        "stream_interval": stream_interval,
        # Text is made only where it is looked at: it costs the server as much as the rest.
        "detokenize": bool(stop),
        **_format_stop(stop),
    }
    body = {
        "token_ids": list(prompt_ids),
        "sampling_params": params,
        "cache_salt": cache_salt,
        "stream": stream_interval < max_tokens,
    }
    if sampling.structural_tag is not None:
        # The tag says itself where a thought may stand; a reasoning parser must not pass it by.
        body["reasoning_ended"] = True
    return body if adapter is None else {**body, "model": adapter}


def format_completion(
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    max_tokens: int,
    cache_salt: str,
    adapter: str | None,
    stream_interval: int,
) -> dict[str, Any]:
    """A request to ``/v1/completions`` that says the same."""
    body = {
        "prompt": list(prompt_ids),
        **_format_sampling(sampling, max_tokens),
        # This endpoint fills in what the model's generation_config.json says; see that it does not.
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": sampling.num_top_logprobs,
        "return_token_ids": True,
        # Likeliest tokens come by their texts otherwise, of which several tokens may have the same.
        "return_tokens_as_token_ids": True,
        "stream_interval": stream_interval,
        "cache_salt": cache_salt,
        "stream": stream_interval < max_tokens,
        **_format_stop([text for text in sampling.stop if text]),
    }
    return body if adapter is None else {**body, "model": adapter}


def _format_sampling(sampling: Sampling, max_tokens: int) -> dict[str, Any]:
    params = {
        "max_tokens": max_tokens,
        "temperature": 0.0 if is_greedy(sampling) else sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "seed": sampling.seed,
    }
    if sampling.structural_tag is not None:
        params["structured_outputs"] = {"structural_tag": sampling.structural_tag}
    return params


def _format_stop(stop: list[str]) -> dict[str, Any]:
    # A stop text may be spelled by special tokens, such as an end tag of a template.
    return {"stop": stop, "skip_special_tokens": False} if stop else {}


def format_score(token_ids: Sequence[int], cache_salt: str, adapter: str | None) -> dict[str, Any]:
    """A request to ``/inference/v1/generate`` for the logprobs of its own prompt.

    vLLM computes the whole prompt then, whatever its prefix cache holds.
    """
    body = {
        "token_ids": list(token_ids),
        "sampling_params": {
            **{"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        },
        "cache_salt": cache_salt,
    }
    return body if adapter is None else {**body, "model": adapter}


def format_score_completion(
    token_ids: Sequence[int], cache_salt: str, adapter: str | None
) -> dict[str, Any]:
    """The same, said to ``/v1/completions``."""
    body = {
        "prompt": list(token_ids),
        **{"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "prompt_logprobs": 0},
        "repetition_penalty": 1.0,
        "cache_salt": cache_salt,
    }
    return body if adapter is None else {**body, "model": adapter}
