"""Generated conversations over every protocol: no 500, no hang, and always a consistent record.

A protocol plugs in with a :class:`Fuzzed`: how a valid request of it looks, and how its replies
are checked. The requests are then corrupted at random places.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agentrl_cli.engine.grammar import require_xgrammar
from agentrl_cli.errors import (
    ContextLengthError,
    EngineError,
    EngineTimeoutError,
    MissingExtraError,
)
from agentrl_cli.records import InteractionStatus
from agentrl_cli.tracking.gateway import Gateway
from agentrl_cli.tracking.session import Budget, Session

NUM_CONVERSATIONS = 500
MAX_REQUESTS = 4
#: Requests that a run makes at least, over all conversations.
MIN_REQUESTS = 1000
DEADLINE_SECONDS = 10.0

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
REPLIES: Sequence[Any] = (
    "The answer is forty two.",
    "Ünïcödé 😀",
    "",
    CALL,
    "I look. " + CALL + "\n" + CALL + " and so",
    "<tool_call>\n{broken",
    CALL.replace("1}", r'"\ud800 \u0000"}'),
    "<think>\nhm\n</think>\n\nParis",
    '{"x": 1}',
    ("The answer is", "length"),
    ("<tool_call>\n{", "length"),
    EngineError("the server died"),
    EngineTimeoutError("too slow"),
    ContextLengthError(10, 5),
)


# -- what may be wrong -----------------------------------------------------------------------

JUNK: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 7, 2**31, 2**63, 2**70, -(2**65), 1e308, -0.5, 0.5]),
    st.sampled_from([float("nan"), float("inf")]),
    st.sampled_from(["", "x", "auto", "none", "required", "\x00", "\ud800", "😀", "a" * 3000]),
    st.sampled_from([[], {}, [[]], [None], ["x"], {"type": "x"}, {"x": None}, [{}], {"": [{}]}]),
    st.text(max_size=8),
    # A copy: what is broken twice would break the next example, too.
).map(copy.deepcopy)
KEYS = st.sampled_from(
    ["type", "id", "content", "name", "x", "stream", "n", "functions", "seed", "background"]
)


def list_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in ``value`` with every key of it."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from list_places(value[key])


def corrupt(draw: st.DrawFn, body: Any) -> Any:
    """``body`` with up to two places replaced, removed, doubled or added to."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        places = list(list_places(body))
        if not places:
            break
        container, key = places[draw(st.integers(0, len(places) - 1))]
        action = draw(st.sampled_from(["replace", "replace", "remove", "double", "add"]))
        if action == "replace":
            container[key] = draw(JUNK)
        elif action == "remove":
            del container[key]
        elif isinstance(container, list):
            container.append(copy.deepcopy(container[key]) if action == "double" else draw(JUNK))
        else:
            container[draw(KEYS)] = draw(JUNK)
    return body


def optional(draw: st.DrawFn, body: dict[str, Any], **fields: st.SearchStrategy[Any]) -> None:
    """Adds some of the fields."""
    for key in draw(st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True)):
        body[key] = draw(fields[key])


# -- what is valid ---------------------------------------------------------------------------

TEXTS = st.sampled_from(["Hello", "", "What is 2 + 2?", "Ünï 😀", "<|im_end|>", "</think>"])
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
NUMBERS = st.sampled_from([0, 0.5, 1, 1.0])


def build_chat_body(draw: st.DrawFn, replies: Sequence[Any]) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": "What?"}]
    if draw(st.booleans()):
        role = draw(st.sampled_from(["system", "developer"]))
        messages.insert(0, {"role": role, "content": [{"type": "text", "text": "Be."}]})
    for reply in replies:
        message = {k: v for k, v in reply["choices"][0]["message"].items() if v is not None}
        messages.append(message)
        for call in message.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "4"})
        messages.append({"role": "user", "content": draw(TEXTS)})
    function = {"name": "f", "description": "Does.", "parameters": SCHEMA, "strict": True}
    body: dict[str, Any] = {"model": "m", "messages": messages}
    if draw(st.booleans()):
        body["tools"] = [{"type": "function", "function": function}]
    named = {"type": "function", "function": {"name": "f"}}
    schema = {"name": "s", "schema": SCHEMA, "strict": True}
    optional(
        draw, body,
        stream=st.just(True), n=st.integers(1, 3), stop=st.sampled_from(["x", ["42", " "]]),
        seed=st.integers(), temperature=NUMBERS, top_p=NUMBERS, logprobs=st.just(True),
        top_logprobs=st.integers(0, 3), max_completion_tokens=st.integers(1, 9),
        tool_choice=st.sampled_from(["auto", "none", "required", named]),
        parallel_tool_calls=st.booleans(), stream_options=st.just({"include_usage": True}),
        response_format=st.sampled_from([
            {"type": "text"}, {"type": "json_object"},
            {"type": "json_schema", "json_schema": schema}]),
        reasoning_effort=st.sampled_from(["low", "none"]),
        chat_template_kwargs=st.just({"enable_thinking": False}),
        frequency_penalty=st.just(0), metadata=st.just({"a": "b"}),
    )  # fmt: skip
    return body


def build_responses_body(draw: st.DrawFn, replies: Sequence[Any]) -> dict[str, Any]:
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "What?"}]}]
    body: dict[str, Any] = {"model": "m", "input": items}
    by_id = bool(replies) and draw(st.booleans())
    if by_id:
        body["previous_response_id"] = replies[-1]["id"]
        body["input"] = items = []
    for reply in replies[-1:] if by_id else replies:
        items += [] if by_id else reply["output"]
        for item in reply["output"]:
            if item["type"] == "function_call":
                output = {"type": "function_call_output", "call_id": item["call_id"]}
                items.append({**output, "output": "4"})
        items.append({"role": "user", "content": draw(TEXTS)})
    tool = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}
    if draw(st.booleans()):
        body["tools"] = [tool]
    schema = {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}
    named = {"type": "function", "name": "f"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [named]}
    optional(
        draw, body,
        stream=st.just(True), instructions=TEXTS, store=st.booleans(), temperature=NUMBERS,
        top_p=NUMBERS, max_output_tokens=st.integers(1, 9), metadata=st.just({"a": "b"}),
        include=st.just(["message.output_text.logprobs"]), top_logprobs=st.integers(0, 3),
        tool_choice=st.sampled_from(["auto", "none", "required", named, allowed]),
        parallel_tool_calls=st.booleans(), truncation=st.sampled_from(["auto", "disabled"]),
        text=st.sampled_from([{"format": {"type": "json_object"}}, {"format": schema}, {}]),
        reasoning=st.sampled_from([{"effort": "low"}, {"summary": "auto"}, {"effort": None}]),
        service_tier=st.just("auto"),
    )  # fmt: skip
    return body


def build_messages_body(draw: st.DrawFn, replies: Sequence[Any]) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What?"}]}]
    body: dict[str, Any] = {"model": "m", "max_tokens": draw(st.integers(1, 9))}
    by_id = bool(replies) and draw(st.sampled_from([False, False, True]))
    if by_id:
        body["thread"] = {"type": "continue", "previous_message_id": replies[-1]["id"]}
        messages = []
    for reply in replies[-1:] if by_id else replies:
        blocks = reply["content"]
        messages += [] if by_id else [{"role": "assistant", "content": blocks}]
        uses = [block["id"] for block in blocks if block["type"] == "tool_use"]
        result = {"type": "tool_result", "is_error": draw(st.booleans()), "content": draw(TEXTS)}
        results: list[Any] = [{**result, "tool_use_id": use_id} for use_id in uses]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": "Go."}]})
    body["messages"] = messages
    tool = {"name": "f", "description": "Does.", "input_schema": SCHEMA, "strict": True}
    if not by_id and draw(st.booleans()):
        body["tools"] = [tool]
    if not by_id and draw(st.booleans()):
        body["system"] = draw(st.sampled_from(["Be.", [{"type": "text", "text": "Be."}]]))
    kinds = [{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "f"}]
    enabled = {"type": "enabled", "budget_tokens": 1024}
    omitted = {"type": "adaptive", "display": "omitted"}
    schema = {"type": "json_schema", "schema": SCHEMA}
    optional(
        draw, body,
        stream=st.just(True), temperature=NUMBERS, top_p=NUMBERS, top_k=st.just(-1),
        stop_sequences=st.sampled_from([["42", " "], ["x"]]), tool_choice=st.sampled_from(kinds),
        thinking=st.sampled_from([enabled, omitted, {"type": "disabled"}]),
        output_config=st.sampled_from([{"format": schema}, {"effort": "low"}]),
        metadata=st.just({"user_id": "u"}), service_tier=st.just("auto"),
        cache_control=st.just({"type": "ephemeral"}), thread=st.just(body.get("thread")),
    )  # fmt: skip
    return body


# -- what comes back -------------------------------------------------------------------------


def parse_events(text: str) -> list[dict[str, Any]]:
    """The data of all server-sent events but the end mark."""
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def check_chat_events(text: str) -> dict[str, Any] | None:
    """Checks a stream; the message that it adds up to, None: it ended with an error."""
    events = parse_events(text)
    if "error" in events[-1]:
        assert isinstance(events[-1]["error"]["message"], str)
        return None
    assert text.endswith("data: [DONE]\n\n")
    state: ChatCompletionStreamState[Any] = ChatCompletionStreamState()
    for event in events:
        state.handle_chunk(ChatCompletionChunk.model_validate(event, strict=True))
    completion = state.current_completion_snapshot.model_dump(mode="json")
    ended = [c["index"] for e in events for c in e["choices"] if c["finish_reason"]]
    assert sorted(ended) == list(range(len(completion["choices"])))
    message = completion["choices"][0]["message"]
    message.pop("parsed", None)
    for call in message.get("tool_calls") or ():
        call["function"].pop("parsed_arguments", None)
        call.pop("index", None)
    return {"choices": [{"message": message}]}


_RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def check_responses_events(text: str) -> dict[str, Any] | None:
    """Checks a stream; the final response, None: it ended with an error."""
    events = parse_events(text)
    if events[-1]["type"] == "error":
        assert isinstance(events[-1]["error"]["message"], str)
        return None
    for event in events:
        _RESPONSE_EVENT.validate_python(event)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    response: dict[str, Any] = events[-1]["response"]
    Response.model_validate(response)
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == response["output"]
    return response


def check_error(body: dict[str, Any]) -> None:
    """Checks an error of OpenAI's shape."""
    error = body["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert set(error) == {"message", "type", "param", "code"}


def check_chat_reply(body: dict[str, Any]) -> dict[str, Any]:
    ChatCompletion.model_validate(body, strict=True)
    return body


def check_response(body: dict[str, Any]) -> dict[str, Any]:
    Response.model_validate(body)
    return body


def check_message(body: dict[str, Any]) -> dict[str, Any]:
    from anthropic.types import Message

    Message.model_validate(body)
    assert body["stop_reason"] is not None
    return body


def check_message_events(text: str) -> dict[str, Any] | None:
    """Checks a stream as the SDK reads it; the message, None: it ended with an error."""
    from anthropic.lib.streaming._messages import accumulate_event
    from anthropic.types import RawMessageStreamEvent

    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    events = parse_events(text)
    if events[-1]["type"] == "error":
        check_message_error(events[-1])
        return None
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    message: Any = None
    buffers: dict[int, bytes] = {}
    is_open = None
    for event in events:
        if event["type"] == "ping":
            continue
        if event["type"].startswith("content_block"):
            begins = event["type"] == "content_block_start"
            assert is_open == (None if begins else event["index"])
            is_open = None if event["type"] == "content_block_stop" else event["index"]
        message = accumulate_event(
            event=adapter.validate_python(event), current_snapshot=message, json_bufs=buffers
        )
    assert is_open is None
    return check_message(message.to_dict(exclude_unset=False, exclude_none=True))


def check_message_error(body: dict[str, Any]) -> None:
    """Checks an error of Anthropic's shape."""
    from anthropic.types import ErrorResponse

    ErrorResponse.model_validate(body)
    assert body["error"]["message"]


class Fuzzed(NamedTuple):
    """One protocol under test; ``None`` for its events: they ended with an error."""

    path: str
    build_body: Callable[[st.DrawFn, Sequence[Any]], dict[str, Any]]
    check_reply: Callable[[dict[str, Any]], dict[str, Any]]
    check_events: Callable[[str], dict[str, Any] | None]
    check_error: Callable[[dict[str, Any]], None] = check_error
    count_path: str | None = None


FUZZED = (
    Fuzzed("/v1/chat/completions", build_chat_body, check_chat_reply, check_chat_events),
    Fuzzed("/v1/responses", build_responses_body, check_response, check_responses_events),
    pytest.param(
        Fuzzed(
            "/v1/messages",
            build_messages_body,
            check_message,
            check_message_events,
            check_message_error,
            count_path="/v1/messages/count_tokens",
        ),
        marks=pytest.mark.anthropic,
    ),
)


# -- what is on record -----------------------------------------------------------------------


def check_record(session: Session) -> None:
    """Every interaction is well formed, the tree and what is exported agree with them."""
    interactions = {i.id: i for i in session.interactions}
    assert len(interactions) == len(session.interactions)
    for one in interactions.values():
        # What cannot be written as UTF-8 could not be stored.
        for data in (tuple(one.messages), one.tools, one.reply, one.error):
            json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
        assert one.ended is not None
        assert one.started < one.ended
        if one.parent_id is not None:
            parent = interactions[one.parent_id]
            assert parent.status is InteractionStatus.COMPLETED
            assert (parent.ended or 0) < one.started
            ids = parent.prompt_ids + parent.completion_ids
            assert not one.extends_parent or one.prompt_ids[: len(ids)] == ids
        if one.status is not InteractionStatus.COMPLETED:
            assert one.error
            assert (one.reply, one.completion_ids) == (None, ())
            continue
        assert len(one.completion_ids) == len(one.rollout_logprobs) == len(one.versions)
        assert one.finish_reason in ("stop", "length", "tool_calls")
        assert one.reply is not None
        for call in one.reply.get("tool_calls", ()):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
    sampled = [i for i in interactions.values() if i.completion_ids]
    trained = sum(len(i.completion_ids) for i in sampled if i.temperature > 0)
    exported = session.export_interactions()
    assert sum(sum(e.loss_mask) for e in exported.values()) == trained
    assert len(session.export_interactions("individual")) == len(sampled)


async def ask(
    fuzzed: Fuzzed, gateway: Gateway, session: Session, sampled: Any, body: Any
) -> dict[str, Any] | None:
    """Sends one request and checks all that came of it; the reply, if there was one."""
    num_known = len(session.interactions)

    async def post(path: str) -> Any:
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await gateway.http_client.post(
                f"http://x.invalid{path}",
                content=json.dumps(body).encode(),
                headers={"Authorization": f"Bearer {session.key}"},
            )

    counted = await post(fuzzed.count_path) if fuzzed.count_path is not None else None
    assert len(session.interactions) == num_known
    response = await post(fuzzed.path)
    status = response.status_code
    assert status < 500 or (status in (503, 504) and isinstance(sampled, EngineError)), (
        response.text
    )
    check_record(session)
    if status != 200:
        fuzzed.check_error(response.json())
        news = session.interactions[num_known:]
        assert all(i.status is not InteractionStatus.COMPLETED for i in news)
        return None
    assert len(session.interactions) > num_known
    if counted is not None:
        num_prompt_tokens = len(session.interactions[-1].prompt_ids)
        assert counted.json() == {"input_tokens": num_prompt_tokens}
    if response.headers["content-type"].startswith("text/event-stream"):
        return fuzzed.check_events(response.text)
    return fuzzed.check_reply(response.json())


@pytest.mark.slow
@pytest.mark.parametrize("fuzzed", FUZZED, ids=["chat", "responses", "messages"])
def test_generated_conversations(fuzzed: Fuzzed, make_engine: Any, tokenizer: Any) -> None:
    if fuzzed.path.startswith("/v1/messages"):
        pytest.importorskip("anthropic")
    # Takes seconds, which are not the first request's.
    with contextlib.suppress(MissingExtraError):
        require_xgrammar()
    num_requests = num_answered = 0
    engine = make_engine(max_model_len=10**6)
    gateway = Gateway(engine, tokenizer)

    @settings(
        max_examples=NUM_CONVERSATIONS,
        derandomize=True,
        deadline=None,
        database=None,
        # Making a failure smaller takes minutes, and what was sent is short.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def converse(data: st.DataObject) -> None:
        nonlocal num_requests, num_answered
        session = gateway.open_session(budget=Budget(max_turns=10))
        replies: list[Any] = []
        for _ in range(data.draw(st.integers(1, MAX_REQUESTS))):
            sampled = data.draw(st.sampled_from(REPLIES))
            # As often as a request may ask for it.
            engine.script = [sampled] * 3
            body = corrupt(data.draw, fuzzed.build_body(data.draw, replies))
            note(f"{sampled!r} to {json.dumps(body)}")
            reply = runner.run(ask(fuzzed, gateway, session, sampled, body))
            num_requests += 1
            if reply is not None:
                num_answered += 1
                replies.append(reply)
        gateway.close_session(session)

    with asyncio.Runner() as runner:
        try:
            converse()
        finally:
            runner.run(gateway.close())
    assert num_requests >= MIN_REQUESTS
    assert num_answered > num_requests / 5, "most requests were refused: nothing was tested"
