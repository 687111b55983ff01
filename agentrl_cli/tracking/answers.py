"""The answer to a call as it is made: for who asked, and for who asks again.

SDKs repeat a call whose connection broke. Sampling it a second time would cost a turn and put a
reply on the record that the agent never saw, so the repeated call joins the one still in
flight, or gets what was answered, byte for byte.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Iterable, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from agentrl_cli.tracking.transport import CANCELS_ON_HANG_UP

#: How long a cancelled call may take to end before nobody waits for it.
_CANCEL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class CallKey:
    """What makes two requests the same one."""

    session_id: str
    path: str
    body_digest: bytes


class Answer(Response):
    """One call's response, whoever reads it; made by a task of its own.

    The call goes on as long as anybody reads: it is cancelled when the last reader hangs up
    before the end.
    """

    def __init__(self, key: CallKey) -> None:
        # Not Response.__init__: status, headers and body come later, and from another response.
        self.key = key
        self.background = None
        self.num_readers = 0
        self.num_deliveries = 0
        """How often it was sent to its end."""
        self.num_bytes = 0
        self.has_ended = False
        self.is_whole = False
        """True: it ended well, so that a repeated call may have it."""
        self.is_cancelled = False
        """True: nobody who asks from now on gets anything of it."""
        self._head: MutableMapping[str, Any] | None = None
        self._pieces: list[bytes] = []
        self._changed = asyncio.Event()
        self._work: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begins to make the answer."""
        self._work = asyncio.create_task(work)
        return self._work

    async def take(self, response: Response) -> None:
        """Makes a response this answer: its head at once, its body as it comes.

        Raises whatever the making of a streamed body raises.
        """
        self._head = {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": response.raw_headers,
        }
        if not isinstance(response, StreamingResponse):
            self.add(bytes(response.body))
            return
        self._wake()
        pieces: Any = response.body_iterator
        async with aclosing(pieces):
            async for piece in pieces:
                self.add(piece)

    @property
    def num_pieces(self) -> int:
        """Pieces of the body that there are: of a stream, events."""
        return len(self._pieces)

    async def fail(self, refusal: Response, event: bytes) -> None:
        """Says what went wrong: as a response, or in a body that has begun, as its last event."""
        if self._pieces:
            self.add(event)
        else:
            await self.take(refusal)

    def add(self, piece: bytes) -> None:
        """The next bytes of the body."""
        self._pieces.append(piece)
        self.num_bytes += len(piece)
        self._wake()

    def end(self, *, is_whole: bool) -> None:
        """Nothing comes after this."""
        self.has_ended, self.is_whole = True, is_whole
        self._wake()

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer to one reader, from its first byte on, as it is made."""
        hung_up = False

        async def watch() -> None:
            nonlocal hung_up
            while (await receive())["type"] != "http.disconnect":
                pass
            hung_up = True
            self._wake()

        self.num_readers += 1
        is_cancelled_instead = CANCELS_ON_HANG_UP in scope.get("extensions", ())
        watching = None if is_cancelled_instead else asyncio.create_task(watch())
        try:
            num_sent = 0
            while True:
                changed = self._changed
                if hung_up:
                    raise ClientDisconnect
                num_sent = await self._send(send, num_sent)
                if self.has_ended and num_sent > len(self._pieces):
                    self.num_deliveries += not hung_up
                    return
                if not changed.is_set():
                    await changed.wait()
        except ClientDisconnect:
            return
        finally:
            if watching is not None:
                watching.cancel()
            self.num_readers -= 1
            if self.num_readers == 0 and not self.has_ended:
                await wait_cancelled([self])

    async def _send(self, send: Send, num_sent: int) -> int:
        """Sends what there is; how many messages of the body have been sent now, end included."""
        if self._head is None:
            return 0
        if num_sent == 0 and not self._pieces and not self.has_ended:
            return 0
        if num_sent == 0:
            await send(self._head)
        while num_sent < len(self._pieces):
            is_last = self.has_ended and num_sent == len(self._pieces) - 1
            piece = self._pieces[num_sent]
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
            num_sent += 1
            if is_last:
                return num_sent + 1
        if self.has_ended:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            num_sent += 1
        return num_sent

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class AnswerBook:
    """The calls in flight of a gateway, and the last answers that it gave.

    Args:
        max_kept: most answers that are kept after their end, over all sessions.
        max_kept_bytes: most bytes of them; the oldest go first.
    """

    def __init__(self, max_kept: int = 4096, max_kept_bytes: int = 64 * 2**20) -> None:
        self._max_kept = max_kept
        self._max_kept_bytes = max_kept_bytes
        self._kept: OrderedDict[Answer, None] = OrderedDict()
        self._num_kept_bytes = 0
        self._running: set[Answer] = set()
        self._by_session: dict[str, dict[CallKey, list[Answer]]] = {}
        #: Calls that were turned away and may come again, by session.
        self._refused: dict[str, Counter[CallKey]] = {}

    @property
    def num_running(self) -> int:
        """Calls in flight."""
        return len(self._running)

    def list_running(self, session_id: str) -> list[Answer]:
        """Calls of the session in flight."""
        return [a for a in self._list(session_id) if not a.has_ended]

    def find(self, key: CallKey) -> Answer | None:
        """What a repeated call gets; None: nothing like it was asked, or it is forgotten.

        Where the same was asked several times (samples of one prompt), the repeated call is
        that whose answer did not arrive: first one that nobody reads, then one in flight, then
        the latest that was sent to its end, as its reader may not have got it.
        """
        refused = self._refused.get(key.session_id)
        if refused is not None and refused[key]:
            refused[key] -= 1
            return None
        answers = self._by_session.get(key.session_id, {}).get(key, ())
        usable = [a for a in answers if a.is_whole or not (a.has_ended or a.is_cancelled)]
        return min(reversed(usable), key=_rank, default=None)

    def begin(self, key: CallKey) -> Answer:
        """A new answer, in flight until :meth:`end`."""
        answer = Answer(key)
        self._running.add(answer)
        self._by_session.setdefault(key.session_id, {}).setdefault(key, []).append(answer)
        return answer

    def refuse(self, key: CallKey) -> None:
        """Says that a call was turned away for now: when it comes again, it is new."""
        self._refused.setdefault(key.session_id, Counter())[key] += 1

    def end(self, answer: Answer, *, is_whole: bool) -> None:
        """Ends an answer; one that ended well is kept for a while."""
        answer.end(is_whole=is_whole)
        self._running.discard(answer)
        if not is_whole or answer.num_bytes > self._max_kept_bytes:
            self._forget(answer)
            return
        if answer.key.session_id not in self._by_session:
            return
        self._kept[answer] = None
        self._num_kept_bytes += answer.num_bytes
        while len(self._kept) > self._max_kept or self._num_kept_bytes > self._max_kept_bytes:
            oldest, _ = self._kept.popitem(last=False)
            self._num_kept_bytes -= oldest.num_bytes
            self._forget(oldest)

    def drop_session(self, session_id: str) -> list[Answer]:
        """Forgets what the session was answered; what it still has in flight."""
        answers = self._list(session_id)
        self._by_session.pop(session_id, None)
        self._refused.pop(session_id, None)
        for answer in answers:
            if answer in self._kept:
                del self._kept[answer]
                self._num_kept_bytes -= answer.num_bytes
        return [answer for answer in answers if not answer.has_ended]

    def _list(self, session_id: str) -> list[Answer]:
        return [a for answers in self._by_session.get(session_id, {}).values() for a in answers]

    def _forget(self, answer: Answer) -> None:
        by_key = self._by_session.get(answer.key.session_id, {})
        answers = by_key.get(answer.key, [])
        if answer in answers:
            answers.remove(answer)
        if not answers:
            by_key.pop(answer.key, None)
        if not by_key:
            self._by_session.pop(answer.key.session_id, None)


async def wait_cancelled(answers: Iterable[Answer]) -> None:
    """Cancels calls in flight and waits until they have ended."""
    tasks = {task for answer in answers if (task := answer.cancel()) is not None}
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)


def _rank(answer: Answer) -> tuple[int, int]:
    """Smaller: more likely the call whose answer got lost."""
    if answer.has_ended:
        return (0 if answer.num_deliveries == 0 else 2), answer.num_deliveries
    return 1, answer.num_readers
