"""What a check has found: how bad it is, where it is, and what to type."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from agentrl_cli.errors import (
    AgentrlError,
    BuilderError,
    ConfigError,
    DatasetError,
    ImportPathError,
    MissingExtraError,
    ModelError,
    RewardSignatureError,
    RunFolderError,
)
from agentrl_cli.tracking.template import TemplateError

#: What errors are called among findings.
_CODES: tuple[tuple[type[AgentrlError], str], ...] = (
    (BuilderError, "builder"),
    (ImportPathError, "import_path"),
    (RewardSignatureError, "reward_signature"),
    (DatasetError, "dataset"),
    (TemplateError, "template"),
    (ModelError, "model"),
    (RunFolderError, "run_folder"),
    (MissingExtraError, "missing_package"),
    (ConfigError, "config"),
)
#: The config key that a message begins with.
_KEY = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)*): ")

#: Where the advice of an error's message begins.
_ADVICE = re.compile(
    r"(?:(?<=[.;:)] )|(?<=\n))(?=(?:Type|Allowed|A builder may|[Ww]rite|Name|Set|Give|Make it|Add|"
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


def note(code: str, where: str, found: str) -> Finding:
    """What is to be known, and needs no change."""
    return Finding(code=code, severity=Severity.NOTE, found=found, where=where)


def describe_error(error: AgentrlError, code: str | None = None) -> Finding:
    """The finding that an error's message is, parted into what was found and what to do.

    ``code``: None: as the error's class is called among findings.
    """
    found, remedy = split_advice(str(error))
    key = _KEY.match(found)
    return Finding(
        code=code or next((name for kind, name in _CODES if isinstance(error, kind)), "input"),
        severity=Severity.ERROR,
        found=found,
        where=key[1] if key else "",
        remedy=remedy,
    )


def split_advice(message: str) -> tuple[str, str]:
    """What a message says was found, and what it says to do about it."""
    match = _ADVICE.search(message)
    if match is None:
        return message.strip(), ""
    return message[: match.start()].strip(), message[match.start() :].strip()
