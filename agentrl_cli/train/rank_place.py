"""Where a process stands among those that train together, and what it says when one is lost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self


class RankLostError(RuntimeError):
    """Another rank has ended, or has not come to an exchange in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which of the ranks a process is, and where it meets the others."""

    index: int
    count: int
    meeting_path: str
    """A file that does not exist yet, in a folder that only this user can open."""

    def format(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """From :meth:`format`'s text."""
        return cls(**json.loads(text))
