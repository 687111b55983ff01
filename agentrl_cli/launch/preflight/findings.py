"""What a check has found: how bad it is, where it is, and what to type."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from agentrl_cli.errors import AgentrlError

#: Where the advice of an error's message begins.
_ADVICE = re.compile(
    r"(?:(?<=[.;:)] )|(?<=\n))(?=(?:Type|Allowed|A builder may|Write|Name|Set|Give|Make it|Add|"
    r"Rename|Remove|Let|Put|Does the agent|Leave|Return)\b)"
)


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """Training cannot work, or learns nothing."""
    WARNING = "warning"
    """Training works, and loses something by it."""
    NOTE = "note"
    """To be known; nothing has to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found."""

    code: str
    """Names the kind of finding, as docs/check.md lists them."""
    severity: Severity
    found: str
    where: str = ""
    """A config key, or a line of the user's code."""
    remedy: str = ""
    """What to type or to change; empty only for notes."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def describe_error(error: AgentrlError, code: str, where: str = "") -> Finding:
    """The finding that an error's message is, parted into what was found and what to do."""
    found, remedy = split_advice(str(error))
    return Finding(code=code, severity=Severity.ERROR, found=found, where=where, remedy=remedy)


def split_advice(message: str) -> tuple[str, str]:
    """What a message says was found, and what it says to do about it."""
    match = _ADVICE.search(message)
    if match is None:
        return message.strip(), ""
    return message[: match.start()].strip(), message[match.start() :].strip()
