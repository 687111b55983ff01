"""What the gateway asks of a protocol, and what its errors say."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl_cli.errors import ContextLengthError, EngineError, EngineTimeoutError
from agentrl_cli.log import get_logger
from agentrl_cli.tracking.model_calls import Choice, ModelCalls
from agentrl_cli.tracking.model_request import (
    BusyError,
    ModelRequest,
    NotFoundError,
    RequestError,
    TooLargeError,
)
from agentrl_cli.tracking.session import BudgetExceededError, Session
from agentrl_cli.tracking.template import TemplateError

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a request got no answer, before a protocol gives it its shape."""

    status: int
    """Of HTTP."""
    message: str
    kind: str = "invalid_request_error"
    """OpenAI's ``type``; other protocols go by the status."""
    param: str | None = None
    """The key of the request that is wrong."""
    code: str | None = None


class WireProtocol(Protocol):
    """One API as agents speak it: how its requests are read and its replies written."""

    @property
    def path(self) -> str:
        """Such as ``/v1/chat/completions``."""
        ...

    @property
    def id_prefix(self) -> str:
        """What ids of its replies begin with."""
        ...

    def parse(self, body: dict[str, Any], session: Session) -> ModelRequest:
        """The request in a JSON body; the session's sampling holds where it says nothing.

        Raises:
            RequestError: naming the key, what was found and what is allowed.
        """
        ...

    def format_reply(self, calls: ModelCalls, choices: Sequence[Choice]) -> dict[str, Any]:
        """The body of a reply that is not streamed."""
        ...

    def stream_events(self, calls: ModelCalls) -> AsyncGenerator[bytes]:
        """The server-sent events of a streamed reply, sampled meanwhile.

        Every choice is recorded before its last event is yielded.
        """
        ...

    def format_error(self, problem: Problem) -> dict[str, Any]:
        """The body of an error."""
        ...

    def format_stream_error(self, problem: Problem, num_events: int) -> bytes:
        """The event that ends a stream which failed after ``num_events`` others."""
        ...


def describe_error(error: Exception) -> Problem:
    """The problem that an exception stands for."""
    if isinstance(error, TooLargeError):
        return Problem(413, str(error), param=error.param, code="request_too_large")
    if isinstance(error, NotFoundError):
        return Problem(404, str(error), param=error.param, code=error.code)
    if isinstance(error, BusyError):
        return Problem(429, str(error), "rate_limit_error", code="too_many_calls")
    if isinstance(error, RequestError):
        return Problem(400, str(error), param=error.param, code=error.code)
    if isinstance(error, TemplateError):
        return Problem(400, str(error), param="messages")
    if isinstance(error, BudgetExceededError):
        message = f"this trajectory has used up its budget ({error}); no further call is answered"
        return Problem(400, message, code="budget_exceeded")
    if isinstance(error, ContextLengthError):
        return Problem(400, str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, EngineTimeoutError):
        return Problem(504, str(error), "server_error", code="engine_timeout")
    if isinstance(error, EngineError):
        return Problem(503, str(error), "server_error", code="engine_error")
    if isinstance(error, RecursionError):
        return Problem(400, "the request is nested too deep")
    _log.error("a call failed inside the gateway", exc_info=error)
    message = f"the gateway failed: {type(error).__name__}: {error}"
    return Problem(500, message, "server_error", code="gateway_error")


def unknown_key_problem() -> Problem:
    """The problem of a request whose key is nobody's."""
    return Problem(
        401,
        "this key opens no session: it is wrong, or its trajectory has ended. Pass the "
        "api_key that the agent was given as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        "authentication_error",
        code="invalid_api_key",
    )
