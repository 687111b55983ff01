"""``/v1/responses``, the way in: a JSON body to a checked request.

What cannot be honoured is refused, never dropped in silence. A session keeps every reply as
long as it lasts, so ``previous_response_id`` finds those with ``store: false`` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl_cli.records import Interaction, InteractionStatus, Message
from agentrl_cli.tracking.model_request import ModelRequest, RequestError
from agentrl_cli.tracking.request_fields import (
    check_keys,
    drop_nulls,
    take,
    take_choice,
    take_int,
)
from agentrl_cli.tracking.responses_items import ID_PREFIX, parse_input
from agentrl_cli.tracking.sampling_request import (
    MAX_TOP_LOGPROBS,
    check_verbosity,
    parse_format,
    parse_sampling,
    parse_template_inputs,
    take_effort,
)
from agentrl_cli.tracking.session import Session
from agentrl_cli.tracking.tool_request import parse_flat_tools, parse_tool_rules

_LOGPROBS = "message.output_text.logprobs"
#: What a reply may include; all but the logprobs belong to built-in tools and to thoughts that
#: a provider hides, so nothing of theirs is ever there.
_INCLUDABLE = frozenset(
    {
        _LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
#: Keys that change nothing about what is sampled.
_NEUTRAL_KEYS = frozenset(
    {
        "max_tool_calls",  # counts built-in tools only
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
_HONOURED_KEYS = frozenset(
    {
        "chat_template_kwargs",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "parallel_tool_calls",
        "previous_response_id",
        "reasoning",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "truncation",
    }
)
#: Keys that are accepted only at the value that means "not used".
_UNUSED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
}
_SUMMARIES = ("auto", "concise", "detailed")
_MAX_METADATA = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ModelRequest):
    """A request, and what its reply repeats of it."""

    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the reply that say what was asked."""
    summarize: bool = False
    """True: thoughts are shown as the reasoning's summary, which was asked for, and not as its
    content."""


def parse_responses_request(body: dict[str, Any], session: Session) -> ResponsesRequest:
    """The request in a JSON body; the session's sampling holds where the body says nothing.

    Raises:
        RequestError: naming the key, what was found and what is allowed.
    """
    body = drop_nulls(body)
    check_keys(body, _HONOURED_KEYS, _NEUTRAL_KEYS, _UNUSED_VALUES)
    # "auto" would drop items where the input is too long; that stays an error.
    take_choice(body, "truncation", ("auto", "disabled"))
    options = take(body, "stream_options", dict, {})
    check_keys(options, ("include_obfuscation",), (), {}, path="stream_options.")
    tools = parse_flat_tools(body)
    text = drop_nulls(take(body, "text", dict, {}))
    asked_format = take(text, "format", dict, {"type": "text"}, "text.")
    response_format = parse_format(asked_format, asked_format, "text.format")
    check_keys(text, ("format",), ("verbosity",), {}, path="text.")
    check_verbosity(text, "text.")
    rules, parse_calls = parse_tool_rules(body, tools, response_format)
    reasoning = take(body, "reasoning", dict, {})
    effort = take_effort(reasoning, "effort", "reasoning.")
    logprobs, num_top_logprobs = _parse_logprobs(body)
    sampling = parse_sampling(
        body, session.sampling, limits=("max_output_tokens",), num_top_logprobs=num_top_logprobs
    )
    echo = _build_echo(body, text, reasoning, num_top_logprobs)
    return ResponsesRequest(
        messages=_build_messages(body, session),
        inputs=parse_template_inputs(body, tools, effort),
        sampling=sampling,
        rules=rules,
        stream=take(body, "stream", bool, False),
        logprobs=logprobs,
        parse_tools=parse_calls,
        echo={**echo, "temperature": sampling.temperature, "top_p": sampling.top_p},
        summarize=_wants_summary(reasoning),
    )


def _build_messages(body: Mapping[str, Any], session: Session) -> tuple[Message, ...]:
    """Instructions, the conversation of the previous response, and the input."""

    def find_reply(response_id: str) -> Interaction | None:
        return _find_interaction(session, response_id)

    messages: list[Message] = []
    instructions = take(body, "instructions", str, "")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    previous_id = take(body, "previous_response_id", str, "")
    if previous_id:
        previous = find_reply(previous_id)
        if previous is None:
            raise RequestError(
                f"Previous response with id {previous_id!r:.80} not found: in this session there "
                "is no completed response of that id.",
                "previous_response_id",
                "previous_response_not_found",
            )
        messages += _list_conversation(previous)
    if "input" not in body and not previous_id:
        raise RequestError("input must be text or a list of items", "input")
    messages += parse_input(body.get("input", []), find_reply)
    if not messages:
        raise RequestError("input must hold at least one item", "input")
    return tuple(messages)


def _find_interaction(session: Session, response_id: str) -> Interaction | None:
    if not response_id.startswith(ID_PREFIX):
        return None
    for interaction in session.interactions:
        if interaction.id == response_id:
            return interaction if interaction.status is InteractionStatus.COMPLETED else None
    return None


def _list_conversation(previous: Interaction) -> list[Message]:
    """What was said before, without the instructions: each response has its own."""
    messages = list(previous.messages)
    if messages and messages[0]["role"] == "system":
        del messages[0]
    return [*messages, previous.reply or {"role": "assistant", "content": ""}]


def _parse_logprobs(body: Mapping[str, Any]) -> tuple[bool, int]:
    """Whether logprobs are wanted, and how many tokens beside each sampled one."""
    include = take(body, "include", list, [])
    for entry in include:
        if not isinstance(entry, str) or entry not in _INCLUDABLE:
            raise RequestError(
                f"include has {entry!r:.80}; allowed: {', '.join(sorted(_INCLUDABLE))}", "include"
            )
    num_top_logprobs = take_int(body, "top_logprobs", 0, minimum=0, maximum=MAX_TOP_LOGPROBS)
    return _LOGPROBS in include or num_top_logprobs > 0, num_top_logprobs


def _wants_summary(reasoning: Mapping[str, Any]) -> bool:
    summaries = [
        take_choice(reasoning, key, _SUMMARIES, "reasoning.")
        for key in ("summary", "generate_summary")
    ]
    known = ("effort", "summary", "generate_summary")
    unused = {"mode": ("standard",), "context": ("auto",)}
    check_keys(drop_nulls(reasoning), known, (), unused, path="reasoning.")
    return any(summaries)


def _build_echo(
    body: Mapping[str, Any],
    text: Mapping[str, Any],
    reasoning: Mapping[str, Any],
    num_top_logprobs: int,
) -> dict[str, Any]:
    metadata = take(body, "metadata", dict, {})
    if len(metadata) > _MAX_METADATA or not all(isinstance(v, str) for v in metadata.values()):
        raise RequestError(
            f"metadata must be an object of at most {_MAX_METADATA} texts", "metadata"
        )
    limit = take_int(body, "max_tool_calls", 0, minimum=0)
    return {
        "background": False,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": limit if "max_tool_calls" in body else None,
        "metadata": metadata,
        "parallel_tool_calls": take(body, "parallel_tool_calls", bool, True),
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": take(body, "prompt_cache_key", str, None),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": take(body, "safety_identifier", str, None),
        "service_tier": "default",
        "store": take(body, "store", bool, True),
        "text": {"format": {"type": "text"}, "verbosity": "medium", **text},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": [{"parameters": None, "strict": None, **tool} for tool in body.get("tools", [])],
        "top_logprobs": num_top_logprobs,
        "truncation": body.get("truncation", "disabled"),
        "user": take(body, "user", str, None),
    }
