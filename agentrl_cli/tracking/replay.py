"""The reply to a model call as it is made: for the client that asked, and for one that asks again.

SDKs repeat a call whose connection broke. Sampling it a second time would cost a turn and record
a reply that the agent never saw, so the repeated call joins the one still in flight, or gets the
same reply, byte for byte. Clients read it through a socket, or in the same event loop without one.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import OrderedDict
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
)
from typing import Any

import httpx2
from starlette.types import Receive, Send

from agentrl_cli.tracking.protocols.model_request import Problem

#: How long a cancelled call may take to end before nobody waits for it.
_CANCEL_SECONDS = 10.0
#: What makes two requests the same one: the session's id, the path, the digest of the body.
CallKey = tuple[str, str, bytes]


class Reply:
    """Status, headers and body of one reply; the body grows while a task of its own makes it.

    The call runs as long as anybody reads: it is cancelled when the last reader leaves before
    the end.

    Args:
        key: of the call; of what is no call's, such as a refusal, nobody can ask again.
        has_ended: nothing is made: the body is set at once.
    """

    __slots__ = (
        "_news", "_work", "format_failure", "has_ended", "headers", "is_cancelled", "is_complete",
        "key", "num_deliveries", "num_readers", "pieces", "status",
    )  # fmt: skip

    def __init__(self, key: CallKey = ("", "", b""), *, has_ended: bool = False) -> None:
        self.key = key
        self.status = 200
        self.headers: dict[str, str] = {}
        self.pieces: list[bytes] = []
        """The body so far; of a stream, its events."""
        self.num_readers = 0
        self.num_deliveries = 0
        """How often it was read to its end."""
        self.has_ended = has_ended
        self.is_complete = False
        """True: it ended well, so that a repeated call may have it."""
        self.is_cancelled = False
        """True: no client that asks from now on gets anything of it."""
        self.format_failure: Callable[[Problem], bytes] | None = None
        """The last events of a stream that breaks off; None: it is no stream."""
        self._work: asyncio.Task[None] | None = None
        #: Made for those who wait: a session keeps hundreds of replies that nobody waits for.
        self._news: asyncio.Event | None = None

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

    def add(self, piece: bytes) -> None:
        """The next events of a stream; empty: none yet."""
        if piece:
            self.pieces.append(piece)
            self.wake_readers()

    def end(self, *, is_complete: bool) -> None:
        """Nothing comes after this."""
        self.has_ended, self.is_complete = True, is_complete
        self._work = None
        self.wake_readers()

    def wake_readers(self) -> None:
        """Lets all who wait at this moment look again."""
        if self._news is not None:
            self._news.set()
            self._news = None

    async def wait_until(self, is_due: Callable[[], bool]) -> None:
        """Returns when ``is_due``, which only what wakes readers changes."""
        while not is_due():
            self._news = self._news or asyncio.Event()
            await self._news.wait()

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
        await reply.wait_until(
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
        """Ends the reading; a call in flight that nobody else reads is cancelled."""
        if self._has_left:
            return
        reply = self._reply
        self._has_left = True
        reply.num_readers -= 1
        reply.num_deliveries += self.is_at_end
        reply.wake_readers()
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
            is_last = False
            while not is_last and await self.wait_for_news():
                body, is_last = self.read(), self.is_at_end
                message = {"type": "http.response.body", "body": body, "more_body": not is_last}
                await send(message)
        finally:
            if watching is not None:
                watching.cancel()
            await self.aclose()

    async def _leave_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await self.aclose()


class ReplyBook:
    """The calls in flight of a gateway, and the last replies that it gave.

    Args:
        max_kept: maximum number of replies kept after their end, over all sessions.
        max_kept_bytes: maximum number of their bytes; the oldest go first.
        max_kept_of_session: maximum number kept of one session, whose next calls show that the
            older replies arrived.
    """

    def __init__(
        self,
        max_kept: int = 4096,
        max_kept_bytes: int = 64 * 2**20,
        max_kept_of_session: int = 64,
    ) -> None:
        self._max_kept = max_kept
        self._max_kept_of_session = max_kept_of_session
        self._max_kept_bytes = max_kept_bytes
        self._kept: OrderedDict[Reply, None] = OrderedDict()
        self._num_kept_bytes = 0
        self._by_session: dict[str, list[Reply]] = {}
        self.num_running = 0
        """Calls in flight."""

    def list_running(self, session_id: str) -> list[Reply]:
        """Calls of the session in flight."""
        return [reply for reply in self._by_session.get(session_id, ()) if not reply.has_ended]

    def find(self, key: CallKey) -> Reply | None:
        """What a repeated call gets; None: nothing like it was asked, or it is forgotten.

        Where the same was asked several times (samples of one prompt), the repeated call is
        the one whose reply did not arrive: first one that nobody reads, then one in flight, then
        the latest that was read to its end, as its reader may not have got it.
        """
        replies = [r for r in self._by_session.get(key[0], ()) if r.key == key]
        refused = next((r for r in replies if r.has_ended and not r.is_complete), None)
        if refused is not None:
            self._forget(refused)
            return None
        usable = [r for r in replies if r.is_complete or not r.is_cancelled]
        return min(reversed(usable), key=lambda r: (r.num_deliveries, r.num_readers), default=None)

    def begin(self, key: CallKey) -> Reply:
        """A new reply, in flight until :meth:`end`."""
        reply = Reply(key)
        self.num_running += 1
        self._by_session.setdefault(key[0], []).append(reply)
        return reply

    def refuse(self, key: CallKey) -> None:
        """Notes that a call was turned away for now: when it comes again, it is new."""
        self._by_session.setdefault(key[0], []).append(Reply(key, has_ended=True))

    def end(self, reply: Reply, *, is_complete: bool) -> None:
        """Ends a reply; one that ended well is kept for a while."""
        reply.end(is_complete=is_complete)
        self.num_running -= 1
        if not is_complete or reply.num_bytes > self._max_kept_bytes:
            self._forget(reply)
        elif reply.key[0] in self._by_session:
            self._kept[reply] = None
            self._num_kept_bytes += reply.num_bytes
            kept = [r for r in self._by_session[reply.key[0]] if r.has_ended]
            for oldest in kept[: -self._max_kept_of_session]:
                self._forget(oldest)
        while len(self._kept) > self._max_kept or self._num_kept_bytes > self._max_kept_bytes:
            self._forget(next(iter(self._kept)))

    def drop_session(self, session_id: str) -> list[Reply]:
        """Forgets the session's replies; those still in flight."""
        running = self.list_running(session_id)
        for reply in tuple(self._by_session.get(session_id, ())):
            self._forget(reply)
        return running

    def _forget(self, reply: Reply) -> None:
        session_id, *_ = reply.key
        replies = self._by_session.get(session_id, [])
        if reply in replies:
            replies.remove(reply)
        if not replies:
            self._by_session.pop(session_id, None)
        if reply in self._kept:
            del self._kept[reply]
            self._num_kept_bytes -= reply.num_bytes


async def wait_cancelled(replies: Iterable[Reply]) -> None:
    """Cancels calls in flight and waits until they have ended."""
    tasks = {task for reply in replies if (task := reply.cancel()) is not None}
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)


class SharedClient(httpx2.AsyncClient):
    """The way into a gateway in the same event loop, for any number of SDK clients.

    SDKs close the client that they are given when they are closed; this one stays open for
    the others until :meth:`end`.

    Args:
        respond: the gateway's own, which gets method, path, headers and body.
    """

    def __init__(
        self,
        respond: Callable[[str, str, Mapping[str, str], AsyncIterable[bytes]], Awaitable[Reply]],
    ) -> None:
        transport = _InProcessTransport(respond)
        super().__init__(transport=transport, timeout=httpx2.Timeout(None))

    async def aclose(self) -> None:
        """Does nothing: others may still use the client."""

    async def __aenter__(self) -> SharedClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Does nothing: others may still use the client."""

    async def end(self) -> None:
        """Closes it for all."""
        await super().aclose()


class _InProcessTransport(httpx2.AsyncBaseTransport):
    """Hands requests to a gateway; closing a response early cancels its call."""

    def __init__(self, respond: Callable[..., Awaitable[Reply]]) -> None:
        self._respond = respond

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Waits until the response begins; its body streams as it is made."""
        reply = await self._respond(
            request.method, request.url.path, request.headers, request.stream
        )
        stream = ReplyStream(reply)
        try:
            await stream.wait_for_news()
        except BaseException:
            await stream.aclose()
            raise
        if not reply.has_ended:
            return httpx2.Response(reply.status, headers=reply.headers, stream=stream)
        # Most replies are complete by now: read at once they take a tenth less time.
        body = stream.read()
        await stream.aclose()
        return httpx2.Response(reply.status, headers=reply.headers, content=body)
