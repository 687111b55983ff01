"""What a client knows of its server's weights: when they change, and which adapter is on top."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_ADAPTER_PREFIX = "agentrl-adapter-"
#: Stands for the name of no adapter.
_BASE = ""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that the server has loaded."""

    name: str
    """Under which requests ask for it; never used twice."""
    version: int
    """Policy version of everything sampled with it: the base below never changes."""


class WeightState:
    """The changes of a server's weights, all of which go through this one client.

    Keys and values that old weights made must not serve new ones. vLLM keeps them apart by a
    salt, which is therefore another one after every change; a policy version alone would not
    do, as a trainer that resumes may publish the same number again with other weights.
    """

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._settled = asyncio.Event()
        self._settled.set()
        self._num_calls: Counter[str] = Counter()
        self.epoch = 0
        """Another number after every change began."""
        self.adapter: Adapter | None = None

    def begin_change(self) -> None:
        """The weights may change from now on, until :meth:`end_change`."""
        self.epoch += 1
        self._settled.clear()

    def end_change(self) -> None:
        """The weights stay as they are."""
        self.epoch += 1
        self._settled.set()

    async def wait_settled(self) -> None:
        """Returns when no change is under way."""
        await self._settled.wait()

    def make_salt(self) -> str:
        """The salt of a request sent now."""
        salt = f"{self._nonce}-{self.epoch}"
        # A call sent during a change may start with the old weights and go on with the new
        # ones: nobody may share its cache, and it nobody's.
        return salt if self._settled.is_set() else f"{salt}-{next(self._numbers)}"

    def name_adapter(self, version: int) -> str:
        """A name for the adapter of ``version`` that no adapter had before."""
        return f"{_ADAPTER_PREFIX}{self._nonce}-{next(self._numbers)}-v{version}"

    @contextmanager
    def use_adapter(self) -> Iterator[Adapter | None]:
        """The adapter to ask for, which is not unloaded inside the block."""
        adapter = self.adapter
        name = _BASE if adapter is None else adapter.name
        self._num_calls[name] += 1
        try:
            yield adapter
        finally:
            self._num_calls[name] -= 1

    @property
    def num_base_calls(self) -> int:
        """Calls in flight that use no adapter."""
        return self._num_calls[_BASE]

    def find_unused(self, loaded: Iterable[str]) -> list[str]:
        """Adapters among the ``loaded`` model names that no call will ask for again.

        Those that another client left behind, such as a trainer that died, are among them.
        """
        current = self.adapter.name if self.adapter else None
        return [
            name
            for name in loaded
            if name.startswith(_ADAPTER_PREFIX) and name != current and not self._num_calls[name]
        ]
