"""What a client knows of its server's weights: when they change."""

from __future__ import annotations

import asyncio
import itertools
import secrets


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
        self.epoch = 0
        """Another number after every change began."""

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
