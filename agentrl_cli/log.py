"""Logging: one logger tree, plain lines, secrets masked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from agentrl_cli.secret_masking import mask_text


def clean(text: str) -> str:
    """``text`` with control characters spelled out: a model must not move the cursor."""
    return "".join(c if c in "\n\t" or c.isprintable() else _spell(c) for c in text)


def sanitize(text: str) -> str:
    """``text`` as a terminal or a log may have it: cleaned, and its secrets masked."""
    return clean(mask_text(text))


def _spell(character: str) -> str:
    # Python's own escape, so that \x1b reads as \x1b.
    return character.encode("unicode_escape").decode()


class SecretFilter(logging.Filter):
    """Replaces secrets by ``***`` and spells control characters in the message of every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        masked = sanitize(message)
        if masked != message:
            record.msg, record.args = masked, ()
        return True


def format_count(count: float, noun: str, plural: str | None = None) -> str:
    """``1 turn``, ``2 turns``, ``1,024 turns``."""
    return f"{count:,.0f} {noun if count == 1 else plural or f'{noun}s'}"


def format_failures(num_policy: float, num_surroundings: float) -> str:
    """``failed: 2 policy, 1 surroundings``, to stand beside a mean; empty where none failed."""
    counts = {"policy": num_policy, "surroundings": num_surroundings}
    shown = ", ".join(f"{count:,.0f} {cause}" for cause, count in counts.items() if count)
    return f"failed: {shown}" if shown else ""


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; pass ``__name__``."""
    return logging.getLogger(name)


@contextmanager
def file_log(path: Path, level: int = logging.INFO) -> Iterator[None]:
    """Sends agentrl's records to ``path`` too, inside the block."""
    path.touch(0o600)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(SecretFilter())
    handler.setLevel(level)
    root = logging.getLogger("agentrl_cli")
    previous = root.level
    root.setLevel(min(level, previous or level))
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(previous)
        handler.close()


class Observer(Protocol):
    """Whoever shows a run to a person: the terminal, plain lines, or nobody.

    Methods are called from several threads and must return at once.
    """

    def on_stage(self, stage: str, total: int | None = None) -> None:
        """A stage begins (``"warm start"``, ``"rollout"``, ``"train"``...), of ``total`` units."""

    def on_progress(self, num_done: int, note: str = "") -> None:
        """``num_done`` units of the current stage are done."""

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """A step is over; ``metrics`` is its line of ``metrics.jsonl``."""

    def on_message(self, text: str) -> None:
        """Something worth one line."""


#: Called several times a second by what takes long; what it raises ends that, of which nothing is
#: kept.
CheckStop = Callable[[], None]


def never_stop() -> None:
    """For callers whom nothing stops."""


class SilentObserver:
    """An observer that shows nothing."""

    def on_stage(self, stage: str, total: int | None = None) -> None:
        """Ignores the stage."""

    def on_progress(self, num_done: int, note: str = "") -> None:
        """Ignores the progress."""

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Ignores the metrics."""

    def on_message(self, text: str) -> None:
        """Ignores the text."""
