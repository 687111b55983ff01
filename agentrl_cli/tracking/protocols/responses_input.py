"""``/v1/responses``, requests: their input items become chat messages.

What cannot be honoured is refused, never dropped in silence. A session keeps every reply as
long as it lasts, so ``previous_response_id`` finds those with ``store: false`` too.

The output of one turn comes back as several items (reasoning, text, calls); they become one
assistant message again, so that the turn is found by its meaning whatever it was sent back as.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl_cli.records import Interaction, Message
from agentrl_cli.tracking.protocols.model_request import (
    ModelRequest,
    RequestError,
    build_assistant_message,
)
from agentrl_cli.tracking.protocols.request_fields import (
    EFFORTS,
    MAX_TOP_LOGPROBS,
    NEUTRAL_KEYS,
    VERBOSITIES,
    check_keys,
    drop_nulls,
    find_completed,
    parse_flat_tools,
    parse_format,
    parse_sampling,
    parse_template_inputs,
    parse_tool_rules,
    take,
    take_choice,
    take_int,
)
from agentrl_cli.tracking.session import Session

ID_PREFIX = "resp_"
_ITEM_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})_[0-9]+")
#: Parts of an item's content that are text, and the key that holds it.
_TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
_MESSAGE_ROLES = ("user", "assistant", "system", "developer")
FindReply = Callable[[str], Interaction | None]
_LOGPROBS = "message.output_text.logprobs"
#: What a reply may include; all but the logprobs belong to built-in tools and to reasoning
#: that a provider hides, so nothing of theirs is ever there.
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
_NEUTRAL_KEYS = NEUTRAL_KEYS | {"max_tool_calls"}  # which counts built-in tools only
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
    """True: reasoning is shown as a summary, which was asked for, and not as the item's
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
    take_choice(text, "verbosity", VERBOSITIES, "text.")
    rules, parse_calls = parse_tool_rules(body, tools, response_format)
    reasoning = take(body, "reasoning", dict, {})
    effort = take_choice(reasoning, "effort", EFFORTS, "reasoning.")
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
        is_response = response_id.startswith(ID_PREFIX)
        return find_completed(session, response_id) if is_response else None

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


def build_item_id(kind: str, response_id: str, index: int) -> str:
    """The id of an output item: ``msg``, ``rs`` or ``fc``, its response and its place there.

    Items that are sent back say by it which of them were one turn.
    """
    return f"{kind}_{response_id.removeprefix(ID_PREFIX)}_{index}"


def find_response_id(item: Mapping[str, Any]) -> str | None:
    """The response that an item is from; None where its id does not say."""
    item_id = item.get("id")
    found = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return f"{ID_PREFIX}{found[1]}" if found else None


def parse_input(value: Any, find_reply: FindReply) -> list[Message]:
    """The messages of a response's ``input``.

    Args:
        value: a text, or a list of items.
        find_reply: the session's completed reply of a response id. Reasoning items that come
            back empty are filled from it.

    Raises:
        RequestError: naming the item that is wrong.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise RequestError("input must be text or a list of items", "input")
    reader = _ItemReader(find_reply)
    for index, item in enumerate(value):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise RequestError(f"{where} must be an object", where)
        reader.read(item, where)
    return reader.close()


@dataclass(slots=True)
class _Turn:
    """The output items of one turn, as far as they have come."""

    response_id: str | None
    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)
    """Of its calls; some agents send each right after its call."""

    def takes(self, kind: str, response_id: str | None) -> bool:
        """Whether a further item of ``kind`` belongs to this turn."""
        if response_id is not None and self.response_id is not None:
            return response_id == self.response_id
        if self.results:
            return False
        if kind == "reasoning":
            return not self.texts and not self.calls
        # Two messages in a row are two turns, unless calls show that one continues.
        return kind == "function_call" or not self.texts or bool(self.calls)

    def build_messages(self) -> list[Message]:
        """The turn, and the results that came for it."""
        message = build_assistant_message("".join(self.texts), self.calls, "".join(self.reasoning))
        return [message, *self.results]


class _ItemReader:
    """Turns items into messages, one after the other."""

    def __init__(self, find_reply: FindReply) -> None:
        self._find_reply = find_reply
        self._messages: list[Message] = []
        self._turn: _Turn | None = None

    def read(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if kind == "message":
            self._read_message(item, where)
        elif kind == "reasoning":
            turn = self._open_turn(item, kind)
            turn.reasoning.append(self._read_reasoning(item, where))
        elif kind == "function_call":
            self._open_turn(item, kind).calls.append(_read_call(item, where))
        elif kind == "function_call_output":
            results = self._messages if self._turn is None else self._turn.results
            results.append(_read_output(item, where))
        elif kind == "item_reference":
            raise RequestError(
                f"{where} refers to the stored item {item.get('id')!r:.80}; items are not looked "
                "up here: send the item itself, or use previous_response_id",
                where,
            )
        else:
            raise RequestError(
                f"{where} is of type {kind!r:.80}; allowed: message, reasoning, function_call, "
                "function_call_output. Built-in tools of other providers do not run here",
                where,
            )

    def close(self) -> list[Message]:
        self._close_turn()
        return self._messages

    def _read_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _MESSAGE_ROLES:
            raise RequestError(
                f"{where}.role is {role!r:.80}; allowed: {', '.join(_MESSAGE_ROLES)}",
                f"{where}.role",
            )
        texts = read_texts(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._open_turn(item, "message").texts.extend(texts)
            return
        self._close_turn()
        # "system" is kept for the instructions, which the next response does not take over.
        role = "developer" if role == "system" else role
        self._messages.append({"role": role, "content": _build_content(texts)})

    def _read_reasoning(self, item: Mapping[str, Any], where: str) -> str:
        for key in ("content", "summary"):
            text = "".join(read_texts(item.get(key) or [], f"{where}.{key}"))
            if text:
                return text
        response_id = find_response_id(item)
        interaction = self._find_reply(response_id) if response_id is not None else None
        reply = (interaction.reply if interaction is not None else None) or {}
        return str(reply.get("reasoning_content") or "")

    def _open_turn(self, item: Mapping[str, Any], kind: str) -> _Turn:
        response_id = find_response_id(item)
        if self._turn is not None and not self._turn.takes(kind, response_id):
            self._close_turn()
        if self._turn is None:
            self._turn = _Turn(response_id)
        self._turn.response_id = self._turn.response_id or response_id
        return self._turn

    def _close_turn(self) -> None:
        if self._turn is not None:
            self._messages += self._turn.build_messages()
        self._turn = None


def read_texts(content: Any, where: str) -> list[str]:
    """The texts of an item's content.

    Raises:
        RequestError: it is none, or holds images, audio or files.
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise RequestError(f"{where} must be text or a list of parts", where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        text = part.get(key) if key is not None else None
        if not isinstance(text, str):
            raise RequestError(
                f"{where} has a part of type {kind!r:.80}; this engine reads text parts only: no "
                "images, no audio, no files",
                where,
            )
        texts.append(text)
    return texts


def _build_content(texts: list[str]) -> str | list[dict[str, str]]:
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


def _read_call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    name = take(item, "name", str, "", f"{where}.")
    call_id = take(item, "call_id", str, "", f"{where}.")
    if not name or not call_id:
        raise RequestError(f"{where} of type function_call needs name and call_id", where)
    arguments = take(item, "arguments", str, "{}", f"{where}.")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_output(item: Mapping[str, Any], where: str) -> Message:
    call_id = take(item, "call_id", str, "", f"{where}.")
    if not call_id:
        raise RequestError(f"{where} of type function_call_output needs call_id", where)
    texts = read_texts(item.get("output"), f"{where}.output")
    return {"role": "tool", "tool_call_id": call_id, "content": _build_content(texts)}
