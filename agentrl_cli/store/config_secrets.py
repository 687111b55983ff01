"""Secrets in a configuration: masked on disk, and given to child processes apart from it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_SECRET_KEY = re.compile(
    r"(^|_)(api_?key|secret(_key)?|password|passwd|authorization|"
    r"(access|auth|api|bearer|hf)_token|token)$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(r"^(sk-[A-Za-z0-9_\-]{6,}|hf_[A-Za-z0-9]{8,}|[Bb]earer \S+)$")
_MASK = "***"


def mask_secrets(value: Any, key: str = "") -> Any:
    """``value`` with ``***`` for every text that is, or is named like, a key or password."""
    if isinstance(value, Mapping):
        return {name: mask_secrets(item, str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [mask_secrets(item, key) for item in value]
    if isinstance(value, str) and (_SECRET_KEY.search(key) or _SECRET_VALUE.match(value)):
        return _MASK
    return value


def find_secrets(value: Any) -> list[list[Any]]:
    """Where :func:`mask_secrets` masks, and what: lists of names (or places) and the secret."""
    return [[*path, secret] for path, secret in _walk(value, ())]


def restore_secrets(masked: Any, secrets: Sequence[Sequence[Any]]) -> Any:
    """A copy of ``masked`` with what :func:`find_secrets` found in the original."""
    restored = copy.deepcopy(masked)
    for *path, name, secret in secrets:
        place = restored
        for step in path:
            place = place[step]
        place[name] = secret
    return restored


def _walk(
    value: Any, path: tuple[Any, ...], key: str = ""
) -> Iterator[tuple[tuple[Any, ...], str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _walk(item, (*path, name), str(name))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _walk(item, (*path, place), key)
    elif isinstance(value, str) and mask_secrets(value, key) != value:
        yield path, value
