"""How processes that agentrl starts by name speak with it: JSON messages on an inherited socket.

No pickle and no live object crosses. A message may carry bytes behind it, such as a record.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

Message = dict[str, Any]

#: As multiprocessing's connections have it, which may be the other end.
_LENGTH = struct.Struct("!i")
_READ_BYTES = 2**20


def list_import_path() -> list[str]:
    """Where modules are imported from here, for a process that is to find the same: beside the
    YAML, by PYTHONPATH, or by what a test has added to ``sys.path``."""
    # "" stands for the current folder, which an agent may leave.
    return [str(Path(entry).absolute()) for entry in sys.path]


def encode_message(message: Mapping[str, Any]) -> bytes:
    """The message as plain ASCII: halves of surrogate pairs, which models do write, survive it."""
    return json.dumps(message).encode()


def find_unsendable(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """What JSON would change or refuse, and where it is."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if type(name) is not str:
                yield f"{where} (its key {name!r})", name
            yield from find_unsendable(item, f"{where}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from find_unsendable(item, f"{where}[{index}]")
    elif not (value is None or isinstance(value, str | bool | int | float)):
        yield where, value


class MessageStream:
    """One end of a connected socket, on one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> Self:
        """The stream on this socket, which it takes over."""
        return cls(*await asyncio.open_unix_connection(sock=end, limit=_READ_BYTES))

    def send(self, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Sends, without waiting until it has arrived; nothing where the other end is gone."""
        if not self._writer.is_closing():
            # JSON has no line breaks of its own.
            frame = encode_message(message) + b"\n"
            self._writer.writelines((_LENGTH.pack(len(frame) + len(payload)), frame, payload))

    async def receive(self) -> tuple[Message, bytes]:
        """The next message and the bytes behind it. Raises EOFError when there will be none."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            frame = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise EOFError("the connection was closed") from error
        text, _, payload = frame.partition(b"\n")
        return json.loads(text), payload

    def close(self) -> None:
        """Closes the connection; may be called twice."""
        self._writer.close()

    async def wait_closed(self, timeout_seconds: float) -> None:
        """Returns when what was sent has been taken, after :meth:`close`; not later than that."""
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(timeout_seconds):
                await self._writer.wait_closed()
