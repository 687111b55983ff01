"""``/v1/responses`` on exact replies, the official SDK as the judge."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from agentrl_cli.errors import EngineError
from agentrl_cli.records import Interaction, InteractionStatus
from agentrl_cli.tracking.client import TrackingClient

Open = Callable[..., TrackingClient]
TOOL: Any = {
    "type": "function",
    "name": "f",
    "description": "Does it.",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


async def create(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return await client.responses.create(**{"model": "m", "input": "What?", **options})


async def read_events(client: openai.AsyncOpenAI, **options: Any) -> list[Any]:
    stream = await create(client, stream=True, **options)
    return [event async for event in stream]


def assert_continues(child: Interaction, parent: Interaction) -> None:
    known = parent.prompt_ids + parent.completion_ids
    assert (child.parent_id, child.mismatch_cause) == (parent.id, None)
    assert child.prompt_ids[: len(known)] == known


def answer_call(response: Any, output: Any = "42") -> dict[str, Any]:
    [call] = [item for item in response.output if item.type == "function_call"]
    return {"type": "function_call_output", "call_id": call.call_id, "output": output}


async def test_reply_has_items_usage_and_what_was_asked(open_client: Open) -> None:
    client = open_client("I look. " + CALL)
    asked = {"instructions": "Be brief.", "tools": [TOOL], "metadata": {"k": "v"}, "user": "u"}
    response = await create(client, **asked, max_output_tokens=400, temperature=0.5, top_p=0.9)
    message, call = response.output
    assert (message.type, response.output_text) == ("message", "I look. ")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "f", {"x": 1})
    assert (message.status, call.status, response.status) == ("completed",) * 3
    [interaction] = client.interactions
    assert response.id == interaction.id
    assert response.id.startswith("resp_")
    assert call.call_id == interaction.reply["tool_calls"][0]["id"]  # type: ignore[index]
    assert response.usage.input_tokens == len(interaction.prompt_ids)
    assert response.usage.output_tokens == len(interaction.completion_ids)
    echoed = response.to_dict()
    assert {key: echoed[key] for key in ("instructions", "metadata", "user")} == {
        key: asked[key] for key in ("instructions", "metadata", "user")
    }
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.9, 400)
    assert [t.name for t in response.tools] == ["f"]
    assert response.store is response.parallel_tool_calls is True
    assert (response.tool_choice, response.reasoning.effort) == ("auto", None)


async def test_request_becomes_chat_messages_tools_and_sampling(open_client: Open) -> None:
    client = open_client("a")
    items = [
        {"role": "developer", "content": "Now."},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [
            {"type": "input_text", "text": "4"}, {"type": "input_text", "text": "2"}]},
    ]  # fmt: skip
    await create(
        client, input=items, instructions="Be.", tools=[TOOL], max_output_tokens=7, temperature=0.5
    )
    [interaction] = client.interactions
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert interaction.messages == (
        {"role": "system", "content": "Be."},
        {"role": "developer", "content": "Now."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}],
        },
    )
    function = {key: value for key, value in TOOL.items() if key != "type"}
    assert interaction.tools == ({"type": "function", "function": function},)
    [sampling] = client.gateway.engine.samplings  # type: ignore[attr-defined]
    assert (sampling.max_tokens, sampling.temperature) == (7, 0.5)


EVENTS_OF_TEXT = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    *["response.output_text.delta"] * 2,
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


async def test_events_of_text_come_in_the_official_order(open_client: Open) -> None:
    client = open_client("ab")
    tokenizer = client.gateway.template.tokenizer
    assert len(tokenizer.encode("ab")) == 2
    events = await read_events(client)
    assert [e.type for e in events] == [*EVENTS_OF_TEXT, "response.completed"]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    created, final = events[0].response, events[-1].response
    assert (created.id, created.status, created.output) == (final.id, "in_progress", [])
    assert [e.delta for e in events if e.type.endswith("delta")] == ["a", "b"]
    [item] = final.output
    assert {e.item_id for e in events if hasattr(e, "item_id")} == {item.id}
    assert events[-2].item == item
    assert events[6].text == final.output_text == "ab"
    assert final.usage.output_tokens == 3


async def test_events_of_calls_come_in_the_official_order(open_client: Open) -> None:
    client = open_client("Hm" + CALL + "\n" + CALL)
    events = await read_events(client, tools=[TOOL])
    of_call = [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert [e.type for e in events][-9:] == [*of_call, *of_call, "response.completed"]
    places = [(e.output_index, e.item.status) for e in events if hasattr(e, "item")]
    # One item ends before the next begins.
    assert places == [(n, s) for n in range(3) for s in ("in_progress", "completed")]
    kinds = [item.type for item in events[-1].response.output]
    assert kinds == ["message", "function_call", "function_call"]
    done = [e for e in events if e.type.endswith("arguments.done")]
    deltas = [e for e in events if e.type.endswith("arguments.delta")]
    assert [e.arguments for e in done] == [e.delta for e in deltas] == ['{"x": 1}'] * 2


@pytest.mark.parametrize("text", ["The answer.", "Ünï 😀", CALL, "a " + CALL + CALL, "", "<tool_"])
async def test_streamed_response_equals_the_whole_one(open_client: Open, text: str) -> None:
    client = open_client(text, text)
    options: Any = {"model": "m", "input": "What?", "tools": [TOOL]}
    include = ["message.output_text.logprobs"]
    whole = await client.responses.create(**options, include=include)
    async with client.responses.stream(**options, include=include) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    first, second = client.interactions
    assert first.completion_ids == second.completion_ids

    def describe(response: Any) -> Any:
        data = response.model_dump(mode="json", include={"output", "usage", "status"})
        for item in data["output"]:
            item.pop("id", None)
            item.pop("call_id", None)
            item.pop("parsed_arguments", None)
            for part in item.get("content") or ():
                part.pop("parsed", None)
        return data

    assert describe(final) == describe(whole)
    assert whole.status == "completed"


def replay_dumped(response: Any) -> list[Any]:
    return [item.model_dump() for item in response.output]


def replay_without_ids(response: Any) -> list[Any]:
    dropped = {"id", "status", "phase"}
    return [item.model_dump(exclude_none=True, exclude=dropped) for item in response.output]


def replay_as_easy_messages(response: Any) -> list[Any]:
    calls = [i.model_dump() for i in response.output if i.type != "message"]
    return [{"role": "assistant", "content": response.output_text}, *calls]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("replay", [replay_dumped, replay_without_ids, replay_as_easy_messages])
async def test_replayed_items_continue_the_turn_that_was_sampled(
    open_client: Open, replay: Callable[[Any], list[Any]], stream: bool
) -> None:
    client = open_client("I look.\n\n\n" + CALL + CALL, "Forty two.", "Bye")
    items: list[Any] = [{"role": "user", "content": "What?"}]

    async def ask() -> Any:
        options: Any = {"model": "m", "input": items, "tools": [TOOL], "instructions": "Be."}
        if not stream:
            return await client.responses.create(**options)
        async with client.responses.stream(**options) as events:
            return await events.get_final_response()

    first = await ask()
    calls = [item for item in first.output if item.type == "function_call"]
    items += replay(first)
    items += [{"type": "function_call_output", "call_id": c.call_id, "output": "1"} for c in calls]
    second = await ask()
    items += [*replay(second), {"role": "user", "content": "Thanks"}]
    await ask()
    one, two, three = client.interactions
    assert_continues(two, one)
    assert_continues(three, two)
    [exported] = client.export_interactions().values()
    sampled = one.completion_ids + two.completion_ids + three.completion_ids
    assert sum(exported.loss_mask) == len(sampled)


async def test_previous_response_id_continues_the_turn(open_client: Open) -> None:
    client = open_client(CALL, "Forty two.", "Other", "Three")
    first = await create(client, tools=[TOOL], instructions="Be.")
    second = await create(
        client,
        input=[answer_call(first)],
        tools=[TOOL],
        instructions="Be.",
        previous_response_id=first.id,
        store=False,
    )
    assert second.previous_response_id == first.id
    # Instructions are each response's own: others begin another conversation.
    await create(client, tools=[TOOL], instructions="Not.", previous_response_id=second.id)
    # A session keeps replies that are not to be stored, too.
    await create(client, tools=[TOOL], instructions="Be.", previous_response_id=second.id)
    one, two, three, four = client.interactions
    assert_continues(two, one)
    assert_continues(four, two)
    assert three.parent_id is None
    assert [m["role"] for m in three.messages] == [
        *("system", "user", "assistant", "tool", "assistant", "user"),
    ]
    assert three.messages[0]["content"] == "Not."


async def test_turns_of_several_responses_stay_apart_when_replayed(open_client: Open) -> None:
    client = open_client("One.", "Two.", "Three.")
    first = await create(client)
    second = await create(client, input=[], previous_response_id=first.id)
    question = {"role": "user", "content": "What?"}
    await create(client, input=[question, *replay_dumped(first), *replay_dumped(second)])
    _, two, three = client.interactions
    assert [m["content"] for m in three.messages] == ["What?", "One.", "Two."]
    assert_continues(three, two)


@pytest.mark.parametrize("replay", [replay_dumped, replay_without_ids])
async def test_results_may_stand_between_the_calls_of_one_turn(
    open_client: Open, replay: Callable[[Any], list[Any]]
) -> None:
    client = open_client("I look. " + CALL + CALL, "Forty two.")
    first = await create(client, tools=[TOOL])
    items: list[Any] = [{"role": "user", "content": "What?"}]
    for item in replay(first):
        items.append(item)
        if item["type"] == "function_call":
            output = {"type": "function_call_output", "call_id": item["call_id"], "output": "4"}
            items.append(output)
    await create(client, input=[*items, {"role": "user", "content": "So?"}], tools=[TOOL])
    one, two = client.interactions
    roles = [m["role"] for m in two.messages]
    if replay is replay_dumped:
        # Ids say that the second call is of the same turn.
        assert_continues(two, one)
        assert roles == ["user", "assistant", "tool", "tool", "user"]
    else:
        assert roles == ["user", "assistant", "tool", "assistant", "tool", "user"]


async def test_reply_cut_for_length_is_incomplete(open_client: Open) -> None:
    client = open_client(("The ans", "length"), ("The ans", "length"))
    whole = await create(client)
    events = await read_events(client)
    final = events[-1]
    assert final.type == "response.incomplete"
    for response in (whole, final.response):
        assert (response.status, response.output[0].status) == ("incomplete",) * 2
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output_text == "The ans"
        assert response.completed_at is None


@pytest.mark.parametrize(
    "text", ["Ünï", "Hm " + CALL + " and so", "<think>\nI see\n</think>\n\nÜ" + CALL]
)
async def test_logprobs_spell_the_text_and_nothing_beside_it(
    open_client: Open, thinking_tokenizer: Any, text: str
) -> None:
    client = open_client(text, text, tokenizer=thinking_tokenizer)
    include = ["message.output_text.logprobs"]
    options: Any = {"include": include, "top_logprobs": 3, "tools": [TOOL]}
    whole = await create(client, **options)
    events = await read_events(client, **options)
    for response in (whole, events[-1].response):
        parts = [item.content[0] for item in response.output if item.type == "message"]
        assert parts
        for part in parts:
            assert bytes(b for t in part.logprobs for b in t.bytes).decode() == part.text
            for token in part.logprobs:
                assert [t.logprob for t in token.top_logprobs] == [
                    token.logprob - n for n in range(3)
                ]
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    # ``parts`` are now those of the stream.
    assert [t.to_dict() for delta in deltas for t in delta.logprobs] == [
        token.to_dict() for part in parts for token in part.logprobs
    ]


async def test_failure_in_the_middle_is_reported_and_not_answered(
    open_client: Open, let_engine_die: Callable[[Any], None]
) -> None:
    client = open_client()
    let_engine_die(client.gateway.engine)  # type: ignore[attr-defined]
    stream = await create(client, stream=True)
    events = [await anext(stream) for _ in range(6)]
    with pytest.raises(openai.APIError, match="the server died"):
        await anext(stream)
    failed = events[-1]
    assert (events[0].type, failed.type) == ("response.created", "response.failed")
    assert (failed.response.status, failed.response.error.code) == ("failed", "server_error")
    assert client.interactions[0].status is InteractionStatus.FAILED
    raw = await client.gateway.http_client.post(
        "http://agentrl.invalid/v1/responses",
        json={"input": "What?", "stream": True},
        headers={"Authorization": f"Bearer {client.session_key}"},
    )
    lines = [line for line in raw.text.splitlines() if line.startswith("data: ")]
    sent = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    assert [event["type"] for event in sent[-2:]] == ["response.failed", "error"]
    assert sent[-1]["message"] == sent[-1]["error"]["message"] == "the server died"


async def test_too_long_input_is_named_so(open_client: Open) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await create(open_client(max_model_len=5), truncation="auto")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


async def test_unknown_previous_response_is_refused_as_openai_does(open_client: Open) -> None:
    client = open_client(EngineError("boom"))
    with pytest.raises(openai.APIStatusError):
        await create(client)
    [failed] = client.interactions
    for unknown in ("resp_123", "chatcmpl-1", failed.id):
        with pytest.raises(openai.BadRequestError, match="not found") as caught:
            await create(client, previous_response_id=unknown)
        assert caught.value.code == "previous_response_not_found"
        assert caught.value.param == "previous_response_id"


async def test_stored_responses_are_not_served(open_client: Open) -> None:
    client = open_client("a")
    response = await create(client)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="send previous_response_id"):
            await ask(response.id)


async def test_effort_goes_to_the_template(
    open_client: Open, make_tokenizer: Callable[[str], Any]
) -> None:
    shown = "{{ reasoning_effort }} {{ enable_thinking is defined }} {{ messages[0].content }}"
    tokenizer = make_tokenizer(shown)
    client = open_client("a", "b", "c", tokenizer=tokenizer)
    await create(client, reasoning={"effort": "low"})
    await create(client, reasoning={"effort": "none"}, extra_body={
        "chat_template_kwargs": {"reasoning_effort": "high"}})  # fmt: skip
    message: Any = {"role": "user", "content": "What?"}
    await client.chat.completions.create(model="m", messages=[message], reasoning_effort="none")
    prompts = [tokenizer.decode(i.prompt_ids).split()[:2] for i in client.interactions]
    assert prompts == [["low", "False"], ["high", "True"], ["none", "True"]]


@pytest.mark.parametrize("summarize", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_come_back_as_the_turns_own(
    open_client: Open, thinking_tokenizer: Any, stream: bool, summarize: bool
) -> None:
    text = "<think>\nI see\n</think>\n\nYes" + CALL
    client = open_client(text, "a", "b", tokenizer=thinking_tokenizer)
    options: Any = {"tools": [TOOL]}
    if summarize:
        options["reasoning"] = {"summary": "auto"}
    if stream:
        response = (await read_events(client, **options))[-1].response
    else:
        response = await create(client, **options)
    reasoning, message, call = response.output
    assert [i.type for i in response.output] == ["reasoning", "message", "function_call"]
    shown, hidden = reasoning.content, reasoning.summary
    if summarize:
        shown, hidden = hidden, shown
    assert [part.text.strip() for part in shown] == ["I see"]
    assert hidden == []
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    question = {"role": "user", "content": "What?"}
    # Some frameworks send thoughts back by their id alone.
    emptied = {"type": "reasoning", "id": reasoning.id, "summary": []}
    for item in (reasoning.model_dump(exclude_none=True), emptied):
        items = [question, item, message.model_dump(), call.model_dump(), answer_call(response)]
        await create(client, input=items, **options)
    first, *others = client.interactions
    for other in others:
        assert other.messages[1] == first.reply
        assert other.parent_id == first.id
