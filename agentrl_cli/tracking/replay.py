"""The reply to a model call as it is made: for the client that asked, and for one that asks again.

SDKs repeat a call whose connection broke. Sampling it a second time would cost a turn and record
a reply that the agent never saw, so the repeated call joins the one still in flight, or gets the
same reply, byte for byte.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import httpx2
from starlette.types import Receive, Send

from agentrl_cli.tracking.protocols.model_request import Problem

#: How long a cancelled call may take to end before nobody waits for it.
_CANCEL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class CallKey:
    """What makes two requests the same one."""

    session_id: str
    path: str
    body_digest: bytes


#: Of replies that are no call's, such as refusals: nobody can ask for them again.
_NO_CALL = CallKey("", "", b"")


class Reply:
    """Status, headers and body of one reply; the body grows while a task of its own makes it.

    The call runs as long as anybody reads: it is cancelled when the last reader leaves before
    the end.
    """

    def __init__(self, key: CallKey = _NO_CALL, *, has_ended: bool = False) -> None:
        self.key = key
        self.status = 200
        self.headers: dict[str, str] = {}
        self.pieces: list[bytes] = []
        """The body so far; of a stream, its events."""
        self.changed = asyncio.Condition()
        """Notified of new pieces and of the end. Nobody suspends while holding it."""
        self.num_readers = 0
        self.num_deliveries = 0
        """How often it was sent to its end."""
        self.has_ended = has_ended
        self.is_complete = False
        """True: it ended well, so that a repeated call may have it."""
        self.is_cancelled = False
        """True: no client that asks from now on gets anything of it."""
        self.format_failure: Callable[[Problem], bytes] | None = None
        """The last events of a stream that breaks off; None: it is no stream."""
        self._work: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begins to make the reply."""
        self._work = asyncio.create_task(work)

    def set_body(
        self, data: bytes | dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """Sets all of a reply that is not streamed; ``data`` is JSON. It is sent at the end."""
        text = data if isinstance(data, bytes) else json.dumps(data, ensure_ascii=False).encode()
        length = {"content-length": str(len(text))}
        self.status = status
        self.headers = {"content-type": "application/json", **length, **(headers or {})}
        self.pieces = [text]

    def begin_stream(self, format_failure: Callable[[Problem], bytes]) -> None:
        """Makes this a stream of events; nothing is sent before the first."""
        self.headers = {"content-type": "text/event-stream; charset=utf-8"}
        self.format_failure = format_failure

    async def add(self, piece: bytes) -> None:
        """The next events of a stream; empty: none yet."""
        if piece:
            async with self.changed:
                self.pieces.append(piece)
                self.changed.notify_all()

    async def end(self, *, is_complete: bool) -> None:
        """Nothing comes after this."""
        async with self.changed:
            self.has_ended, self.is_complete = True, is_complete
            self.changed.notify_all()

    @property
    def num_bytes(self) -> int:
        """Bytes of the body."""
        return sum(map(len, self.pieces))

    def cancel(self) -> asyncio.Task[None] | None:
        """Cancels the call; its task, None when it has ended."""
        work = self._work
        if work is None or work.done():
            return None
        self.is_cancelled = True
        if inspect.getcoroutinestate(work.get_coro()) == inspect.CORO_CREATED:  # type: ignore[arg-type]
            # Cancelled before its first step it would never run, and its readers wait for ever.
            asyncio.get_running_loop().call_soon(work.cancel)
        else:
            work.cancel()
        return work


class ReplyStream(httpx2.AsyncByteStream):
    """One reader's way through a reply, from its first byte on, as it is made."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._num_read = 0
        self._has_left = False
        reply.num_readers += 1

    async def wait_for_news(self) -> bool:
        """Returns when there is something to read, or nothing more to come; False: has left."""
        reply = self._reply
        async with reply.changed:
            await reply.changed.wait_for(
                lambda: self._has_left or reply.has_ended or len(reply.pieces) > self._num_read
            )
        return not self._has_left

    def read(self) -> bytes:
        """What has come since the last time."""
        new = self._reply.pieces[self._num_read :]
        self._num_read += len(new)
        return b"".join(new)

    @property
    def is_at_end(self) -> bool:
        """Whether all was read that will ever come."""
        return self._reply.has_ended and self._num_read == len(self._reply.pieces)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while await self.wait_for_news() and not self.is_at_end:
            yield self.read()

    async def aclose(self) -> None:
        """Leaves, having read all or not."""
        await self.leave(is_delivered=self.is_at_end)

    async def leave(self, *, is_delivered: bool) -> None:
        """Ends the reading; a call in flight that nobody else reads is cancelled."""
        if self._has_left:
            return
        reply = self._reply
        self._has_left = True
        reply.num_readers -= 1
        reply.num_deliveries += is_delivered
        if reply.num_readers == 0 and not reply.has_ended:
            await wait_cancelled([reply])

    async def send(self, receive: Receive, send: Send) -> None:
        """Sends the reply to a client behind a socket, until it hangs up."""
        # Of a complete reply, such as a refusal, nothing is read: the body may be a stranger's.
        is_made = self._reply.has_ended
        watching = None if is_made else asyncio.create_task(self._leave_on_disconnect(receive))
        try:
            if not await self.wait_for_news():
                return
            headers = [(k.encode(), v.encode()) for k, v in self._reply.headers.items()]
            status = self._reply.status
            await send({"type": "http.response.start", "status": status, "headers": headers})
            while await self.wait_for_news():
                body, is_last = self.read(), self.is_at_end
                message = {"type": "http.response.body", "body": body, "more_body": not is_last}
                await send(message)
                if is_last:
                    return
        finally:
            if watching is not None:
                watching.cancel()
            await self.aclose()

    async def _leave_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await self.leave(is_delivered=False)
        async with self._reply.changed:
            self._reply.changed.notify_all()


class ReplyBook:
    """The calls in flight of a gateway, and the last replies that it gave.

    Args:
        max_kept: maximum number of replies kept after their end, over all sessions.
        max_kept_bytes: maximum number of their bytes; the oldest go first.
    """

    def __init__(self, max_kept: int = 4096, max_kept_bytes: int = 64 * 2**20) -> None:
        self._max_kept = max_kept
        self._max_kept_bytes = max_kept_bytes
        self._kept: OrderedDict[Reply, None] = OrderedDict()
        self._num_kept_bytes = 0
        self._running: set[Reply] = set()
        self._by_session: dict[str, dict[CallKey, list[Reply]]] = {}
        #: Calls that were turned away and may come again, by session.
        self._refused: dict[str, Counter[CallKey]] = {}

    @property
    def num_running(self) -> int:
        """Calls in flight."""
        return len(self._running)

    def list_running(self, session_id: str) -> list[Reply]:
        """Calls of the session in flight."""
        return [reply for reply in self._list(session_id) if not reply.has_ended]

    def find(self, key: CallKey) -> Reply | None:
        """What a repeated call gets; None: nothing like it was asked, or it is forgotten.

        Where the same was asked several times (samples of one prompt), the repeated call is
        the one whose reply did not arrive: first one that nobody reads, then one in flight, then
        the latest that was sent to its end, as its reader may not have got it.
        """
        refused = self._refused.get(key.session_id)
        if refused is not None and refused[key]:
            refused[key] -= 1
            return None
        replies = self._by_session.get(key.session_id, {}).get(key, ())
        usable = [r for r in replies if r.is_complete or not (r.has_ended or r.is_cancelled)]
        return min(reversed(usable), key=_rank, default=None)

    def begin(self, key: CallKey) -> Reply:
        """A new reply, in flight until :meth:`end`."""
        reply = Reply(key)
        self._running.add(reply)
        self._by_session.setdefault(key.session_id, {}).setdefault(key, []).append(reply)
        return reply

    def refuse(self, key: CallKey) -> None:
        """Notes that a call was turned away for now: when it comes again, it is new."""
        self._refused.setdefault(key.session_id, Counter())[key] += 1

    async def end(self, reply: Reply, *, is_complete: bool) -> None:
        """Ends a reply; one that ended well is kept for a while."""
        await reply.end(is_complete=is_complete)
        self._running.discard(reply)
        if not is_complete or reply.num_bytes > self._max_kept_bytes:
            self._forget(reply)
            return
        if reply.key.session_id not in self._by_session:
            return
        self._kept[reply] = None
        self._num_kept_bytes += reply.num_bytes
        while len(self._kept) > self._max_kept or self._num_kept_bytes > self._max_kept_bytes:
            oldest, _ = self._kept.popitem(last=False)
            self._num_kept_bytes -= oldest.num_bytes
            self._forget(oldest)

    def drop_session(self, session_id: str) -> list[Reply]:
        """Forgets the session's replies; those still in flight."""
        replies = self._list(session_id)
        self._by_session.pop(session_id, None)
        self._refused.pop(session_id, None)
        for reply in replies:
            if reply in self._kept:
                del self._kept[reply]
                self._num_kept_bytes -= reply.num_bytes
        return [reply for reply in replies if not reply.has_ended]

    def _list(self, session_id: str) -> list[Reply]:
        return [r for replies in self._by_session.get(session_id, {}).values() for r in replies]

    def _forget(self, reply: Reply) -> None:
        by_key = self._by_session.get(reply.key.session_id, {})
        replies = by_key.get(reply.key, [])
        if reply in replies:
            replies.remove(reply)
        if not replies:
            by_key.pop(reply.key, None)
        if not by_key:
            self._by_session.pop(reply.key.session_id, None)


async def wait_cancelled(replies: Iterable[Reply]) -> None:
    """Cancels calls in flight and waits until they have ended."""
    tasks = {task for reply in replies if (task := reply.cancel()) is not None}
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)


def _rank(reply: Reply) -> tuple[int, int]:
    """Smaller: more likely the call whose reply got lost."""
    if reply.has_ended:
        return (0 if reply.num_deliveries == 0 else 2), reply.num_deliveries
    return 1, reply.num_readers
