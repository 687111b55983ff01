"""What every adapter offers: "run the agent on this task with this client"."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from openai import AsyncOpenAI

from agentrl_cli.errors import DatasetError
from agentrl_cli.log import get_logger
from agentrl_cli.records import INPUT_FIELDS, Boundary


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    """What one run of an agent ended with."""

    final_answer: str | None = None
    """The answer as text (structured output as JSON); None: the agent gave none."""
    returned: Any = None
    """A reward, a dict {interaction id: reward}, or None for "use the reward function"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """What an adapter runs its agent with, once."""

    row: Mapping[str, Any]
    """The dataset row."""
    client: AsyncOpenAI
    """The tracking client of the trajectory."""
    model: str
    """The served name."""
    base_url: str
    """Where clients other than ``client`` and ``http_client`` reach the gateway."""
    api_key: str
    """Opens the trajectory's session, and no other."""
    http_client: Any
    """Reaches the gateway, for clients of other make."""
    max_turns: int


class AgentRunner(ABC):
    """An agent of any framework."""

    framework: str
    """What it was built with, for messages."""
    gives_rewards: bool = False
    """True: it may return a reward, so that a reward function is not required."""
    keeps_history: bool = False
    """True: it holds its conversation, so that each trajectory needs one of its own."""
    needs_base_url: bool = False
    """True: it may open connections of its own, so the gateway must listen on a socket."""
    input_fields: tuple[str, ...] = INPUT_FIELDS
    """A row must have one of these fields; empty: the agent reads rows itself."""

    @abstractmethod
    async def run(self, call: AgentCall) -> AgentOutcome:
        """Runs the agent once.

        Raises:
            BoundaryError: the exception is known to have crossed another boundary than the agent.
            Exception: whatever the agent raised.
        """


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


_log = get_logger(__name__)

ResultT = TypeVar("ResultT")


def find_input(row: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    """The row's ``messages`` (a list of chat messages), else ``question``, ``prompt``, ``input``.

    A ``prompt`` or ``input`` may hold a list of chat messages too.

    Raises:
        DatasetError: none of them is there, or the one that is has another form.
    """
    for name in INPUT_FIELDS:
        value = row.get(name)
        if value is None:
            continue
        if isinstance(value, str) and name != "messages":
            return value
        if isinstance(value, list) and value and all(_is_message(m) for m in value):
            return [dict(m) for m in value]
        raise DatasetError(
            f"the row's field {name!r} is {type(value).__name__} ({value!r:.80}); allowed: "
            "text, or a list of {'role': ..., 'content': ...}"
            + (" (for messages: the list only)" if name == "messages" else "")
        )
    raise DatasetError(
        f"nothing to ask the agent: the row has the fields {', '.join(map(repr, row))}; one of "
        f"{', '.join(INPUT_FIELDS)} is needed. Rename the field, or build an object with "
        "async def run(data, client) that reads the row itself"
    )


def find_prompt_text(row: Mapping[str, Any]) -> str:
    """The input as text for reward functions; of messages, the last one of the user."""
    value = next((row[name] for name in ("prompt", *INPUT_FIELDS) if row.get(name)), "")
    if not isinstance(value, list):
        return str(value)
    asked = [m for m in value if _is_message(m) and m["role"] == "user"]
    return str(asked[-1].get("content") or "") if asked else ""


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


async def run_in_thread(function: Callable[[], ResultT], name: str) -> ResultT:
    """What ``function`` returns, run in a thread of its own called ``name``.

    Agents wait most of the time: in a pool they would also wait for each other. Cancelled,
    this returns at once, and the thread ends when the function does; it does not keep the
    process alive.

    Raises:
        BaseException: what the function raised.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()
    context = contextvars.copy_context()

    def finish(result: Any, error: BaseException | None) -> None:
        if future.done():
            if error is not None:
                _log.debug("%s raised after nobody waited for it", name, exc_info=error)
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def work() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = context.run(function)
        except StopIteration as stop:
            # A future cannot carry it.
            error = RuntimeError(f"{name} raised StopIteration")
            error.__cause__ = stop
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(finish, result, error)
        except RuntimeError:
            _log.debug("%s ended after its event loop", name)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await future
