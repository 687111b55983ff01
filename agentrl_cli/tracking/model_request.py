"""What a request comes down to, whichever protocol it was made in."""

from __future__ import annotations

from dataclasses import dataclass

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
class ModelRequest:
    """A checked request, its conversation as chat messages in OpenAI's form.

    Every protocol's messages become chat messages, so that a turn is found again by its
    meaning whatever it was sent back as.
    """

    messages: tuple[Message, ...]
    inputs: TemplateInputs
    sampling: Sampling
    num_choices: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    parse_tools: bool = False
    """False: no tools were offered, so text that looks like a call is text."""
