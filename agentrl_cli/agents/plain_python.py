"""Agents in plain Python: a function of the row, or an object with ``run``; async or not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from agentrl_cli.agents.agent_runner import AgentCall, AgentOutcome, AgentRunner, run_in_thread
from agentrl_cli.agents.anthropic_sdk import (
    build_anthropic_client,
    build_blocking_anthropic_client,
    check_anthropic,
)
from agentrl_cli.blocking_clients import build_blocking_client
from agentrl_cli.errors import BuilderError

#: What is passed, by keyword, besides the row: all of it to ``**kwargs``, else what is named.
SUPPLIED = ("base_url", "api_key", "http_client", "client", "model", "max_turns")
#: Anthropic's client, to who names it: loading the SDK takes a second.
_ANTHROPIC = "anthropic_client"


class CallableRunner(AgentRunner):
    """Runs ``function(data, **what its signature names)``.

    A function that is not async runs in a thread of its own, with a ``client``, an
    ``anthropic_client`` and an ``http_client`` that block. The returned text is the final
    answer; anything else is a reward, a dict of rewards, or None for "use the reward function".

    Raises:
        BuilderError: the signature asks for what nothing supplies, or it yields.
        MissingExtraError: it names ``anthropic_client``, and the SDK is not installed.
    """

    framework = "plain Python"
    gives_rewards = True
    input_fields = ()

    def __init__(self, function: Callable[..., Any], name: str, key: str) -> None:
        self._function = function
        self._name = name
        self._is_async = is_async(function)
        if _yields(function):
            raise BuilderError(
                f"{key}: {name} has a yield, so that calling it does nothing. Return the answer: "
                "collect what comes piece by piece, and return it at the end"
            )
        parameters = list(inspect.signature(function).parameters.values())
        first = parameters[0] if parameters else None
        if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
            raise BuilderError(
                f"{key}: {name} takes no row: its first parameter must be the dataset row, "
                f"as in async def run(data, client)"
            )
        rest = parameters if first.kind is first.VAR_POSITIONAL else parameters[1:]
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in rest)
        self._named = {p.name for p in rest if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
        self.needs_base_url = self._takes("base_url")
        for parameter in rest:
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            supplied = parameter.name in (*SUPPLIED, _ANTHROPIC) and parameter.kind is not (
                parameter.POSITIONAL_ONLY
            )
            if not variadic and not supplied and parameter.default is parameter.empty:
                raise BuilderError(
                    f"{key}: {name} asks for {parameter.name!r}, which nothing supplies. Allowed "
                    f"after the row: {', '.join(SUPPLIED)}, {_ANTHROPIC}, or **kwargs for all "
                    "but the last. The row's own fields are in its first argument: "
                    f"{first.name}[{parameter.name!r}]"
                )
        if _ANTHROPIC in self._named:
            check_anthropic(f"{key}: {name} takes {_ANTHROPIC}: it")

    async def run(self, call: AgentCall) -> AgentOutcome:
        """What the function returned for one row. Raises whatever it raised."""
        supplied = {name: getattr(call, name) for name in SUPPLIED}
        if not self._is_async and (self._takes("client") or self._takes("http_client")):
            blocking = build_blocking_client(call.client)
            supplied |= {"client": blocking, "http_client": blocking._client}
        chosen = {k: v for k, v in supplied.items() if self._takes(k)}
        if _ANTHROPIC in self._named:
            build = build_anthropic_client if self._is_async else build_blocking_anthropic_client
            chosen[_ANTHROPIC] = build(call.client)
        # A copy: an agent that writes into its row must not change its siblings' row.
        returned = await self._call(dict(call.row), chosen)
        if isinstance(returned, str):
            return AgentOutcome(final_answer=returned)
        self._check_returned(returned)
        return AgentOutcome(returned=returned)

    async def _call(self, row: dict[str, Any], supplied: dict[str, Any]) -> Any:
        if self._is_async:
            return await self._function(row, **supplied)
        call = functools.partial(self._function, row, **supplied)
        returned = await run_in_thread(call, f"agent {self._name}")
        if inspect.isawaitable(returned):
            if inspect.iscoroutine(returned):
                returned.close()
            raise TypeError(
                f"{self._name} is a plain function that returned {type(returned).__name__}, so "
                "nothing awaited it: write async def (if a decorator hides that it is async, use "
                "functools.wraps in the decorator)"
            )
        return returned

    def _check_returned(self, returned: Any) -> None:
        """Refuses what is neither an answer nor a reward: most often a framework's reply."""
        # With item: a number of numpy, torch and their like.
        if returned is None or isinstance(returned, Mapping | Real) or hasattr(returned, "item"):
            return
        raise TypeError(
            f"{self._name} returned {type(returned).__name__}: {returned!r:.120}. An agent returns "
            "its answer as text (of a framework's reply, its text alone), a reward as a number, a "
            "dict {interaction id: reward}, or None"
        )

    def _takes(self, name: str) -> bool:
        return self._takes_all or name in self._named


def is_async(function: Any) -> bool:
    """Whether calling ``function`` gives something to await, also behind a decorator."""
    return any(inspect.iscoroutinefunction(code) for code in _find_code(function))


def _yields(function: Any) -> bool:
    """Whether calling ``function`` gives a generator, which nobody would walk through."""
    return any(
        inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code)
        for code in _find_code(function)
    )


def _find_code(function: Any) -> list[Any]:
    """What runs when ``function`` is called: itself, or its method; behind decorators."""
    candidates = (function, getattr(function, "__call__", None))  # noqa: B004 - its method, if any
    return [inspect.unwrap(c) for c in candidates if c is not None]
