"""Agents in plain Python: an async function of the row, or an object with ``async run``."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from openai import AsyncOpenAI

from agentrl_cli.agents.runner import AgentOutcome
from agentrl_cli.errors import BuilderError

#: What is passed, by keyword, besides the row: all of it to ``**kwargs``, else what is named.
SUPPLIED = ("base_url", "api_key", "http_client", "client", "model", "max_turns")


class CallableRunner:
    """Runs ``function(data, **what its signature names)``.

    The returned text is the final answer; anything else is a reward, a dict of rewards,
    or None for "use the reward function".

    Raises:
        BuilderError: the signature asks for what nothing supplies.
    """

    framework = "plain Python"
    gives_rewards = True
    input_fields = ()

    def __init__(self, function: Callable[..., Awaitable[Any]], name: str, key: str) -> None:
        self._function = function
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
        for parameter in rest:
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            supplied = parameter.name in SUPPLIED and parameter.kind is not (
                parameter.POSITIONAL_ONLY
            )
            if not variadic and not supplied and parameter.default is parameter.empty:
                raise BuilderError(
                    f"{key}: {name} asks for {parameter.name!r}, which nothing supplies. Allowed "
                    f"after the row: {', '.join(SUPPLIED)}, or **kwargs for all. The row's own "
                    f"fields are in its first argument: {first.name}[{parameter.name!r}]"
                )

    @property
    def needs_base_url(self) -> bool:
        """True when the function may connect by itself."""
        return self._takes_all or "base_url" in self._named

    async def run(
        self,
        data: Mapping[str, Any],
        client: AsyncOpenAI,
        *,
        model: str,
        base_url: str,
        api_key: str,
        http_client: Any,
        max_turns: int,
    ) -> AgentOutcome:
        """What the function returned for one row. Raises whatever it raised."""
        supplied = {
            "base_url": base_url,
            "api_key": api_key,
            "http_client": http_client,
            "client": client,
            "model": model,
            "max_turns": max_turns,
        }
        chosen = {k: v for k, v in supplied.items() if self._takes_all or k in self._named}
        # A copy: an agent that writes into its row must not change its siblings' row.
        returned = await self._function(dict(data), **chosen)
        if isinstance(returned, str):
            return AgentOutcome(final_answer=returned)
        return AgentOutcome(returned=returned)
