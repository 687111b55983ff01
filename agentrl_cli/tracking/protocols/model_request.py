"""What every protocol makes of a request: the model call it asks for, or the error it ends with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import ContextLengthError, EngineError, EngineTimeoutError
from agentrl_cli.log import get_logger
from agentrl_cli.records import Message
from agentrl_cli.tracking.session import BudgetExceededError
from agentrl_cli.tracking.template import TemplateError, TemplateInputs

_log = get_logger(__name__)


class RequestError(Exception):
    """A request that is refused with status 400.

    Attributes:
        param: the key that is wrong.
        code: OpenAI's error code.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRules:
    """What a reply has to look like, whichever protocol asked for it.

    A protocol only says what it was asked; the gateway, which knows how the model writes tool
    calls, makes of it what constrains the sampling.
    """

    response_format: Mapping[str, Any] | None = None
    """As chat completions write it: ``{"type": "json_object"}``, or ``{"type": "json_schema",
    "json_schema": {"name", "schema", "strict"}}``; None: any text."""
    tool_choice: Literal["auto", "required"] = "auto"
    """``required``: the reply has to call a tool."""
    callable_tools: tuple[str, ...] | None = None
    """Names of the only tools that may be called, out of those in the prompt; None: all."""
    parallel_tool_calls: bool = True
    """False: a reply holds one call at most."""


class NotFoundError(RequestError):
    """A request that names something that does not exist: status 404."""


class TooLargeError(RequestError):
    """A request that is refused with status 413."""


class BusyError(Exception):
    """A request beyond what is handled at once: status 429, to be repeated later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A checked request, its conversation as chat messages in OpenAI's form.

    Every protocol's messages become chat messages, so that a turn is found again by its
    meaning whatever it was sent back as.
    """

    messages: tuple[Message, ...]
    inputs: TemplateInputs
    sampling: Sampling
    rules: ReplyRules = field(default_factory=ReplyRules)
    num_choices: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    parse_tools: bool = False
    """False: no tools were offered, so text that looks like a call is text."""


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
    """The problem of a request with an unknown key."""
    return Problem(
        401,
        "this key opens no session: it is wrong, or its trajectory has ended. Pass the "
        "api_key that the agent was given as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        "authentication_error",
        code="invalid_api_key",
    )


def build_assistant_message(content: str, calls: list[dict[str, Any]], reasoning: str) -> Message:
    """An assistant's turn as chat completions write it: the form in which turns are recorded."""
    message: Message = {"role": "assistant", "content": content or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    if reasoning:
        message["reasoning_content"] = reasoning
    return message
