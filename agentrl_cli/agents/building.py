"""Calling agent builders: once for a run, or once for every trajectory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal

from openai import AsyncOpenAI

from agentrl_cli.agents.adapt import adapt_agent
from agentrl_cli.agents.runner import AgentRunner
from agentrl_cli.config.imports import advise_extra, find_own_line, import_object
from agentrl_cli.errors import BuilderError

#: What a builder gets besides ``agent_builder_kwargs``, if its signature names it.
SUPPLIED = ("client", "model")


class AgentSource:
    """The agent of a config key, as often as trajectories need it.

    A builder that names ``client`` is called for every trajectory: what it returns belongs
    to that trajectory alone. Any other builder is called once (once for each served name, if
    it names ``model``), and trajectories that run at the same time share what it returned:
    right for agents that are descriptions (an ``agents.Agent``) or functions; an object that
    keeps something about the task in ``self`` should name ``client`` in its builder.

    Args:
        builder: the user's function.
        kwargs: ``agent_builder_kwargs``.
        key: the config key, for messages.
        trial: ``now``: it is found out at once whether the builder works; ``never``: that was
            found out elsewhere.

    Raises:
        BuilderError: the builder cannot be called with these arguments, raises, or returns
            something unknown (found out by building once with a client that leads nowhere).
    """

    def __init__(
        self,
        builder: Callable[..., Any],
        kwargs: Mapping[str, Any],
        key: str,
        *,
        trial: Literal["now", "never"] = "now",
    ) -> None:
        self._builder = builder
        self._kwargs = dict(kwargs)
        self._key = key
        self._supplied = self._check_signature()
        self.per_trajectory = "client" in self._supplied
        self._by_model: dict[str, AgentRunner] = {}
        if trial == "now":
            _ = self.runner

    @cached_property
    def runner(self) -> AgentRunner:
        """The agent as built on trial: tells what it is; run where it can be shared.

        Raises:
            BuilderError: the builder raises, or returns something unknown.
        """
        stand_in = None
        if self.per_trajectory:
            # Tens of milliseconds, which a worker process would pay for nothing.
            stand_in = AsyncOpenAI(base_url="http://agentrl.invalid/v1", api_key="opens-nothing")
        try:
            built = self._build(stand_in, "model")
        except Exception as error:
            raise BuilderError(self._describe_raised(error)) from error
        runner = adapt_agent(built, self._key)
        if runner.needs_client and not self.per_trajectory:
            raise BuilderError(
                f"{self._key}: the builder does not take 'client', so nothing that this agent "
                f"({runner.framework}) says could be recorded. Write def build(client, "
                "model), and give its model the client: docs/agents.md shows how"
            )
        return runner

    def get_runner(self, client: AsyncOpenAI, model: str) -> AgentRunner:
        """The agent for one trajectory. Raises what the builder raises."""
        if not self._supplied:
            return self.runner
        if not self.per_trajectory and model in self._by_model:
            return self._by_model[model]
        runner = adapt_agent(self._build(client, model), self._key)
        if not self.per_trajectory:
            self._by_model[model] = runner
        return runner

    def _build(self, client: AsyncOpenAI | None, model: str) -> Any:
        values = {"client": client, "model": model}
        return self._builder(**self._kwargs, **{name: values[name] for name in self._supplied})

    def _check_signature(self) -> tuple[str, ...]:
        name = getattr(self._builder, "__qualname__", type(self._builder).__name__)
        if not callable(self._builder):
            raise BuilderError(
                f"{self._key}: {type(self._builder).__name__} is not a function. Name a function "
                "that returns the agent: def build(): return agent"
            )
        if inspect.iscoroutinefunction(self._builder):
            raise BuilderError(
                f"{self._key}: {name} is async. A builder is a plain def that returns the agent; "
                f"if {name} is the agent itself, wrap it: def build(): return {name}"
            )
        signature = inspect.signature(self._builder)
        named = {
            n
            for n, p in signature.parameters.items()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        supplied = tuple(n for n in SUPPLIED if n in named and n not in self._kwargs)
        try:
            signature.bind(**self._kwargs, **dict.fromkeys(supplied))
        except TypeError as error:
            raise BuilderError(
                f"{self._key}: {name}{signature} cannot be called: {error}. It gets "
                f"agent_builder_kwargs ({', '.join(self._kwargs) or 'empty'}) and, if it names "
                f"them, {' and '.join(SUPPLIED)}"
            ) from None
        return supplied

    def _describe_raised(self, error: Exception) -> str:
        line = find_own_line(error, besides=(__file__,))
        return (
            f"{self._key}: the builder raised {type(error).__name__}: {error}{advise_extra(error)}"
            + (f"\n  at {line}" if line else "")
        )


def import_agent(import_path: str, kwargs: Mapping[str, Any], key: str) -> AgentSource:
    """The source of the agent whose builder is at ``import_path``.

    Raises:
        ImportPathError: the path leads to nothing.
        BuilderError: as :class:`AgentSource`.
    """
    return AgentSource(import_object(import_path, key), kwargs, key)
