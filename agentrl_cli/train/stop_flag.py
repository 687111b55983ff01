"""How a run is asked to end."""

from __future__ import annotations

from typing import Protocol


class StopFlag(Protocol):
    """Whether the run has been asked to end after the step in progress."""

    def is_set(self) -> bool:
        """True once it has."""
        ...
