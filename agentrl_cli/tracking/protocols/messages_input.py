"""``/v1/messages``, requests: Anthropic's messages and blocks become chat messages.

What cannot be honoured is refused, never dropped in silence.

An assistant's turn is one message whatever the order of its blocks: texts are put together,
so is reasoning, and calls keep their order. A reply that was streamed as text, call, text and
one that was sent as text, call therefore come back as the same turn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentrl_cli.records import Interaction, Message
from agentrl_cli.tracking.protocols.model_request import (
    ModelRequest,
    NotFoundError,
    ReplyRules,
    RequestError,
    build_assistant_message,
)
from agentrl_cli.tracking.protocols.request_fields import (
    EFFORTS,
    Tool,
    check_keys,
    drop_nulls,
    find_completed,
    parse_sampling,
    parse_stops,
    parse_template_inputs,
    parse_tool_rules,
    parse_tools,
    take,
    take_choice,
    take_int,
)
from agentrl_cli.tracking.session import Session

#: The thinking behind a signature of ours; empty: unknown.
ThinkingLookup = Callable[[str], str]
_ROLES = ("user", "assistant", "system")
_SIGNATURE_PREFIX = "agentrl-"
#: Claude Code's first line of the system prompt. Its hash differs in every request, so that no
#: request would continue an earlier one; Anthropic does not show it to the model either.
_BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
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
    effort = take_choice(output, "effort", EFFORTS, "output_config.")
    asked = take(body, "chat_template_kwargs", dict, {})
    stop_sequences = parse_stops(take(body, "stop_sequences", list, []), "stop_sequences")
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
            "and cannot continue a given one (no prefill)",
            "messages",
        )
    return tuple(messages), tools


def _find_continued(body: Mapping[str, Any], session: Session) -> Interaction | None:
    """The turn that a thread continues: the server holds what came before.

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
    previous = find_completed(session, previous_id)
    if previous is not None:
        return previous
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
    choice = take(body, "tool_choice", dict, {"type": "auto"})
    kind = take_choice(choice, "type", ("auto", "any", "tool", "none"), "tool_choice.")
    if kind is None:
        raise RequestError(
            "tool_choice.type is missing; allowed: any, auto, none, tool", "tool_choice.type"
        )
    name = take(choice, "name", str, "", "tool_choice.")
    asked = {"any": "required", "tool": {"type": "function", "name": name}}.get(kind, kind)
    one_call = take(choice, "disable_parallel_tool_use", bool, False, "tool_choice.")
    as_openai = {"tool_choice": asked, "parallel_tool_calls": not one_call}
    return parse_tool_rules(as_openai, tools, _parse_format(body))


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
    # A part of max_tokens; when to stop thinking is up to the model.
    take_int(drop_nulls(thinking), "budget_tokens", 1024, minimum=1)
    display = take_choice(thinking, "display", ("summarized", "omitted"), "thinking.")
    shown: ThinkingDisplay = "omitted" if display == "omitted" else "shown"
    return shown, {"enable_thinking": True, "thinking": True}


def sign_thinking(thinking: str) -> str:
    """The signature of a thinking block, by which it is known when its text was left out."""
    digest = hashlib.blake2b(thinking.encode("utf-8", "surrogatepass"), digest_size=24)
    return f"{_SIGNATURE_PREFIX}{digest.hexdigest()}"


def convert_system(system: Any, where: str = "system") -> list[Message]:
    """The system prompt, text or text blocks, as a message; none if it is empty.

    Raises:
        RequestError: naming the block that is no text.
    """
    if isinstance(system, str):
        texts = [system]
    elif isinstance(system, list):
        texts = [_read_text(block, f"{where}.{index}") for index, block in enumerate(system)]
    else:
        raise RequestError(f"{where} must be text or a list of text blocks", where)
    texts = [_BILLING_HEADER.sub("", text) for text in texts]
    content = "\n".join(text for text in texts if text)
    return [{"role": "system", "content": content}] if content else []


def convert_messages(messages: Sequence[Any], find_thinking: ThinkingLookup) -> list[Message]:
    """Chat messages in OpenAI's form; consecutive ones of the user or the assistant are merged.

    Args:
        messages: Anthropic's.
        find_thinking: restores thinking that was signed but not sent.

    Raises:
        RequestError: naming the block that cannot be read.
    """
    converted: list[Message] = []
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        if not isinstance(message, dict):
            raise RequestError(f"{where} must be an object, found {message!r:.80}", where)
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise RequestError(
                f"{where}.role is {role!r:.80}; allowed: {', '.join(_ROLES)}", f"{where}.role"
            )
        if not isinstance(content, str | list):
            raise RequestError(
                f"{where}.content must be text or a list of blocks, found {content!r:.80}",
                f"{where}.content",
            )
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        where = f"{where}.content"
        if role == "user":
            new = _convert_user(blocks, where)
        elif role == "assistant":
            new = [_convert_assistant(blocks, where, find_thinking)]
        else:
            new = convert_system(content, where)
        for one in new:
            _append(converted, one)
    return converted


def _append(messages: list[Message], message: Message) -> None:
    """Adds a message; to Anthropic, consecutive messages of one role are one turn."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != message["role"] or last["role"] not in ("user", "assistant"):
        messages.append(message)
    elif last["role"] == "user":
        last["content"] = f"{last['content']}\n{message['content']}"
    else:
        messages[-1] = build_assistant_message(
            (last["content"] or "") + (message["content"] or ""),
            [*last.get("tool_calls", ()), *message.get("tool_calls", ())],
            last.get("reasoning_content", "") + message.get("reasoning_content", ""),
        )


def _convert_user(blocks: list[Any], where: str) -> list[Message]:
    """Results of tools become messages of their own, the texts between them the user's."""
    converted: list[Message] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            converted.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for index, block in enumerate(blocks):
        place = f"{where}.{index}"
        kind = _read_kind(block, place)
        if kind == "tool_result":
            end_text()
            converted.append(_convert_result(block, place))
        else:
            texts.append(_read_text(block, place, allowed="text, tool_result"))
    end_text()
    return converted or [{"role": "user", "content": ""}]


def _convert_result(block: dict[str, Any], where: str) -> Message:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str) or not call_id:
        raise RequestError(
            f"{where}.tool_use_id must be the id of a tool_use block, found {call_id!r:.80}",
            f"{where}.tool_use_id",
        )
    content = block.get("content")
    if content is None or isinstance(content, str):
        text = content or ""
    elif isinstance(content, list):
        places = (f"{where}.content.{index}" for index in range(len(content)))
        text = "\n".join(map(_read_text, content, places))
    else:
        raise RequestError(
            f"{where}.content must be text or a list of text blocks", f"{where}.content"
        )
    # Templates cannot express a failed tool, and the model must not mistake this for a result.
    if take(block, "is_error", bool, False, f"{where}.") and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _convert_assistant(blocks: list[Any], where: str, find_thinking: ThinkingLookup) -> Message:
    content = reasoning = ""
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{where}.{index}"
        kind = _read_kind(block, place)
        if kind == "tool_use":
            calls.append(_convert_call(block, place))
        elif kind == "thinking":
            thinking = take(block, "thinking", str, "", f"{place}.")
            signature = take(block, "signature", str, "", f"{place}.")
            reasoning += thinking or find_thinking(signature)
        elif kind != "redacted_thinking":  # Which is another model's, and not to be read.
            content += _read_text(
                block, place, allowed="text, tool_use, thinking, redacted_thinking"
            )
    return build_assistant_message(content, calls, reasoning)


def _convert_call(block: dict[str, Any], where: str) -> dict[str, Any]:
    for key in ("id", "name"):
        if not isinstance(block.get(key), str) or not block[key]:
            raise RequestError(
                f"{where}.{key} must be text, found {block.get(key)!r:.80}", f"{where}.{key}"
            )
    arguments = take(block, "input", dict, {}, f"{where}.")
    return {
        "id": block["id"],
        "type": "function",
        "function": {
            "name": block["name"],
            "arguments": json.dumps(arguments, ensure_ascii=False),
        },
    }


def _read_kind(block: Any, where: str) -> str:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise RequestError(f"{where} must be a block with a type, found {block!r:.80}", where)
    return block["type"]


def _read_text(block: Any, where: str, allowed: str = "text") -> str:
    """The text of a text block."""
    kind = _read_kind(block, where)
    if kind in ("image", "document"):
        raise RequestError(
            f"{where} is of type {kind!r}, and the model reads text only; send the content as a "
            "text block",
            where,
        )
    if kind != "text":
        raise RequestError(
            f"{where} is of type {kind!r:.80}, which is not supported here; allowed: {allowed}",
            where,
        )
    if not isinstance(block.get("text"), str):
        raise RequestError(
            f"{where}.text must be text, found {block.get('text')!r:.80}", f"{where}.text"
        )
    return block["text"]
