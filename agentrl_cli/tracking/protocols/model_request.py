"""A request in any protocol: its body checked, the model call that it asks for, or its error.

Every refusal names the field, what was found and what is allowed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import (
    ContextLengthError,
    EngineError,
    EngineTimeoutError,
    format_nearest,
)
from agentrl_cli.log import get_logger
from agentrl_cli.records import Message
from agentrl_cli.tracking.session import BudgetExceededError
from agentrl_cli.tracking.template import TemplateError, TemplateInputs, make_template_inputs

_log = get_logger(__name__)
#: Half of a surrogate pair, escaped.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
#: Keys of both of OpenAI's APIs that change nothing about what is sampled: bookkeeping, routing
#: and caching hints.
NEUTRAL_KEYS = frozenset(
    {
        "metadata",
        "model",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
#: What the gateway itself passes to the tokenizer, or would change what comes back from it.
_RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
Tool = dict[str, Any]
FieldsT = TypeVar("FieldsT", bound="RequestFields")


class RequestError(Exception):
    """A request that is refused.

    Attributes:
        param: the key that is wrong.
        code: OpenAI's error code.
    """

    status = 400
    code: str | None = None

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or self.code


class NotFoundError(RequestError):
    """A request that names something that does not exist."""

    status = 404


class TooLargeError(RequestError):
    """A request whose body is too large."""

    status = 413
    code = "request_too_large"


class BusyError(Exception):
    """A request beyond what is handled at once, to be repeated later."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A checked request, its conversation as chat messages in OpenAI's form.

    Every protocol's messages become chat messages, so that a turn is found again by its
    meaning whatever it was sent back as.
    """

    messages: Sequence[Message]
    inputs: TemplateInputs
    sampling: Sampling
    rules: ReplyRules = field(default_factory=ReplyRules)
    num_choices: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    """True: the reply has the ids of the prompt and of what was sampled."""
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


class RequestFields(BaseModel):
    """An object of a request, in which there may be more keys that are not read."""

    model_config = ConfigDict(strict=True)


class CheckedFields(RequestFields):
    """An object that has no other keys; a null means "not given"."""

    neutral: ClassVar[frozenset[str]] = frozenset()
    """Keys beside the fields that change nothing about what is sampled."""
    unused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Keys that are allowed only at a value that means "not used"."""

    @model_validator(mode="wrap")
    @classmethod
    def _check_keys(cls, data: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        """Drops nulls, and refuses keys that would be dropped in silence."""
        if not isinstance(data, dict):
            return build(data)
        given = {key: value for key, value in data.items() if value is not None}
        fields = build(given)
        known = _list_keys(cls)
        for key in given:
            if key in known or key in cls.neutral:
                continue
            if key not in cls.unused:
                text = f"is not supported here; {format_nearest(key, known)}"
            elif given[key] not in cls.unused[key]:
                text = f"= {given[key]!r:.80} is not supported here; leave it out"
            else:
                continue
            raise PydanticCustomError("key", "{text}", {"text": text, "key": key[:80]})
        return fields


@cache
def _list_keys(fields: type[RequestFields]) -> frozenset[str]:
    return frozenset(one.alias or name for name, one in fields.model_fields.items())


def validate(fields: type[FieldsT], data: Any, where: str = "") -> FieldsT:
    """The checked object of a request; ``where`` is its path there.

    Raises:
        RequestError: naming the field, what was found and what is allowed.
    """
    try:
        return fields.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
    # A type that is not known explains what else is wrong.
    first = min(found, key=lambda one: one["loc"][-1:] != ("type",))
    is_key = first["type"] == "key"
    loc = (*first["loc"], first["ctx"]["key"]) if is_key else first["loc"]
    path, at = where, data
    for number, part in enumerate(loc, 1):
        if isinstance(part, int):
            path += f"[{part}]"
        elif number == len(loc) or (isinstance(at, dict) and part in at):
            path += f".{part}" if path else part
        else:
            continue  # Pydantic's name for a kind of object, which is no key.
        at = at[part] if number < len(loc) else at
    if is_key:
        raise RequestError(f"{path} {first['msg']}", path)
    shown = "" if first["type"] == "missing" else f", found {first['input']!r:.80}"
    raise RequestError(f"{path}: {first['msg'][:1].lower()}{first['msg'][1:]}{shown}", path)


def texts_of(*kinds: str) -> BeforeValidator:
    """Reads a content, one text or a list of parts of these kinds, as the list of its texts."""

    def read(content: Any) -> Any:
        if content is None or isinstance(content, str):
            return [] if content is None else [content]
        texts = []
        for part in content if isinstance(content, list) else (content,):
            kind = part.get("type") if isinstance(part, dict) else None
            text = part.get("refusal" if kind == "refusal" else "text") if kind in kinds else None
            if not isinstance(text, str):
                allowed = f"must be text or a list of parts of type {', '.join(kinds)}"
                raise PydanticCustomError("texts", f"{allowed}: no images, no audio, no files")
            texts.append(text)
        return texts

    return BeforeValidator(read)


NonEmptyText = Annotated[str, Field(min_length=1)]
#: How many tokens a reply may have.
Limit = Annotated[int, Field(ge=1, lt=2**63)]
#: Texts that end the reply, of which one may stand alone.
Stops = Annotated[
    list[NonEmptyText],
    Field(max_length=64),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]
#: What OpenAI allows; engines compute no more beside each token.
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
#: How long replies shall be: the OpenAI Agents SDK sends it unasked, and nothing honours it.
Verbosity = Literal["low", "medium", "high"]
#: How much to reason, as OpenAI names it.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Function(RequestFields):
    """What a request says of a tool; the name ends up in a grammar and in the model's own text."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:\-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def build_tool(self) -> Tool:
        """The tool in chat completions' form, without what was not said."""
        keys = ("name", "description", "parameters", "strict")
        said = {key: getattr(self, key) for key in keys}
        function = {key: value for key, value in said.items() if value is not None}
        return {"type": "function", "function": function}


class RequestBody(CheckedFields):
    """What the bodies of all protocols have in common."""

    stream: bool = Field(False, exclude=True)
    temperature: Annotated[float | None, Field(ge=0, le=10)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    chat_template_kwargs: dict[str, Any] = Field({}, exclude=True)

    def build_sampling(
        self,
        defaults: Sampling,
        *limits: int | None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        num_top_logprobs: int = 0,
    ) -> Sampling:
        """How to sample; ``defaults`` hold where the body says nothing, and limit its length."""
        given = [limit for limit in (defaults.max_tokens, *limits) if limit is not None]
        top_p = defaults.top_p if self.top_p is None else self.top_p
        return replace(
            defaults,
            max_tokens=min(given, default=None),
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            # 0 asks for the one most probable token.
            top_p=top_p or 1e-6,
            stop=(*defaults.stop, *stop),
            # The session's gives each of its calls another one.
            seed=seed,
            num_top_logprobs=num_top_logprobs,
        )

    def build_template_inputs(
        self, tools: Sequence[Tool], effort: str | None, **kwargs: Any
    ) -> TemplateInputs:
        """What the chat template gets besides the messages.

        The effort of reasoning is the template's affair: it gets ``reasoning_effort``, and with
        ``none`` ``enable_thinking=False``, which templates that know neither ignore. What
        ``chat_template_kwargs`` say comes first.

        Raises:
            RequestError: a keyword that is not the template's.
        """
        for key in _RESERVED_TEMPLATE_KWARGS.intersection(self.chat_template_kwargs):
            raise RequestError(
                f"chat_template_kwargs.{key} is not the template's; pass only what the model's "
                "chat template reads, such as enable_thinking",
                "chat_template_kwargs",
            )
        if effort is not None:
            kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs["enable_thinking"] = False
        return make_template_inputs(tuple(tools), kwargs | self.chat_template_kwargs)


class _FormatKind(RequestFields):
    type: Literal["text", "json_object", "json_schema"]


class _JsonSchema(RequestFields):
    name: NonEmptyText
    definition: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


def parse_format(asked: dict[str, Any], schema: Any, where: str) -> dict[str, Any] | None:
    """A wanted form of the reply as chat completions write it; None: any text.

    Args:
        asked: the object with the ``type``.
        schema: the object with ``name``, ``schema`` and ``strict``.
        where: the key of the request that holds it.

    Raises:
        RequestError: an unknown type, or no valid schema.
    """
    kind = validate(_FormatKind, asked, where).type
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": kind}
    where = where if schema is asked else f"{where}.json_schema"
    described = validate(_JsonSchema, schema, where)
    named = {"name": described.name, "schema": described.definition}
    return {"type": kind, "json_schema": {**named, "strict": bool(described.strict)}}


def build_rules(
    mode: str,
    names: tuple[str, ...] | None,
    tools: Sequence[Tool],
    *,
    parallel: bool,
    response_format: Mapping[str, Any] | None,
) -> tuple[ReplyRules, bool]:
    """What is asked of the reply's form, and whether calls are read.

    Calls are not read where no tools were offered, or with ``none``: text that looks like
    a call is text then. The tools stay in the prompt, so that the conversation's tokens go on.

    Args:
        mode: ``auto``, ``none`` or ``required``.
        names: of the tools that may be called; None: all.
        tools: those that are offered.
        parallel: False: one call at most.
        response_format: of the text.

    Raises:
        RequestError: a tool that was not offered, or two of one name, which could not be told
            apart in a call.
    """
    known = [tool["function"]["name"] for tool in tools]
    for name in known:
        if known.count(name) > 1:
            raise RequestError(f"tools has two functions named {name!r}", "tools")
    if not tools and mode == "required":
        raise RequestError(
            "tool_choice asks for a call, but no tools are given; pass tools", "tool_choice"
        )
    for name in names or ():
        if name not in known:
            raise RequestError(
                f"tool_choice names the tool {name!r:.80}; {format_nearest(name, known)}",
                "tool_choice",
            )
    if not tools:
        return ReplyRules(response_format=response_format), False
    if mode == "none":
        return ReplyRules(response_format=response_format, callable_tools=()), False
    rules = ReplyRules(
        response_format=response_format,
        tool_choice="required" if mode == "required" else "auto",
        callable_tools=names,
        parallel_tool_calls=parallel,
    )
    return rules, True


def parse_tool_choice(choice: Any) -> tuple[str, tuple[str, ...] | None]:
    """``auto``, ``none`` or ``required``, and the names of the tools that may be called.

    Raises:
        RequestError: it is no choice of OpenAI's APIs.
    """
    if choice in ("auto", "none", "required"):
        return choice, None
    given = choice if isinstance(choice, dict) else {}
    mode: Any = "required"
    tools: Any = [given]
    if given.get("type") == "allowed_tools":
        allowed = given.get("allowed_tools", given)
        allowed = allowed if isinstance(allowed, dict) else {}
        mode, tools = allowed.get("mode"), allowed.get("tools")
    names = [_find_name(tool) for tool in tools] if isinstance(tools, list) else []
    if mode in ("auto", "required") and names and None not in names:
        return mode, tuple(name for name in names if name is not None)
    raise RequestError(
        f"tool_choice is {choice!r:.80}; allowed: 'auto', 'none', 'required', one function "
        "({'type': 'function', ...} with its name) and 'allowed_tools' with functions; built-in "
        "tools do not run here",
        "tool_choice",
    )


def _find_name(tool: Any) -> str | None:
    """The name of a function in either API's form; None: it names none."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return None
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def parse_json(data: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        RequestError: it is not JSON, not an object, or has text that is not valid Unicode.
    """
    try:
        value = json.loads(data, parse_constant=_refuse_constant, parse_float=_parse_number)
    except RecursionError:
        raise RequestError("the body is nested too deep") from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    if _SURROGATE.search(data):
        _check_unicode(value)
    return value


def _check_unicode(value: dict[str, Any]) -> None:
    """Refuses lone surrogates: JSON can escape them, but nothing can tokenize or store them."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the body has text that is not valid Unicode: {error.reason}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parse_number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        # Written again it would be Infinity, which JSON does not know.
        raise ValueError(f"the number {text:.20} is too large")
    return number


#: Exceptions of other layers: the HTTP status, OpenAI's type, the key that is wrong, the code.
_PROBLEMS: tuple[tuple[type[Exception], int, str, str | None, str | None], ...] = (
    (BusyError, 429, "rate_limit_error", None, "too_many_calls"),
    (TemplateError, 400, "invalid_request_error", "messages", None),
    (ContextLengthError, 400, "invalid_request_error", "messages", "context_length_exceeded"),
    (EngineTimeoutError, 504, "server_error", None, "engine_timeout"),
    (EngineError, 503, "server_error", None, "engine_error"),
)


def describe_error(error: Exception) -> Problem:
    """The problem that an exception stands for."""
    if isinstance(error, RequestError):
        return Problem(error.status, str(error), param=error.param, code=error.code)
    if isinstance(error, BudgetExceededError):
        message = f"this trajectory has used up its budget ({error}); no further call is answered"
        return Problem(400, message, code="budget_exceeded")
    if isinstance(error, RecursionError):
        return Problem(400, "the request is nested too deep")
    for kind, status, name, param, code in _PROBLEMS:
        if isinstance(error, kind):
            return Problem(status, str(error), name, param, code)
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
