"""Reward functions: called by keyword, in a process with a deadline when they block."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from agentrl_cli.agents.agent_environment import reward_environment
from agentrl_cli.agents.agent_runner import find_prompt_text, run_in_thread
from agentrl_cli.config.experiment import count_usable_cores
from agentrl_cli.errors import DatasetError, RewardError, RewardSignatureError
from agentrl_cli.log import get_logger
from agentrl_cli.records import Interaction
from agentrl_cli.rollout.background_loop import LoopSemaphore
from agentrl_cli.rollout.reward_process import (
    Score,
    begin_worker,
    build_score,
    call_imported,
    contain_exit,
)
from agentrl_cli.scratch_folders import name_semaphores

_log = get_logger(__name__)

#: What a reward function may name besides the row's fields, and where it comes from.
SUPPLIED = {
    "completions": "the agent's final answer, as text",
    "prompt": "the row's prompt, else the text that the agent was asked",
    "messages": "the conversation that ended in the final answer",
    "prompt_ids": "token ids of the last model call's prompt",
    "completion_ids": "token ids of the last model call's completion",
}


def collect_arguments(
    row: Mapping[str, Any], last: Interaction | None, answer: str | None
) -> dict[str, Any]:
    """What a reward function may name, after the last call, and the row's other fields."""
    messages = [] if last is None else [*last.messages, *([last.reply] if last.reply else [])]
    return {
        **{str(name): value for name, value in row.items()},
        "prompt": row.get("prompt") or find_prompt_text(row),
        "completions": answer or "",
        "messages": messages,
        "prompt_ids": [] if last is None else list(last.prompt_ids),
        "completion_ids": [] if last is None else list(last.completion_ids),
    }


#: A fresh worker imports the user's module first; its deadline begins after that.
STARTUP_SECONDS = 60.0
MAX_STUCK_THREADS = 8


class AsyncRewardWrapper:
    """Awaitable form of a reward function; a blocking one never holds up other trajectories.

    Async functions are awaited. Blocking ones that can be imported by name run in worker
    processes, which are killed at the deadline. Blocking ones that cannot (lambdas, nested
    functions, callable objects, functions of the script that is being run) run in daemon
    threads: a thread cannot be killed, so after ``MAX_STUCK_THREADS`` that passed their
    deadline and still run, further calls fail with advice.

    ``await wrapper(completions=..., answer=...)`` gives the reward, ``score`` its parts too.
    Both take more than the function names: it gets what its signature asks for.

    Args:
        fn: the reward function.
        timeout_seconds: deadline of one call.
        num_workers: processes (or threads) for blocking calls; None: one for each CPU core.
        import_path: where workers find ``fn``; None: derived from ``fn`` itself.

    Raises:
        RewardSignatureError: not a function, or one that cannot be called by keyword.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        timeout_seconds: float = 60.0,
        num_workers: int | None = None,
        import_path: str | None = None,
    ) -> None:
        self._fn = fn
        self._timeout_seconds = timeout_seconds
        self.name = import_path or str(getattr(fn, "__qualname__", type(fn).__name__))
        self._parameters = _read_parameters(fn, self.name)
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        self._is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
            getattr(fn, "__call__", None)  # noqa: B004 - not a test for callability
        )
        self._workers: RewardWorkers | None = None
        if not self._is_async:
            self._workers = RewardWorkers(
                fn,
                import_path or find_import_path(fn),
                num_workers or count_usable_cores(),
                timeout_seconds,
            )

    @property
    def required(self) -> list[str]:
        """The arguments that the function cannot be called without."""
        return [
            name
            for name, p in self._parameters.items()
            if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]

    def check_rows(self, rows: Iterable[Mapping[str, Any]], where: str) -> None:
        """Holds the signature against a dataset (``where``: its config key) before any run.

        Raises:
            RewardSignatureError: a required argument that no row has a field for.
            DatasetError: some rows lack a field that the function requires.
        """
        needed = [name for name in self.required if name not in SUPPLIED]
        rows = list(rows)
        fields = sorted({str(name) for row in rows for name in row})
        for name in needed:
            missing = [number for number, row in enumerate(rows, start=1) if name not in row]
            if len(missing) == len(rows):
                raise RewardSignatureError(
                    f"reward function {self.name}: nothing supplies its argument {name!r}. "
                    f"Allowed: {', '.join(SUPPLIED)}, and the fields of {where}: "
                    f"{', '.join(fields)}. Rename the argument, give it a default, or add the "
                    "field to the dataset"
                )
            if missing:
                raise DatasetError(
                    f"{where}: row {missing[0]} (counted from 1) has no field {name!r}, which the "
                    f"reward function {self.name} needs; {len(missing)} of {len(rows)} rows lack "
                    "it. Add it, or give the argument a default"
                )

    async def __call__(self, **supplied: Any) -> float | None:
        """The reward; None: unscored. Raises as :meth:`score`."""
        return (await self.score(**supplied)).reward

    async def score(self, **supplied: Any) -> Score:
        """The reward with its named parts and the seconds it took.

        Raises:
            RewardSignatureError: a required argument is missing.
            RewardError: the deadline passed, the worker died, or the result is no reward.
            Exception: whatever the function itself raised.
        """
        missing = [name for name in self.required if name not in supplied]
        if missing:
            raise RewardSignatureError(
                f"reward function {self.name} needs {', '.join(missing)}; "
                f"supplied were: {', '.join(sorted(supplied)) or 'nothing'}"
            )
        arguments = {
            name: value
            for name, value in supplied.items()
            if self._takes_all or name in self._parameters
        }
        started = time.perf_counter()
        if self._workers is not None:
            score = await self._workers.call(arguments)
        else:
            try:
                async with asyncio.timeout(self._timeout_seconds) as deadline:
                    with reward_environment():
                        score = build_score(await self._fn(**arguments), started)
            except SystemExit as error:
                raise contain_exit(error) from error
            except TimeoutError:
                if not deadline.expired():
                    raise
                raise _build_late(self._timeout_seconds) from None
        return replace(score, seconds=time.perf_counter() - started)

    def close(self) -> None:
        """Ends the worker processes; they also end with this object or the interpreter."""
        if self._workers is not None:
            self._workers.close()


def _read_parameters(fn: Any, name: str) -> dict[str, inspect.Parameter]:
    if not callable(fn):
        raise RewardSignatureError(
            f"reward function {name} is {type(fn).__name__}, not a function. "
            "Write: def reward_fn(completions, answer, **kwargs) -> float"
        )
    try:
        parameters = dict(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        raise RewardSignatureError(
            f"reward function {name} has no readable signature: wrap it in a def"
        ) from None
    for parameter in parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise RewardSignatureError(
                f"reward function {name}: its argument {parameter.name!r} is positional-only, "
                "and agentrl passes arguments by keyword. Remove the '/' from its signature"
            )
    return parameters


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
        # A call waits here and not in the pool, so that its deadline begins with its turn.
        self._slots = LoopSemaphore(num_workers)
        self._pool: ProcessPool | None = None
        self._finalizer: weakref.finalize[..., RewardWorkers] | None = None
        self._num_stuck = 0

    async def call(self, arguments: Mapping[str, Any]) -> Score:
        """The function's score, without its seconds.

        Raises:
            RewardError: the deadline passed, the worker died, or the result is no reward.
            Exception: whatever the function itself raised.
        """
        async with self._slots.get():
            if self._import_path is None:
                return await self._call_in_thread(arguments)
            return await self._call_in_process(self._import_path, dict(arguments))

    async def _call_in_process(
        self, import_path: str, arguments: dict[str, Any], *, is_retried: bool = False
    ) -> Score:
        pool = self._pool
        if pool is None or not pool.active:
            name_semaphores()
            self._pool = pool = ProcessPool(
                max_workers=self._num_workers,
                context=multiprocessing.get_context("spawn"),
                initializer=begin_worker,
                initargs=(import_path, os.getpid()),
            )
            self._finalizer = weakref.finalize(self, _stop_pool, pool)
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            calling = asyncio.wrap_future(
                pool.schedule(
                    call_imported, args=(import_path, arguments), timeout=self._timeout_seconds
                )
            )
            # The pool's own deadline counts from the call's start in a worker. This one
            # only ends the wait for workers that cannot start at all.
            score, error = await asyncio.wait_for(calling, self._timeout_seconds + STARTUP_SECONDS)
        except TimeoutError:
            # The pool's clock goes on while this process is stopped.
            if loop.time() - started < self._timeout_seconds and not is_retried:
                return await self._call_in_process(import_path, arguments, is_retried=True)
            raise _build_late(self._timeout_seconds) from None
        except ProcessExpired as expired:
            raise RewardError(
                f"the process of reward function {import_path} died (exit code "
                f"{expired.exitcode}): it crashed, called exit, or ran out of memory"
            ) from None
        except RuntimeError as error:
            if pool.active or is_retried:
                raise
            # The pool broke before the call had begun: something outside has killed its
            # idle processes. A new pool replaces it.
            _log.warning("the reward processes were killed and are started again: %s", error)
            return await self._call_in_process(import_path, arguments, is_retried=True)
        if error is not None:
            raise error
        return score

    async def _call_in_thread(self, arguments: Mapping[str, Any]) -> Score:
        if self._num_stuck >= MAX_STUCK_THREADS:
            raise RewardError(
                f"{self._num_stuck} calls of the reward function passed their deadline and still "
                "run in threads, which cannot be killed. Put the function into a module or file "
                "of its own (reward_fn_path: path/to/file.py:name), so that it runs in a process"
            )

        def work() -> Score:
            started = time.perf_counter()
            try:
                with reward_environment():
                    return build_score(self._fn(**arguments), started)
            except SystemExit as error:
                raise contain_exit(error) from error

        calling = asyncio.ensure_future(run_in_thread(work, "reward"))
        done, _ = await asyncio.wait({calling}, timeout=self._timeout_seconds)
        if done:
            return calling.result()
        self._num_stuck += 1
        calling.add_done_callback(self._unstick)
        raise _build_late(self._timeout_seconds)

    def _unstick(self, call: asyncio.Future[Score]) -> None:
        self._num_stuck -= 1
        if not call.cancelled() and call.exception() is not None:
            _log.debug("a reward function raised after its deadline", exc_info=call.exception())

    def close(self) -> None:
        """Ends the processes; may be called twice."""
        self._pool = None
        if self._finalizer is not None:
            self._finalizer()


def _build_late(seconds: float) -> RewardError:
    return RewardError(
        f"the reward function did not finish in {seconds:g} seconds "
        "(rollout.reward_timeout_seconds)"
    )


def _stop_pool(pool: ProcessPool) -> None:
    pool.stop()
    pool.join(timeout=10)
