"""``/v1/messages``, the way in: a JSON body to a checked request.

What cannot be honoured is refused, never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentrl_cli.errors import format_nearest
from agentrl_cli.records import Interaction, InteractionStatus, Message
from agentrl_cli.tracking.messages_blocks import convert_messages, convert_system, sign_thinking
from agentrl_cli.tracking.model_request import (
    ModelRequest,
    NotFoundError,
    ReplyRules,
    RequestError,
)
from agentrl_cli.tracking.request_fields import (
    check_keys,
    drop_nulls,
    take,
    take_choice,
    take_int,
)
from agentrl_cli.tracking.sampling_request import parse_sampling, parse_template_inputs, take_effort
from agentrl_cli.tracking.session import Session
from agentrl_cli.tracking.tool_request import Tool, parse_tools

#: Keys that change nothing about what is sampled: bookkeeping, billing, routing, caching, and
#: what another model should do when this one declines, which it never does.
_NEUTRAL_KEYS = frozenset(
    {
        "model",
        "metadata",
        "service_tier",
        "speed",
        "inference_geo",
        "cache_control",
        "diagnostics",
        "fallbacks",
        "fallback_credit_token",
        "billing_policy",
        "user_profile_id",
        "workspace_id",
    }
)
_HONOURED_KEYS = frozenset(
    {
        "messages",
        "system",
        "tools",
        "tool_choice",
        "max_tokens",
        "stop_sequences",
        "stream",
        "temperature",
        "top_p",
        "thinking",
        "output_config",
        "thread",
        "chat_template_kwargs",
    }
)
#: Keys that are accepted only at the value that means "not used".
_UNUSED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "top_k": (0, -1),
    "mcp_servers": ([],),
    "context_management": ({}, {"edits": []}),
}
#: Keys of a tool that say how Anthropic stores, caches or streams it.
_NEUTRAL_TOOL_KEYS = frozenset({"type", "cache_control", "eager_input_streaming"})
_UNUSED_TOOL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
    "input_examples": ([],),
}
_MAX_STOPS = 64

#: ``hidden``: it was not asked for; ``omitted``: its signature stands for it.
ThinkingDisplay = Literal["shown", "omitted", "hidden"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest(ModelRequest):
    """A checked request, with what the reply's form depends on."""

    thinking: ThinkingDisplay = "hidden"
    stop_sequences: tuple[str, ...] = ()
    """The request's own; the session may have others."""


def parse_messages_request(body: dict[str, Any], session: Session) -> MessagesRequest:
    """The request in a JSON body; the session's sampling holds where it says nothing.

    Raises:
        RequestError: naming the key, what was found and what is allowed.
    """
    body = drop_nulls(body)
    check_keys(body, _HONOURED_KEYS, _NEUTRAL_KEYS, _UNUSED_VALUES)
    messages, tools = _parse_conversation(body, session)
    rules, parse_calls = _parse_rules(body, tools)
    thinking, template_kwargs = _parse_thinking(body)
    output = take(body, "output_config", dict, {})
    effort = take_effort(output, "effort", "output_config.")
    asked = take(body, "chat_template_kwargs", dict, {})
    stop_sequences = _parse_stops(body)
    return MessagesRequest(
        messages=messages,
        inputs=parse_template_inputs(
            {"chat_template_kwargs": template_kwargs | asked}, tools, effort
        ),
        sampling=parse_sampling(
            body, session.sampling, limits=("max_tokens",), stop=stop_sequences
        ),
        rules=rules,
        stream=take(body, "stream", bool, False),
        parse_tools=parse_calls,
        thinking=thinking,
        stop_sequences=stop_sequences,
    )


def _parse_conversation(
    body: Mapping[str, Any], session: Session
) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """The whole conversation and its tools, those that a thread holds included."""
    given = take(body, "messages", list, [])
    messages = convert_messages(given, lambda signature: _find_thinking(session, signature))
    continued = _find_continued(body, session)
    if continued is None:
        messages = [*convert_system(body.get("system", "")), *messages]
        tools = _parse_tools(body)
    else:
        assert continued.reply is not None
        messages = [*continued.messages, continued.reply, *messages]
        tools = continued.tools
    if not given or messages[-1]["role"] == "assistant":
        raise RequestError(
            "messages must end with a message of the user: the model begins a turn of its own, "
            "and cannot go on with a given one (no prefill)",
            "messages",
        )
    return tuple(messages), tools


def _find_continued(body: Mapping[str, Any], session: Session) -> Interaction | None:
    """The turn that a thread goes on from: the server holds what came before.

    Any turn of the session will do, created as a thread or not, and more than once.
    """
    thread = take(body, "thread", dict, {})
    if not thread or take_choice(thread, "type", ("create", "continue"), "thread.") == "create":
        return None
    previous_id = take(thread, "previous_message_id", str, "", "thread.")
    for key in ("system", "tools"):
        if key in body:
            raise RequestError(
                f"{key} stays as it was when the thread was created; leave it out, or send the "
                "whole conversation with thread: {'type': 'create'}",
                key,
            )
    for interaction in session.interactions:
        completed = interaction.status is InteractionStatus.COMPLETED
        if interaction.id == previous_id and completed:
            return interaction
    raise NotFoundError(
        f"thread.previous_message_id {previous_id!r:.80} is no reply of this session; send the "
        "whole conversation with thread: {'type': 'create'}",
        "thread.previous_message_id",
        code="thread_not_found",
    )


def _find_thinking(session: Session, signature: str) -> str:
    """The thinking of an earlier reply that was sent as its signature alone."""
    for interaction in session.interactions:
        thinking = (interaction.reply or {}).get("reasoning_content")
        if thinking and sign_thinking(thinking) == signature:
            return str(thinking)
    return ""


def _parse_tools(body: Mapping[str, Any]) -> tuple[Tool, ...]:
    """Tools in chat completions' form."""
    tools = [_convert_tool(tool, i) for i, tool in enumerate(take(body, "tools", list, []))]
    return parse_tools({"tools": tools})


def _convert_tool(tool: Any, index: int) -> Tool:
    where = f"tools.{index}"
    if not isinstance(tool, dict):
        raise RequestError(f"{where} must be an object, found {tool!r:.80}", where)
    if tool.get("type") not in (None, "custom"):
        raise RequestError(
            f"{where} is of type {tool['type']!r:.80}: Anthropic's own tools do not run here, and "
            "the model does not know them. Allowed: custom tools, {'name', 'description', "
            "'input_schema'}",
            where,
        )
    tool = drop_nulls(tool)
    known = ("name", "description", "input_schema", "strict")
    check_keys(tool, known, _NEUTRAL_TOOL_KEYS, _UNUSED_TOOL_VALUES, path=f"{where}.")
    if not isinstance(tool.get("input_schema"), dict):
        raise RequestError(
            f"{where}.input_schema must be a JSON schema, found {tool.get('input_schema')!r:.80}",
            f"{where}.input_schema",
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool["input_schema"],
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": drop_nulls(function)}


def _parse_rules(body: Mapping[str, Any], tools: Sequence[Tool]) -> tuple[ReplyRules, bool]:
    """What a reply has to look like, and whether calls are read in it."""
    response_format = _parse_format(body)
    choice = take(body, "tool_choice", dict, {"type": "auto"})
    kind = take_choice(choice, "type", ("auto", "any", "tool", "none"), "tool_choice.")
    if kind is None:
        raise RequestError(
            "tool_choice.type is missing; allowed: any, auto, none, tool", "tool_choice.type"
        )
    one_call = take(choice, "disable_parallel_tool_use", bool, False, "tool_choice.")
    if kind in ("any", "tool") and not tools:
        raise RequestError(
            f"tool_choice is {kind!r}, but no tools are given; pass tools", "tool_choice"
        )
    if not tools:
        return ReplyRules(response_format=response_format), False
    if kind == "none":
        # They stay in the prompt, so that the conversation's tokens go on.
        return ReplyRules(response_format=response_format, callable_tools=()), False
    callable_tools = None
    if kind == "tool":
        known = [tool["function"]["name"] for tool in tools]
        name = take(choice, "name", str, "", "tool_choice.")
        if name not in known:
            raise RequestError(
                f"tool_choice.name is {name!r:.80}; {format_nearest(name, known)}",
                "tool_choice.name",
            )
        callable_tools = (name,)
    rules = ReplyRules(
        response_format=response_format,
        tool_choice="auto" if kind == "auto" else "required",
        callable_tools=callable_tools,
        parallel_tool_calls=not one_call,
    )
    return rules, True


def _parse_format(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """``output_config.format`` as chat completions write it."""
    output = take(body, "output_config", dict, {})
    check_keys(drop_nulls(output), ("effort", "format"), (), {}, path="output_config.")
    wanted = take(output, "format", dict, {}, "output_config.")
    if not wanted:
        return None
    if wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
        raise RequestError(
            f"output_config.format is {wanted!r:.80}; allowed: {{'type': 'json_schema', 'schema': "
            "{...}}",
            "output_config.format",
        )
    schema = {"name": "output", "schema": wanted["schema"], "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _parse_thinking(body: Mapping[str, Any]) -> tuple[ThinkingDisplay, dict[str, Any]]:
    """How thinking is shown, and what the template is told of it.

    An agent that did not ask for thinking reads the first block as text, so it gets none;
    the model still thinks as its template has it. Templates know one of two names, or none.
    """
    thinking = take(body, "thinking", dict, {})
    if not thinking:
        return "hidden", {}
    kinds = ("adaptive", "between_tools", "disabled", "enabled")
    kind = take_choice(thinking, "type", kinds, "thinking.")
    if kind is None:
        raise RequestError(
            f"thinking.type is missing; allowed: {', '.join(kinds)}", "thinking.type"
        )
    if kind == "disabled":
        return "hidden", {"enable_thinking": False, "thinking": False}
    # A part of max_tokens; where the model stops thinking is its own affair.
    take_int(drop_nulls(thinking), "budget_tokens", 1024, minimum=1)
    display = take_choice(thinking, "display", ("summarized", "omitted"), "thinking.")
    shown: ThinkingDisplay = "omitted" if display == "omitted" else "shown"
    return shown, {"enable_thinking": True, "thinking": True}


def _parse_stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    texts = take(body, "stop_sequences", list, [])
    if len(texts) > _MAX_STOPS or not all(isinstance(t, str) and t for t in texts):
        raise RequestError(
            f"stop_sequences must be a list of at most {_MAX_STOPS} texts, none of them empty",
            "stop_sequences",
        )
    return tuple(texts)
