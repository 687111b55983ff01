"""OpenAI's own client against both of its protocols, on engines that really sample.

The model is random, so what it says is any text at all; where its calls and answers have a form,
sampling is held to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import openai
import pydantic
import pytest

from agentrl_cli.tracking.client import TrackingClient

pytestmark = pytest.mark.slow

Open = Callable[..., TrackingClient]
Check = Callable[[TrackingClient, Any], None]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NAMES = ("weather", "forecast")


class Answer(pydantic.BaseModel):
    """A form that ends soon."""

    city: Literal["Paris", "Rome"]
    sunny: bool


@dataclass(frozen=True)
class Call:
    """A call that was made."""

    name: str
    arguments: str
    id: str


@dataclass
class Turn:
    """What a protocol gave for one turn."""

    text: str
    calls: list[Call]
    is_cut: bool
    num_prompt_tokens: int
    num_completion_tokens: int


class ChatTalk:
    """A conversation over ``/v1/chat/completions``."""

    def __init__(self, client: TrackingClient, *, stream: bool) -> None:
        self.client = client
        self.stream = stream
        self.messages: list[Any] = [{"role": "developer", "content": "Be brief."}]

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def answer(self, call: Any, result: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    async def ask(self, max_tokens: int = 200, choice: Any = None, **options: Any) -> Turn:
        """The next turn; ``choice`` is a tool_choice, or the name of a tool."""
        # With strict tools the SDK raises where a reply was cut.
        functions = [{"name": n, "parameters": PARAMETERS} for n in NAMES]
        if choice in NAMES:
            choice = {"type": "function", "function": {"name": choice}}
        options |= {"tool_choice": choice} if choice else {}
        options |= {
            "model": "m",
            "messages": self.messages,
            "max_completion_tokens": max_tokens,
            "tools": [{"type": "function", "function": f} for f in functions],
        }
        completions = self.client.chat.completions
        if self.stream:
            options["stream_options"] = {"include_usage": True}
            async with completions.stream(**options) as events:
                async for _ in events:
                    pass
                # Its get_final_completion refuses replies that were cut.
                completion: Any = events.current_completion_snapshot
        else:
            completion = await completions.create(**options)
        [choice] = completion.choices
        message = choice.message
        self.messages.append(message.model_dump(exclude_none=True))
        calls = [
            Call(c.function.name, c.function.arguments, c.id) for c in message.tool_calls or ()
        ]
        return Turn(
            message.content or "",
            calls,
            choice.finish_reason == "length",
            completion.usage.prompt_tokens,
            completion.usage.completion_tokens,
        )


class ReplayingTalk:
    """A conversation over ``/v1/responses``, every item sent back."""

    def __init__(self, client: TrackingClient, *, stream: bool) -> None:
        self.client = client
        self.stream = stream
        self.items: list[Any] = []
        self.more: dict[str, Any] = {}

    def say(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def answer(self, call: Any, result: str) -> None:
        self.items.append({"type": "function_call_output", "call_id": call.id, "output": result})

    async def ask(self, max_tokens: int = 200, choice: Any = None, **options: Any) -> Turn:
        if choice in NAMES:
            choice = {"type": "function", "name": choice}
        options |= {"tool_choice": choice} if choice else {}
        options |= {
            "model": "m",
            "input": self.items,
            "instructions": "Be brief.",
            "max_output_tokens": max_tokens,
            "tools": [
                {"type": "function", "name": n, "parameters": PARAMETERS, "strict": True}
                for n in NAMES
            ],
            **self.more,
        }
        response = await self._create(options)
        self.keep(response)
        calls = [
            Call(i.name, i.arguments, i.call_id)
            for i in response.output
            if i.type == "function_call"
        ]
        is_cut = response.status == "incomplete"
        assert is_cut == (response.incomplete_details is not None)
        usage = response.usage
        return Turn(response.output_text, calls, is_cut, usage.input_tokens, usage.output_tokens)

    async def _create(self, options: Any) -> Any:
        if not self.stream:
            return await self.client.responses.create(**options)
        last = None
        async with self.client.responses.stream(**options) as events:
            async for event in events:
                last = event
        assert last is not None
        assert last.type in ("response.completed", "response.incomplete")
        return last.response  # type: ignore[union-attr]

    def keep(self, response: Any) -> None:
        """Gets ready for the next turn."""
        keys = {"exclude": {"parsed_arguments"}, "exclude_none": True, "mode": "json"}
        for item in response.output:
            data = item.model_dump(**keys)
            for part in data.get("content", ()):
                part.pop("parsed", None)
            self.items.append(data)


class ReferringTalk(ReplayingTalk):
    """The same, each turn naming the one before."""

    def keep(self, response: Any) -> None:
        self.items = []
        self.more = {"previous_response_id": response.id}


Talk = ChatTalk | ReplayingTalk


@pytest.fixture(params=[ChatTalk, ReplayingTalk, ReferringTalk], ids=["chat", "replay", "refer"])
def talk_class(request: pytest.FixtureRequest) -> type[Talk]:
    """Each way to hold a conversation."""
    return request.param


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    """Streamed or not."""
    return request.param


async def test_tool_conversation_is_trained_as_it_was_sampled(
    open_client: Open, engine: Any, check_sampled: Check, talk_class: type[Talk], stream: bool
) -> None:
    client = open_client(seed=3)
    talk = talk_class(client, stream=stream)
    talk.say("How is the weather?")
    plan: list[Any] = ["weather", "none", "required", None, "forecast"]
    for number, choice in enumerate(plan):
        parallel = {} if number % 2 else {"parallel_tool_calls": False}
        turn = await talk.ask(40 if choice in (None, "none") else 200, choice, **parallel)
        interaction = client.interactions[-1]
        assert turn.num_prompt_tokens == len(interaction.prompt_ids)
        assert turn.num_completion_tokens == len(interaction.completion_ids)
        assert turn.text == (interaction.reply or {})["content"] or not turn.text
        if choice in ("required", *NAMES):
            assert len(turn.calls) == 1 if parallel else turn.calls
            assert not turn.is_cut
            for call in turn.calls:
                Arguments.model_validate_json(call.arguments)
                assert call.name == choice or choice == "required"
                talk.answer(call, "Sunny.")
        if choice == "none":
            assert not turn.calls
        talk.say("And then?")
    turns = client.interactions
    assert [t.mismatch_cause for t in turns] == [None] * len(plan)
    assert [t.parent_id for t in turns[1:]] == [t.id for t in turns[:-1]]
    assert all(t.extends_parent for t in turns[1:])
    check_sampled(client, engine)
    assert len(client.export_interactions()) == 1


class Arguments(pydantic.BaseModel):
    """What a call may say."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


async def test_structured_output_is_parsed_by_the_sdk(
    open_client: Open, engine: Any, check_sampled: Check
) -> None:
    client = open_client(seed=1)
    message: Any = {"role": "user", "content": "Where?"}
    completion = await client.chat.completions.parse(
        model="m", messages=[message], response_format=Answer, max_tokens=300
    )
    response = await client.responses.parse(
        model="m", input=[message], text_format=Answer, max_output_tokens=300
    )
    async with client.responses.stream(
        model="m", input=[message], text_format=Answer, max_output_tokens=300
    ) as events:
        streamed = await events.get_final_response()
    answers = [
        completion.choices[0].message.parsed,
        response.output_parsed,
        streamed.output_parsed,
    ]
    assert [type(answer) for answer in answers] == [Answer] * 3
    assert all(i.structural_tag is not None for i in client.interactions)
    check_sampled(client, engine)


async def test_top_logprobs_are_those_of_the_engine(open_client: Open) -> None:
    client = open_client()
    message: Any = {"role": "user", "content": "Where?"}
    completion = await client.chat.completions.create(
        model="m", messages=[message], max_tokens=12, logprobs=True, top_logprobs=4
    )
    logprobs: Any = completion.choices[0].logprobs
    interaction = client.interactions[-1]
    assert [t.logprob for t in logprobs.content] == list(interaction.rollout_logprobs)
    for token in logprobs.content:
        top = [other.logprob for other in token.top_logprobs]
        assert len(top) == 4
        assert top == sorted(top, reverse=True)
        assert token.logprob <= top[0] + 1e-5
        assert sum(map(math.exp, top)) <= 1.0 + 1e-4


async def test_limits_end_a_reply(open_client: Open, talk_class: type[Talk], stream: bool) -> None:
    talk = talk_class(open_client(), stream=stream)
    talk.say("Speak.")
    turn = await talk.ask(3, "required")
    assert (turn.is_cut, turn.num_completion_tokens) == (True, 3)
    assert not turn.calls


async def test_stop_texts_end_a_reply(open_client: Open, stream: bool) -> None:
    async def ask(**options: Any) -> Any:
        client = open_client(seed=5)
        message: Any = {"role": "user", "content": "Speak."}
        completion = await client.chat.completions.create(
            model="m", messages=[message], max_tokens=40, **options
        )
        return client, completion

    _, whole = await ask()
    text = whole.choices[0].message.content
    at = next(n for n in range(5, len(text)) if text[n].isascii() and text[n].isalnum())
    stop = text[at]
    if not stream:
        client, stopped = await ask(stop=[stop])
        reply, finish_reason = stopped.choices[0].message.content, stopped.choices[0].finish_reason
    else:
        client, events = await ask(stop=[stop], stream=True)
        choices = [chunk.choices[0] async for chunk in events if chunk.choices]
        reply = "".join(c.delta.content or "" for c in choices)
        finish_reason = choices[-1].finish_reason
    assert (reply, finish_reason) == (text[: text.index(stop)], "stop")
    [interaction] = client.interactions
    assert len(interaction.completion_ids) < whole.usage.completion_tokens


async def test_a_seed_repeats_a_reply(open_client: Open) -> None:
    message: Any = {"role": "user", "content": "Speak."}
    client = open_client(seed=5)

    async def ask(client: TrackingClient, seed: int) -> tuple[int, ...]:
        await client.chat.completions.create(
            model="m", messages=[message], max_tokens=16, seed=seed
        )
        return client.interactions[-1].completion_ids

    first = await ask(client, 1)
    assert await ask(client, 1) == await ask(open_client(), 1) == first
    assert await ask(client, 2) != first


async def test_every_choice_is_sampled_by_itself(
    open_client: Open, engine: Any, check_sampled: Check, stream: bool
) -> None:
    client = open_client()
    message: Any = {"role": "user", "content": "Speak."}
    options: Any = {"model": "m", "messages": [message], "max_tokens": 8, "n": 3}
    if stream:
        events = await client.chat.completions.create(**options, stream=True)
        ends = [c.choices[0].index async for c in events if c.choices[0].finish_reason]
    else:
        completion = await client.chat.completions.create(**options)
        ends = [choice.index for choice in completion.choices]
    assert sorted(ends) == [0, 1, 2]
    assert len({i.completion_ids for i in client.interactions}) == 3
    check_sampled(client, engine)


async def test_too_long_conversations_are_refused(
    open_client: Open, talk_class: type[Talk], stream: bool
) -> None:
    talk = talk_class(open_client(), stream=stream)
    talk.say("Speak on. " * 1000)
    with pytest.raises(openai.BadRequestError) as caught:
        await talk.ask()
    assert caught.value.code == "context_length_exceeded"
