"""How a warm start is asked to end."""

from __future__ import annotations

from collections.abc import Callable

#: Called several times a second where no wait or computation is longer; what it raises ends
#: the warm start, of which nothing is kept.
CheckStop = Callable[[], None]


def go_on() -> None:
    """Never stops."""
