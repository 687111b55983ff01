"""Reading the fields of a request's JSON body, each with a refusal that says what is allowed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from agentrl_cli.errors import format_nearest
from agentrl_cli.tracking.model_request import RequestError

_KINDS: Mapping[type, str] = {bool: "true or false", str: "text", list: "a list", dict: "an object"}


def drop_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without the keys that are null: a null means "not given" everywhere."""
    return {key: value for key, value in body.items() if value is not None}


def check_keys(
    body: Mapping[str, Any],
    honoured: Collection[str],
    neutral: Collection[str],
    unused: Mapping[str, tuple[Any, ...]],
    path: str = "",
) -> None:
    """Refuses keys that would be dropped in silence.

    Args:
        body: without nulls.
        honoured: keys that are read.
        neutral: keys that change nothing about what is sampled.
        unused: keys that are allowed only at a value that means "not used".
        path: where ``body`` stands in the request, ending in a point.

    Raises:
        RequestError: naming the key, with the nearest known one.
    """
    for key, value in body.items():
        if key in honoured or key in neutral:
            continue
        if key not in unused:
            raise RequestError(
                f"{path + key!r:.80} is not supported here; {format_nearest(key, honoured)}",
                (path + key)[:80],
            )
        if value not in unused[key]:
            raise RequestError(
                f"{path}{key} = {value!r:.80} is not supported here; leave it out", f"{path}{key}"
            )


def take(body: Mapping[str, Any], key: str, kind: type, default: Any, path: str = "") -> Any:
    """The value of ``key`` if it is of type ``kind``.

    Args:
        body: the object that holds it.
        key: its name there.
        kind: bool, str, list or dict.
        default: where the key is missing or null.
        path: where ``body`` stands in the request, ending in a point.

    Raises:
        RequestError: it is of another type.
    """
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise RequestError(
            f"{path}{key} must be {_KINDS[kind]}, found {value!r:.80}", f"{path}{key}"
        )
    return value


def take_choice(
    body: Mapping[str, Any], key: str, allowed: Collection[str], path: str = ""
) -> str | None:
    """The text of ``key`` if it is one of ``allowed``; None where it is missing.

    Raises:
        RequestError: it is anything else.
    """
    value = body.get(key)
    if value is None or (isinstance(value, str) and value in allowed):
        return value
    raise RequestError(
        f"{path}{key} is {value!r:.80}; allowed: {', '.join(sorted(allowed))}", f"{path}{key}"
    )


def take_int(
    body: Mapping[str, Any], key: str, default: int, *, minimum: int, maximum: int = 2**63
) -> int:
    """The whole number of ``key``.

    Raises:
        RequestError: it is no whole number, or out of range.
    """
    value = body.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        upper = f" to {maximum}" if maximum < 2**63 else " or more"
        raise RequestError(
            f"{key} must be a whole number, {minimum}{upper}; found {value!r:.80}", key
        )
    return value


def take_number(
    body: Mapping[str, Any], key: str, default: float, minimum: float, maximum: float
) -> float:
    """The number of ``key``.

    Raises:
        RequestError: it is no number, or out of range.
    """
    value = body.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{key} must be a number, found {value!r:.80}", key)
    if not minimum <= value <= maximum:
        raise RequestError(
            f"{key} must be from {minimum:g} to {maximum:g}, found {value!r:.80}", key
        )
    return float(value)
