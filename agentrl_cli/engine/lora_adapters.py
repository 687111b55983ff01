"""The LoRA adapters of one server: the one that calls ask for, and those no longer in use."""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_PREFIX = "agentrl-adapter-"
#: Stands for the name of no adapter.
_BASE = ""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter that the server has loaded."""

    name: str
    """Under which requests ask for it; never used twice."""
    version: int
    """Policy version of everything sampled with it: the base below never changes."""


class LoraAdapters:
    """The adapters that one client loads, and the calls that use them."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._num_calls: Counter[str] = Counter()
        self.current: LoraAdapter | None = None
        """The one that new calls ask for."""

    def name_next(self, version: int) -> str:
        """A name for the adapter of ``version`` that no adapter had before.

        A server may have got this version already, from a trainer that died.
        """
        return f"{_PREFIX}{self._nonce}-{next(self._numbers)}-v{version}"

    @contextmanager
    def hold(self) -> Iterator[LoraAdapter | None]:
        """The adapter to ask for, which stays in use inside the block."""
        adapter = self.current
        name = _BASE if adapter is None else adapter.name
        self._num_calls[name] += 1
        try:
            yield adapter
        finally:
            self._num_calls[name] -= 1
            if not self._num_calls[name]:
                del self._num_calls[name]

    @property
    def num_base_calls(self) -> int:
        """Calls in flight that use no adapter."""
        return self._num_calls[_BASE]

    def find_unused(self, loaded: Iterable[str]) -> list[str]:
        """LoraAdapters among the ``loaded`` model names that no call will ask for again.

        Those that another client left behind, such as a trainer that died, are among them.
        """
        current = self.current.name if self.current else None
        return [
            name
            for name in loaded
            if name.startswith(_PREFIX) and name != current and not self._num_calls[name]
        ]
