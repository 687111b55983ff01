"""Where blocking reward functions run: worker processes, or threads where that cannot be."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from agentrl_cli.agents.agent_runner import run_in_thread
from agentrl_cli.config.import_paths import import_object
from agentrl_cli.errors import ImportPathError, RewardError
from agentrl_cli.log import get_logger
from agentrl_cli.tracking.credit import parse_reward

Parsed = tuple[float | None, dict[str, float]]

_log = get_logger(__name__)

_ALLOWED = (
    "Allowed: a number, True or False, None (unscored), or a dict of named numbers with 'reward'"
)
#: A fresh worker imports the user's module first; its deadline begins after that.
STARTUP_SECONDS = 60.0
MAX_STUCK_THREADS = 8
#: From <sys/prctl.h>: the signal that a process gets when its parent dies.
_PR_SET_PDEATHSIG = 1


def find_import_path(fn: Callable[..., Any]) -> str | None:
    """The path under which another process finds ``fn``; None where there is none.

    Functions of ``__main__`` have none: importing the script again in a worker would run it.
    """
    module_name = getattr(fn, "__module__", None)
    name = getattr(fn, "__qualname__", "")
    if not module_name or module_name in ("__main__", "__mp_main__") or not name.isidentifier():
        return None
    module = sys.modules.get(module_name)
    if module is None or getattr(module, name, None) is not fn:
        return None
    file = getattr(module, "__file__", None)
    if _find_origin(module_name) == file:
        return f"{module_name}:{name}"
    # Loaded from a file, under a name that leads nowhere: the file is the way to it.
    return f"{Path(file).resolve()}:{name}" if file else None


def _find_origin(module_name: str) -> str | None:
    """The file that a fresh process would import under this name."""
    search: Sequence[str] | None = None
    origin = None
    parts = module_name.split(".")
    for length in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:length]), search)
        if spec is None:
            return None
        search, origin = spec.submodule_search_locations, spec.origin
    return origin


class RewardWorkers:
    """Calls one blocking reward function without holding up the event loop."""

    def __init__(
        self,
        fn: Callable[..., Any],
        import_path: str | None,
        num_workers: int,
        timeout_seconds: float,
    ) -> None:
        self._fn = fn
        self._import_path = import_path
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds
        self._pool: ProcessPool | None = None
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._finalizer: weakref.finalize[..., RewardWorkers] | None = None
        self._semaphore: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._num_stuck = 0

    async def call(self, arguments: Mapping[str, Any]) -> Parsed:
        """The function's parsed result.

        Raises:
            RewardError: the deadline passed, the worker died, or the result is no reward.
            Exception: whatever the function itself raised.
        """
        if self._import_path is None:
            return await self._call_in_thread(arguments)
        return await self._call_in_process(self._import_path, arguments)

    async def _call_in_process(self, import_path: str, arguments: Mapping[str, Any]) -> Parsed:
        pool, rounds = self._enter_pool(import_path)
        try:
            return await self._call_in_pool(pool, import_path, arguments, rounds)
        except (BrokenProcessPool, RuntimeError) as error:
            if pool.active:
                raise
            # The pool broke before the call had begun: something outside has killed its
            # idle processes. A new pool replaces it.
            _log.warning("the reward processes were killed and are started again: %s", error)
            pool, rounds = self._enter_pool(import_path, is_counted=True)
            return await self._call_in_pool(pool, import_path, arguments, rounds)
        finally:
            with self._lock:
                self._num_waiting -= 1

    def _enter_pool(self, import_path: str, *, is_counted: bool = False) -> tuple[ProcessPool, int]:
        """A working pool, and how many calls deep its queue is; counts this call in.

        ``is_counted``: the call was counted in before.
        """
        with self._lock:
            if self._pool is None or not self._pool.active:
                self._pool = ProcessPool(
                    max_workers=self._num_workers,
                    context=multiprocessing.get_context("spawn"),
                    initializer=_begin_worker,
                    initargs=(import_path,),
                )
                self._finalizer = weakref.finalize(self, _stop_pool, self._pool)
            self._num_waiting += not is_counted
            return self._pool, 1 + self._num_waiting // self._num_workers

    async def _call_in_pool(
        self, pool: ProcessPool, import_path: str, arguments: Mapping[str, Any], rounds: int
    ) -> Parsed:
        future = pool.schedule(
            _call_imported, args=(import_path, dict(arguments)), timeout=self._timeout_seconds
        )
        try:
            # The pool's own deadline counts from the call's start in a worker. This one
            # only ends the wait for a pool whose workers cannot start at all.
            async with asyncio.timeout(rounds * self._timeout_seconds + STARTUP_SECONDS):
                parsed, error = await asyncio.wrap_future(future)
        except (TimeoutError, concurrent.futures.TimeoutError):
            future.cancel()
            raise self._late() from None
        except ProcessExpired as expired:
            raise RewardError(
                f"the process of reward function {import_path} died (exit code "
                f"{expired.exitcode}): it crashed, called exit, or ran out of memory"
            ) from None
        if error is not None:
            raise error
        return parsed

    async def _call_in_thread(self, arguments: Mapping[str, Any]) -> Parsed:
        if self._num_stuck >= MAX_STUCK_THREADS:
            raise RewardError(
                f"{self._num_stuck} calls of the reward function passed their deadline and still "
                "run in threads, which cannot be killed. Put the function into a module or file "
                "of its own (reward_fn_path: path/to/file.py:name), so that it runs in a process"
            )
        async with self._slots():
            calling = asyncio.ensure_future(
                run_in_thread(lambda: parse_reward_result(self._fn(**arguments)), "reward")
            )
            done, _ = await asyncio.wait({calling}, timeout=self._timeout_seconds)
            if done:
                return calling.result()
            self._num_stuck += 1
            calling.add_done_callback(self._unstick)
            raise self._late()

    def _slots(self) -> asyncio.Semaphore:
        """The running loop's semaphore: asyncio's belong to the loop that first waits on them."""
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._semaphore[0] is not loop:
            self._semaphore = (loop, asyncio.Semaphore(self._num_workers))
        return self._semaphore[1]

    def _unstick(self, call: asyncio.Future[Parsed]) -> None:
        self._num_stuck -= 1
        if not call.cancelled() and call.exception() is not None:
            _log.debug("a reward function raised after its deadline", exc_info=call.exception())

    def _late(self) -> RewardError:
        return RewardError(
            f"the reward function did not finish in {self._timeout_seconds:g} seconds "
            "(rollout.reward_timeout_seconds)"
        )

    def close(self) -> None:
        """Ends the processes; may be called twice."""
        with self._lock:
            self._pool = None
            if self._finalizer is not None:
                self._finalizer()


def _stop_pool(pool: ProcessPool) -> None:
    pool.stop()
    pool.join(timeout=10)


def _begin_worker(import_path: str) -> None:
    """Runs in a fresh worker, before its first call.

    Imports early, because a slow import must not count against the first call's deadline.
    """
    _part_from_terminal()
    try:
        import_object(import_path, "reward_fn_path")
    except ImportPathError as error:
        # The call that follows imports again and carries the error back.
        _log.debug("reward worker: %s", error)


def _part_from_terminal() -> None:
    """Keeps Ctrl-C, which goes to every process of a terminal, from ending the workers.

    The run drains on it, and needs them for that. They end with the run: even when that is
    killed, where the system (Linux) can see to it.
    """
    if hasattr(os, "setsid"):
        os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _call_imported(import_path: str, arguments: dict[str, Any]) -> tuple[Parsed, Exception | None]:
    """Runs in a worker: what the function returned, or raised, in a form that can travel."""
    try:
        fn = import_object(import_path, "reward_fn_path")
        # Parsed here, so that no array or tensor has to cross between processes.
        return parse_reward_result(fn(**arguments)), None
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RewardError(f"{type(error).__name__}: {error}")
        error.add_note(f"In the reward process:\n{text}")
        return (None, {}), error


def parse_reward_result(result: Any) -> tuple[float | None, dict[str, float]]:
    """A reward function's result as (reward, parts); the reward is None for None and NaN.

    Raises:
        RewardError: the result is no reward.
    """
    if not isinstance(result, Mapping):
        return _parse(result, "the reward"), {}
    if "reward" not in result:
        raise RewardError(
            f"the reward function returned a dict without 'reward' (it has: "
            f"{', '.join(map(str, result)) or 'nothing'}). {_ALLOWED}"
        )
    named = {str(name): _parse(value, f"the part {name!r}") for name, value in result.items()}
    reward = named.pop("reward")
    return reward, {name: value for name, value in named.items() if value is not None}


def _parse(value: Any, what: str) -> float | None:
    try:
        return parse_reward(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardError(f"{what} is not usable: {error}. {_ALLOWED}") from None
