"""What SDK clients look up about the machine, looked up once."""

from __future__ import annotations

from typing import Any, ClassVar


class SharedPlatform:
    """A base of SDK clients that remember the platform, which is sent along, for one another.

    At its first call each client of OpenAI's or Anthropic's SDK else finds it anew, in another
    thread: for an agent of three turns that has a client of its own, a good part of all it costs.
    Stands before the SDK's class among the bases.
    """

    _found: ClassVar[Any] = None

    @property
    def _platform(self) -> Any:
        return SharedPlatform._found

    @_platform.setter
    def _platform(self, platform: Any) -> None:
        # Every new client begins with None.
        if platform is not None:
            SharedPlatform._found = platform
