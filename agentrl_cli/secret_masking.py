"""Secrets in texts and configurations, replaced by ``***``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

MASK = "***"
#: Shorter texts under a secret's name (EMPTY, none) are placeholders, and may occur in any text.
_MIN_HIDDEN_CHARS = 8

_PASSWORD = re.compile(
    r"passwords?|passwd|passphrase|pwd|secrets?|credentials?|authorization|bearer|cookie"
    r"|apikeys?|accesskey|privatekey|(api|auth|access)token"
)
#: What the words ``key`` and ``token`` follow where they are secret; an ``answer_key`` is none.
_OWNER = re.compile(
    r"api|access|admin|anthropic|auth|aws|azure|bearer|client|encryption|github|gitlab|google|groq"
    r"|hf|id|license|master|mistral|openai|private|refresh|secret|service|session|signing|ssh"
    r"|token|wandb"
)
#: What names ends in that speak of a secret and hold none.
_NO_SECRET = re.compile(r"column|dir|field|file|folder|length|name|path|prompt|store")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

#: Keys that are known by their own look, whoever formatted them.
_KEY = re.compile(
    r"\b(sk-[\w\-]{6,}|hf_[A-Za-z0-9]{8,}|gh[opsu]_\w{16,}|github_pat_\w{16,}|glpat-[\w\-]{16,}"
    r"|xox[abps]-[\w\-]{8,}|AKIA[A-Z0-9]{12,}|AIza[\w\-]{20,}|eyJ[\w\-]{8,4096}\.[\w\-]+\.[\w\-]+)"
    r"|(?<=bearer )(?-i:\S+)|(?<=://)[^/?#\s]+(?=@)"
    r"|(?<=[?&]key=)[^&#\s'\"]+|(?<=[?&]sig=)[^&#\s'\"]+|(?<=signature=)[^&#\s'\"]+",
    re.IGNORECASE,
)
#: ``name=value``, ``--name value``, ``"name": "value"`` and HTTP headers. A name begins where a
#: word does: tried at each letter, a line of a million of them would take hours. A command that
#: would make the value, ``$(openssl rand -hex 24)``, is none: messages say to type it.
_NAMED = re.compile(
    r"(?<![\w\-])(?:(?P<name>-*[A-Za-z][\w\-]*)"
    r"(?P<between>=['\"]?|['\"]: ?['\"]|(?<=key): |(?<=uthorization): (?:\w+ (?=\S))?)"
    r"(?P<value>(?!\$\([a-z]+ )[^\s'\"&,;]{6,})"
    r"|(?P<flag>--[a-z][a-z\-]*)(?P<space> )(?P<word>[^\s'\"\-]\S{5,}))"
)

_hidden: set[str] = set()


def is_secret_name(name: str) -> bool:
    """True for ``api_key``, ``dbPassword``, ``--hf-token``; False for ``max_tokens``."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or _NO_SECRET.fullmatch(words[-1]):
        return False
    return (
        any(_PASSWORD.fullmatch(word) for word in words)
        or words[-1] in ("token", "auth")
        or any(
            _OWNER.fullmatch(owner) and word in ("key", "keys", "token", "tokens")
            for owner, word in pairwise(words)
        )
    )


def mask_text(text: str) -> str:
    """The text with ``***`` for every key, password of a URL, and value that is named a secret."""
    for value in (*_hidden, *_list_environment()):
        text = text.replace(value, MASK)
    return _NAMED.sub(_mask_named, _KEY.sub(MASK, text))


def mask_secrets(value: Any, *, is_secret: bool = False) -> Any:
    """``value`` with ``***`` for everything under a secret's name and every key in a text.

    Args:
        value: what a YAML or JSON file holds.
        is_secret: it stands under a secret's name.
    """
    if isinstance(value, Mapping):
        return {
            name: mask_secrets(item, is_secret=is_secret or _hides(name, item))
            for name, item in value.items()
        }
    if isinstance(value, list):
        # A word of a command line belongs to the flag before it.
        flags = ["", *(i if isinstance(i, str) and i.startswith("--") else "" for i in value)]
        return [
            mask_secrets(item, is_secret=is_secret or _hides(flag, item))
            for flag, item in zip(flags, value, strict=False)
        ]
    if is_secret and value not in (None, "") and not isinstance(value, bool):
        return MASK
    return mask_text(value) if isinstance(value, str) else value


def find_secrets(value: Any) -> list[list[Any]]:
    """Where :func:`mask_secrets` masks, and what: lists of names (or places) and the secret."""
    return list(_find_differences(value, mask_secrets(value), []))


def hide_secrets(value: Any) -> None:
    """From now on :func:`mask_text` masks what stands under secrets' names in ``value``."""
    for *_, secret in find_secrets(value):
        hide_text(secret)


def hide_text(secret: Any) -> None:
    """From now on :func:`mask_text` masks this secret, unless it is too short to be one."""
    # A sentence that holds one is no secret as a whole.
    if isinstance(secret, str) and len(secret) >= _MIN_HIDDEN_CHARS and " " not in secret:
        _hidden.add(secret)


@cache
def _list_environment() -> tuple[str, ...]:
    # A path names the file of a secret.
    return tuple(
        value
        for name, value in os.environ.items()
        if is_secret_name(name) and len(value) >= _MIN_HIDDEN_CHARS and "/" not in value[:1]
    )


def _hides(name: Any, item: Any) -> bool:
    # Numbers under a token's name count tokens.
    return is_secret_name(str(name)) and not (
        isinstance(item, int | float) and str(name).lower().endswith(("token", "tokens"))
    )


def _mask_named(match: re.Match[str]) -> str:
    name = match["name"] or match["flag"]
    if not is_secret_name(name):
        return match[0]
    return f"{name}{match['between'] or match['space']}{MASK}"


def _find_differences(value: Any, masked: Any, path: list[Any]) -> Iterator[list[Any]]:
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, item in items:
            yield from _find_differences(item, masked[name], [*path, name])
    elif value != masked:
        yield [*path, value]
