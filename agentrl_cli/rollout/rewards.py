"""Reward functions: called by keyword, in a process with a deadline when they block."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl_cli.errors import DatasetError, RewardError, RewardSignatureError
from agentrl_cli.rollout.reward_workers import (
    RewardWorkers,
    find_import_path,
    parse_reward_result,
)

#: What a reward function may name besides the row's fields, and where it comes from.
SUPPLIED = {
    "completions": "the agent's final answer, as text",
    "prompt": "the row's prompt, else the text that the agent was asked",
    "messages": "the conversation that ended in the final answer",
    "prompt_ids": "token ids of the last model call's prompt",
    "completion_ids": "token ids of the last model call's completion",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a reward function said of one trajectory."""

    reward: float | None
    """None: unscored."""
    parts: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


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
        num_workers: processes (or threads) for blocking calls.
        import_path: where workers find ``fn``; None: derived from ``fn`` itself.

    Raises:
        RewardSignatureError: not a function, or one that cannot be called by keyword.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        timeout_seconds: float = 60.0,
        num_workers: int = 1,
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
                fn, import_path or find_import_path(fn), num_workers, timeout_seconds
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
            reward, parts = await self._workers.call(arguments)
        else:
            try:
                async with asyncio.timeout(self._timeout_seconds) as deadline:
                    reward, parts = parse_reward_result(await self._fn(**arguments))
            except TimeoutError:
                if not deadline.expired():
                    raise
                raise RewardError(
                    f"reward function {self.name} did not finish in {self._timeout_seconds:g} "
                    "seconds (rollout.reward_timeout_seconds)"
                ) from None
        return Score(reward=reward, parts=parts, seconds=time.perf_counter() - started)

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
