"""From what a builder returned to a runner, chosen by the module of its type."""

from __future__ import annotations

import inspect
from typing import Any

from agentrl_cli.agents.callable import CallableRunner, is_async
from agentrl_cli.agents.camel_agents import CamelAgentRunner, RolePlayingRunner
from agentrl_cli.agents.langgraph import GraphRun, GraphRunner
from agentrl_cli.agents.openai_agents import AgentRun, OpenAIAgentRunner
from agentrl_cli.agents.runner import AgentRunner
from agentrl_cli.errors import BuilderError

_ALLOWED = """\
A builder may return
  - an agents.Agent (OpenAI Agents SDK), or an AgentRun of one
  - a camel ChatAgent or RolePlaying, built with TrackedCamelModel(client, model)
  - a LangGraph compiled graph, built with build_chat_model(client, model), or a GraphRun of one
  - a function of the row, async or not: async def solve(data, client): ...
  - an object with run: async def run(self, data, client): ..."""


def adapt_agent(built: Any, key: str) -> AgentRunner:
    """The runner of what a builder returned; ``key`` is the builder's config key.

    Raises:
        BuilderError: nothing agentrl can run; the message says what was found.
    """
    if isinstance(built, AgentRun):
        return OpenAIAgentRunner(built)
    if isinstance(built, GraphRun):
        return GraphRunner(built, key)
    if _is_kind_of(built, "agents.agent", "Agent"):
        return OpenAIAgentRunner(AgentRun(built))
    if _is_kind_of(built, "camel.agents.chat_agent", "ChatAgent"):
        return CamelAgentRunner(built, key)
    if _is_kind_of(built, "camel.societies.role_playing", "RolePlaying"):
        return RolePlayingRunner(built, key)
    if _is_kind_of(built, "langgraph.pregel.main", "Pregel"):
        return GraphRunner(GraphRun(built), key)
    if not isinstance(built, type):
        entry_points = _entry_points(built)
        for function, name in sorted(entry_points, key=lambda entry: not is_async(entry[0])):
            return CallableRunner(function, name, key)
    raise BuilderError(f"{key}: the builder returned {_describe(built)}\n{_ALLOWED}")


def _is_kind_of(built: Any, module: str, name: str) -> bool:
    """True for instances of a class known by name, without importing its framework."""
    return any(t.__module__ == module and t.__qualname__ == name for t in type(built).__mro__)


def _entry_points(built: Any) -> list[tuple[Any, str]]:
    """What can be called on it, the likeliest first."""
    found = []
    if callable(getattr(built, "run", None)):
        found.append((built.run, f"{type(built).__name__}.run"))
    if callable(built):
        found.append((built, getattr(built, "__qualname__", type(built).__name__)))
    return found


def _describe(built: Any) -> str:
    """What was found, with the likely mistake behind it."""
    if built is None:
        return "None: is there a return?"
    if isinstance(built, type):
        return f"the class {built.__name__}, not an object of it: return {built.__name__}(...)."
    if inspect.iscoroutine(built):
        built.close()
        return (
            f"a coroutine: {built.__qualname__} is async. A builder is a plain def that returns "
            "the agent; if it is the agent function itself, wrap it: def build(): return solve."
        )
    if _is_kind_of(built, "langgraph.graph.state", "StateGraph"):
        return "a StateGraph that is not compiled: return graph.compile()."
    kind = type(built)
    return f"an object of type {kind.__module__}.{kind.__qualname__}: {built!r:.120}."
