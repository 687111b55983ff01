"""From what a builder returned to a runner, chosen by the module of its type."""

from __future__ import annotations

import inspect
from typing import Any

from agentrl_cli.agents.callable import CallableRunner
from agentrl_cli.agents.openai_agents import OpenAIAgentRunner
from agentrl_cli.agents.runner import AgentRunner
from agentrl_cli.errors import BuilderError

_ALLOWED = """\
A builder may return
  - an agents.Agent (OpenAI Agents SDK)
  - an async function of the row: async def solve(data, client): ...
  - an object with async def run(self, data, client): ..."""


def adapt_agent(built: Any, key: str) -> AgentRunner:
    """The runner of what a builder returned; ``key`` is the builder's config key.

    Raises:
        BuilderError: nothing agentrl can run; the message says what was found.
    """
    if _is_kind_of(built, "agents.agent", "Agent"):
        return OpenAIAgentRunner(built)
    if not isinstance(built, type):
        for function, name in _entry_points(built):
            if _is_async(function):
                return CallableRunner(function, name, key)
    raise BuilderError(f"{key}: the builder returned {_describe(built)}.\n{_ALLOWED}")


def _is_kind_of(built: Any, module: str, name: str) -> bool:
    """True for instances of a class known by name, without importing its framework."""
    return any(t.__module__ == module and t.__qualname__ == name for t in type(built).__mro__)


def _entry_points(built: Any) -> list[tuple[Any, str]]:
    found = []
    if callable(getattr(built, "run", None)):
        found.append((built.run, f"{type(built).__name__}.run"))
    if callable(built):
        found.append((built, getattr(built, "__qualname__", type(built).__name__)))
    return found


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - not a test for callability
    )


def _describe(built: Any) -> str:
    """What was found, with the likely mistake behind it."""
    if built is None:
        return "None: is there a return?"
    if isinstance(built, type):
        return f"the class {built.__name__}, not an object of it: return {built.__name__}(...)"
    if inspect.iscoroutine(built):
        built.close()
        return (
            f"a coroutine: {built.__qualname__} is async. A builder is a plain def that returns "
            "the agent; if it is the agent function itself, wrap it: def build(): return solve"
        )
    for _, name in _entry_points(built):
        return f"{name}, which is not async: write async def, and await the client's calls"
    kind = type(built)
    return f"an object of type {kind.__module__}.{kind.__qualname__}: {built!r:.120}"
