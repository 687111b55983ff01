"""What a request comes down to, whichever protocol it was made in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.records import Message
from agentrl_cli.tracking.template import TemplateInputs


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
    """A request that names what is not there: status 404."""


class TooLargeError(RequestError):
    """A request that is refused with status 413."""


class BusyError(Exception):
    """A request that comes while too much else is going on: status 429, to be repeated later."""


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
