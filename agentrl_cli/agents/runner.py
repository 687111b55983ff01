"""What every adapter offers: "run the agent on this task with this client"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from openai import AsyncOpenAI

from agentrl_cli.records import Boundary


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    """What one run of an agent ended with."""

    final_answer: str | None = None
    """The answer as text (structured output as JSON); None: the agent gave none."""
    returned: Any = None
    """A reward, a dict {interaction id: reward}, or None for "use the reward function"."""


class AgentRunner(Protocol):
    """An agent of any framework."""

    @property
    def framework(self) -> str:
        """What it was built with, for messages."""
        ...

    @property
    def gives_rewards(self) -> bool:
        """True: it may return a reward, so that a reward function is not required."""
        ...

    @property
    def needs_client(self) -> bool:
        """True: it holds the model it speaks to, so its builder must have taken ``client``."""
        ...

    @property
    def needs_base_url(self) -> bool:
        """True: it may open connections of its own, so the gateway must listen on a socket."""
        ...

    @property
    def input_fields(self) -> tuple[str, ...]:
        """A row must have one of these fields; empty: the agent reads rows itself."""
        ...

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
        """Runs the agent once.

        Raises:
            BoundaryError: the exception is known to have crossed another boundary than the agent.
            Exception: whatever the agent raised.
        """
        ...


class BoundaryError(Exception):
    """Carries the boundary that its cause crossed, where the framework tells.

    Attributes:
        boundary: the boundary.
        original: the exception that crossed it.
    """

    def __init__(self, boundary: Boundary, original: BaseException) -> None:
        super().__init__(str(original))
        self.boundary = boundary
        self.original = original
