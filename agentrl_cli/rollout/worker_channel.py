"""Messages between the trainer, the host of its workers and each of them: JSON, one a line.

Nothing that is read here can run code, and no line is longer than ``MAX_MESSAGE_BYTES``.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

#: A row with images as text fits; a runaway answer does not.
MAX_MESSAGE_BYTES = 32 * 2**20
_PIECE_BYTES = 2**18
_MAX_DESCRIPTORS = 8


class ChannelError(Exception):
    """What came is no message, or what was to be sent cannot be one."""


def encode_message(message: Mapping[str, Any]) -> bytes:
    """The message as one line.

    Raises:
        ChannelError: it holds what JSON cannot say, or is too long.
    """
    try:
        # Plain ASCII: halves of surrogate pairs, which models do write, survive it.
        line = json.dumps(message).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ChannelError(f"this cannot be sent as JSON: {error}") from None
    if len(line) > MAX_MESSAGE_BYTES:
        raise ChannelError(f"{len(line)} bytes are too many, allowed are {MAX_MESSAGE_BYTES}")
    return line


class Channel:
    """One end of a pair of sockets; from one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._received = bytearray()
        self._num_searched = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.descriptors: deque[int] = deque()
        """Of :meth:`take_pending`: what came along with messages, in their order."""

    @property
    def has_line(self) -> bool:
        """True when a whole message has been received."""
        return self._find_end() >= 0

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Sends, and waits until it is on its way.

        Raises:
            ChannelError: it cannot be a message.
            OSError: the other end is gone, or does not read.
        """
        line = encode_message(message)
        if descriptors:
            sent = socket.send_fds(self.socket, [line], list(descriptors))
            line = line[sent:]
        self.socket.sendall(line)

    def receive(self) -> Message | None:
        """The next message; None: the other end is closed.

        Raises:
            ChannelError: what came is no message.
            TimeoutError: the socket's timeout passed.
        """
        while not self.has_line:
            piece = self.socket.recv(_PIECE_BYTES)
            if not piece:
                return None
            self._received += piece
        return self._take_line()

    def take_pending(self) -> list[Message] | None:
        """What has come to a socket that is ready to be read; None: the other end is closed."""
        piece, descriptors, _, _ = socket.recv_fds(self.socket, _PIECE_BYTES, _MAX_DESCRIPTORS)
        self.descriptors.extend(descriptors)
        if not piece:
            return None
        self._received += piece
        messages = []
        while self.has_line:
            messages.append(self._take_line())
        return messages

    async def send_async(self, message: Mapping[str, Any]) -> None:
        """As :meth:`send`, on the running event loop."""
        line = encode_message(message)
        await self._use_loop().sock_sendall(self.socket, line)

    async def receive_async(self) -> Message | None:
        """As :meth:`receive`, on the running event loop; what has come survives a cancellation."""
        loop = self._use_loop()
        while not self.has_line:
            piece = await loop.sock_recv(self.socket, _PIECE_BYTES)
            if not piece:
                return None
            self._received += piece
        return self._take_line()

    def close(self) -> None:
        """Closes this end, also while it is waited on; may be called twice."""
        number, loop = self.socket.fileno(), self._loop
        if number >= 0 and loop is not None and not loop.is_closed():
            # The loop would go on watching the number, which is soon another socket's.
            loop.remove_reader(number)
            loop.remove_writer(number)
        self.socket.close()

    def _use_loop(self) -> asyncio.AbstractEventLoop:
        self._loop = asyncio.get_running_loop()
        self.socket.setblocking(False)
        return self._loop

    def _find_end(self) -> int:
        found = self._received.find(b"\n", self._num_searched)
        if found < 0:
            self._num_searched = len(self._received)
            if self._num_searched > MAX_MESSAGE_BYTES:
                raise ChannelError(f"a line is longer than {MAX_MESSAGE_BYTES} bytes")
        return found

    def _take_line(self) -> Message:
        end = self._find_end()
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        self._num_searched = 0
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ChannelError(f"a line is not JSON: {error}: {line[:80]!r}") from None
        if not isinstance(message, dict) or not isinstance(message.get("op"), str):
            raise ChannelError(f"a line is no message: {line[:80]!r}")
        return message
