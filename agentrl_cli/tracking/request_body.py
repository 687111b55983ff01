"""What a gateway reads of a request before a protocol does, and how much of it it takes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from agentrl_cli.tracking.model_request import ModelRequest, RequestError, TooLargeError

#: Which repetition of a call this is, as the SDKs of OpenAI and Anthropic say it; 0: the first.
_RETRY_HEADER = "x-stainless-retry-count"

#: Half of a character that takes two escapes.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a gateway takes at once; more is refused in the words of the protocol."""

    max_body_bytes: int = 64 * 2**20
    """Of one request: status 413."""
    max_messages: int = 20_000
    """Of one request: status 413."""
    max_tools: int = 2_000
    """Of one request: status 413."""
    max_session_calls: int = 256
    """Calls of one session in flight: status 429."""
    max_calls: int = 8192
    """Calls of all sessions in flight: status 429."""


def is_retry(request: Request) -> bool:
    """True when an SDK says that it sends this request again."""
    count = request.headers.get(_RETRY_HEADER, "0")
    return count.isascii() and count.isdigit() and count.strip("0") != ""


async def read_body(request: Request, limits: Limits) -> bytes:
    """A request's body.

    Raises:
        TooLargeError: it is larger.
        ClientDisconnect: it never came to its end.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limits.max_body_bytes:
            raise TooLargeError(f"the body is larger than {limits.max_body_bytes} bytes")
    return bytes(body)


def parse_json(data: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        RequestError: no JSON, no object, or text that is no Unicode.
    """
    try:
        value = json.loads(data, parse_constant=_refuse_constant, parse_float=_parse_number)
    except RecursionError:
        raise RequestError("the body is nested too deep") from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    if _SURROGATE.search(data):
        _check_unicode(value)
    return value


def _check_unicode(value: dict[str, Any]) -> None:
    """Refuses half a character, as JSON can write it: no tokenizer and no store could."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the body has text that is no Unicode: {error.reason}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _parse_number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        # Written again it would be Infinity, which is no JSON.
        raise ValueError(f"the number {text:.20} is too large")
    return number


def check_size(request: ModelRequest, limits: Limits) -> None:
    """Refuses what would take long merely to look at.

    Raises:
        TooLargeError: too many messages or tools.
    """
    for name, found, limit in (
        ("messages", len(request.messages), limits.max_messages),
        ("tools", len(request.inputs.tools), limits.max_tools),
    ):
        if found > limit:
            raise TooLargeError(f"the request has {found} {name}; allowed are {limit}", name)
