"""An event loop in a thread of its own: agents continue while the trainer computes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from agentrl_cli.log import get_logger

ResultT = TypeVar("ResultT")

_log = get_logger(__name__)

#: Frameworks run tools and nodes that block in the loop's pool of threads. Python's default, 4 more
#: than there are cores, would let a handful of trajectories hold up hundreds.
_MAX_BLOCKING_THREADS = 256
#: The clock is read this often at least, so that a much longer gap was none of this process's time.
_TICK_SECONDS = 1.0
_STOPPED_SECONDS = 10.0


class RunningClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while the process is stopped (Ctrl-Z, a sleeping
    machine), so that this counts against no deadline in it."""

    def __init__(self) -> None:
        self._clock_lock = threading.Lock()
        self._last_read = _read_clock()
        self._stopped_seconds = 0.0
        super().__init__()
        self._tick()

    def time(self) -> float:
        """Seconds that the process was running; any thread may ask."""
        with self._clock_lock:
            now = _read_clock()
            gap, self._last_read = now - self._last_read, now
            if gap > _STOPPED_SECONDS:
                self._stopped_seconds += gap
            return now - self._stopped_seconds

    def _tick(self) -> None:
        self.call_later(_TICK_SECONDS, self._tick)


def _read_clock() -> float:
    return time.monotonic()


class BackgroundLoop:
    """Runs coroutines for a thread that has no event loop.

    The thread is a daemon: a command that is interrupted twice never waits for it.
    """

    def __init__(self, name: str = "agentrl-rollout") -> None:
        self._loop = RunningClockLoop()
        self._loop.set_default_executor(
            concurrent.futures.ThreadPoolExecutor(_MAX_BLOCKING_THREADS, "agentrl-blocking")
        )
        self._closing = False
        self._grace_seconds = 10.0
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    @property
    def loop(self) -> RunningClockLoop:
        """The loop; from other threads, its clock may be read."""
        return self._loop

    @property
    def thread_id(self) -> int | None:
        """That of the loop's thread."""
        return self._thread.ident

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        is_running = True
        try:
            while is_running:
                try:
                    self._loop.run_forever()
                    is_running = False
                except SystemExit as error:
                    # asyncio ends its loop for one; who awaits the task gets it all the same.
                    _log.warning("a task called exit(%r): that ends nothing else", error.code)
        finally:
            self._loop.run_until_complete(_cancel_all(self._grace_seconds))
            self._loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, ResultT]) -> concurrent.futures.Future[ResultT]:
        """A future of the coroutine, which starts at once; cancelling it cancels the coroutine."""
        if self._closing:
            coroutine.close()
            raise RuntimeError("the background loop was closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def post(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Has the loop call ``callback``, before anything that comes to it later."""
        if not self._closing:
            self._loop.call_soon_threadsafe(callback, *arguments)

    def run(self, coroutine: Coroutine[Any, Any, ResultT], timeout_seconds: float) -> ResultT:
        """The coroutine's result; it is cancelled at the deadline, or when Ctrl-C interrupts.

        Raises:
            TimeoutError: the deadline passed.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("run() would wait for its own thread: await the coroutine instead")
        future = self.submit(coroutine)
        deadline = self._loop.time() + timeout_seconds
        try:
            while not future.done() and (left := deadline - self._loop.time()) > 0:
                concurrent.futures.wait([future], timeout=min(left, _TICK_SECONDS))
            if future.done():
                return future.result()
        except BaseException:
            future.cancel()
            raise
        future.cancel()
        name = getattr(coroutine, "__qualname__", "the coroutine")
        raise TimeoutError(f"{name} did not finish in {timeout_seconds:g} seconds")

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Cancels what still runs and ends the thread; may be called twice."""
        if not self._closing:
            self._closing = True
            self._grace_seconds = timeout_seconds
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_seconds + 1.0)
        if self._thread.is_alive():
            _log.warning("the background loop is blocked by code that does not await; leaving it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class LoopSemaphore:
    """A limit for one event loop after another: asyncio's belongs to the loop that first waits."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def get(self) -> asyncio.Semaphore:
        """The running loop's semaphore."""
        loop = asyncio.get_running_loop()
        if self._held is None or self._held[0] is not loop:
            self._held = (loop, asyncio.Semaphore(self._limit))
        return self._held[1]


async def _cancel_all(timeout_seconds: float) -> None:
    """Cancels every other task of the running loop and waits until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if not others:
        return
    _, pending = await asyncio.wait(others, timeout=timeout_seconds)
    for task in pending:
        _log.warning("a task ignored its cancellation and is left behind: %r", task)
    await asyncio.get_running_loop().shutdown_asyncgens()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """A block inside which objects that existed before it are not searched for garbage.

    Torch and transformers leave a million objects behind. Searching them stops the process for
    250 ms, and calls passing through it make Python do so every few hundred calls: at 256
    sessions that was half of the CPU time of gateway and router.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        # What is frozen at the exit of the interpreter is reported as leaked by some libraries.
        gc.unfreeze()
