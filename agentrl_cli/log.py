"""Logging: one logger tree, plain lines, secrets masked."""

from __future__ import annotations

import logging
import re
from pathlib import Path

#: Anything that looks like a bearer token or an API key, whoever formatted it.
_SECRET = re.compile(r"(sk-[A-Za-z0-9_\-]{6,}|(?<=[Bb]earer )\S+)")


class SecretFilter(logging.Filter):
    """Replaces keys by ``***`` in the final message of every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        masked = _SECRET.sub("***", message)
        if masked != message:
            record.msg, record.args = masked, ()
        return True


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; pass ``__name__``."""
    return logging.getLogger(name)


def add_file_log(path: Path, level: int = logging.INFO) -> logging.Handler:
    """Sends agentrl's records to ``path`` too; the caller removes the handler it gets."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(SecretFilter())
    handler.setLevel(level)
    root = logging.getLogger("agentrl_cli")
    root.setLevel(min(level, root.level or level))
    root.addHandler(handler)
    return handler
