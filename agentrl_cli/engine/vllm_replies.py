"""What vLLM answers: completions, versions and logprobs, nothing taken on trust."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import orjson

from agentrl_cli.engine.http import shorten
from agentrl_cli.engine.protocol import FinishReason
from agentrl_cli.engine.server import UNKNOWN_VERSION
from agentrl_cli.errors import ContextLengthError, EngineError

#: What vLLM sends in the place of a logprob that is not finite.
_NOT_FINITE = -9999.0

#: How vLLM says that the process which computes is gone; the one that answers ends soon after.
_ENGINE_DEAD = "EngineCore encountered an issue"

_TOO_LONG = re.compile(r"\(length (\d+)\) is longer than the maximum model length of (\d+)")


#: For each token the likeliest ones with their logprobs, best first.
TopLogprobs = tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens of a completion that one version of the weights sampled."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a completion as a server sends it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None
    """None: more will come."""
    stop_text: str | None
    spans: tuple[VersionSpan, ...] | None
    """Of the whole completion, in its last piece; None: the endpoint knows no versions."""
    top_logprobs: TopLogprobs = ()


class GivenUpError(EngineError):
    """The server will not finish the completion; another server may."""


def parse_generate_piece(data: bytes, *, greedy: bool, num_top: int = 0) -> Piece:
    """One event of ``/inference/v1/generate``, with the ``num_top`` likeliest tokens of each.

    Raises:
        GivenUpError: the server gave the completion up.
        EngineError: the server's error, or something malformed.
    """
    choice = _parse_choice(data)
    ids = _parse_ids(choice.get("token_ids"), data)
    content = (choice.get("logprobs") or {}).get("content") or []
    try:
        sent_ids = [item["token_id"] for item in content]
        logprobs = [item["logprob"] for item in content]
    except (TypeError, KeyError):
        _refuse("logprobs are not what was asked for", data)
    if sent_ids != list(ids):
        _refuse(f"{len(ids)} token ids and logprobs of {len(sent_ids)} others", data)
    finish_reason, stop_text = _parse_finish(choice, data)
    spans = None
    if finish_reason is not None:
        spans = _parse_spans(choice.get("weight_versions"), data)
    try:
        tops = [
            [(top["token_id"], top["logprob"]) for top in item["top_logprobs"]] if num_top else []
            for item in content
        ]
    except (TypeError, KeyError):
        _refuse("top_logprobs are not what was asked for", data)
    return Piece(
        ids,
        _check_logprobs(logprobs, greedy, data),
        finish_reason,
        stop_text,
        spans,
        _rank(tops, num_top, data),
    )


def parse_completion_piece(data: bytes, *, greedy: bool, num_top: int = 0) -> Piece:
    """One event of ``/v1/completions``; raises as :func:`parse_generate_piece`."""
    choice = _parse_choice(data)
    ids = _parse_ids(choice.get("token_ids"), data)
    said = choice.get("logprobs") or {}
    logprobs = said.get("token_logprobs") or []
    if not isinstance(logprobs, list) or len(logprobs) != len(ids):
        _refuse(f"{len(ids)} token ids and other logprobs", data)
    finish_reason, stop_text = _parse_finish(choice, data)
    tops: list[list[tuple[int, float]]] = []
    if num_top and ids:
        try:
            tops = [
                [(int(name.removeprefix("token_id:")), logprob) for name, logprob in top.items()]
                for top in said["top_logprobs"]
            ]
        except (TypeError, KeyError, ValueError, AttributeError):
            _refuse("top_logprobs are not what was asked for", data)
    if len(tops) != (len(ids) if num_top else 0):
        _refuse(f"{len(ids)} token ids and top_logprobs of {len(tops)}", data)
    return Piece(
        ids,
        _check_logprobs(logprobs, greedy, data),
        finish_reason,
        stop_text,
        None,
        _rank(tops, num_top, data),
    )


def _rank(tops: list[list[tuple[int, float]]], num_top: int, data: bytes) -> TopLogprobs:
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


def _parse_ids(ids: object, data: bytes) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        _refuse("no token ids", data)
    return tuple(ids)


def _check_logprobs(logprobs: list[Any], greedy: bool, data: bytes) -> tuple[float, ...]:
    for logprob in logprobs:
        if type(logprob) not in (float, int) or not math.isfinite(logprob) or logprob > 1e-3:
            _refuse(f"{logprob!r} is no logprob", data)
        if logprob <= _NOT_FINITE:
            raise EngineError(
                "vLLM sampled a token whose logprob is not finite: the weights it holds make "
                "logits that are no numbers (NaN or infinite). Look at the run's loss and "
                "grad_norm; a smaller train.learning_rate may be needed"
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
        EngineError: somebody else named the weights.
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
    """Logprobs of the tokens from ``start`` on, from either endpoint's reply.

    Raises:
        EngineError: something malformed.
    """
    try:
        parsed = json.loads(reply)
        # One endpoint has them beside its choices, the other inside.
        entries = parsed.get("prompt_logprobs") or parsed["choices"][0]["prompt_logprobs"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
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


def find_meaning(server_message: str) -> EngineError | None:
    """The error that stands for what vLLM said, where there is one of its own."""
    lengths = _TOO_LONG.search(server_message)
    if lengths:
        return ContextLengthError(int(lengths[1]), int(lengths[2]))
    return GivenUpError(server_message) if _ENGINE_DEAD in server_message else None


def _refuse(problem: str, data: bytes) -> NoReturn:
    raise EngineError(f"vLLM sent a completion that cannot be used ({problem}): {shorten(data)}")
