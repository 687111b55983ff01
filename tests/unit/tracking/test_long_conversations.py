"""A call costs what it adds: what came before is neither sent through the SDK's checks, nor
validated, rendered or held a second time, and the prompt is the one of the whole conversation."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai._utils import _transform

from agentrl_cli.records import MismatchCause, SharedSequence
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.tail_rendering import TemplateForms
from agentrl_cli.tracking.template import ChatTemplate, TemplateInputs

from .conftest import PLAIN, THINKING_STRIPPED
from .test_templates import CALL, KEEPS, STRIPS, TOOL, USER

Open = Callable[..., TrackingClient]
_LOOP = (
    "{% for m in messages %}BODY"
    "{{ m.tool_calls[0].function | tojson if m.tool_calls }};{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
#: What only the whole conversation tells: the second loop must not begin late, or not unnoticed.
NUMBERED = _LOOP.replace("BODY", "{{ loop.index }}{{ m.role }}:{{ m.content }}")
COUNTED_BACK = _LOOP.replace("BODY", "{{ loop.revindex }}{{ m.content }}")
TOTAL = "{% set n = messages|length %}" + _LOOP.replace("BODY", "{{ n }}{{ m.content }}")
CARRIED = "{% set ns = namespace(n=0) %}" + _LOOP.replace(
    "BODY", "{% set ns.n = ns.n + m.content|length %}{{ ns.n }}{{ m.content }}"
)
BY_MACRO = "{% macro w(m) %}{{ messages|length }}{{ m.content }}{% endmacro %}" + _LOOP.replace(
    "BODY", "{{ w(m) }}"
)
NEXT = _LOOP.replace(
    "BODY", "{{ m.content }}{% if not loop.last %}{{ loop.nextitem.role }}{% endif %}"
)
PARTS = _LOOP.replace("BODY", "{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %}")
TEMPLATES = {
    "plain": PLAIN, "stripped": THINKING_STRIPPED, "qwen3": STRIPS, "keeps": KEEPS,
    "numbered": NUMBERED, "counted back": COUNTED_BACK, "total": TOTAL, "carried": CARRIED,
    "by macro": BY_MACRO, "next": NEXT, "parts": PARTS,
}  # fmt: skip


@pytest.fixture
def make_tokenizer(make_tokenizer: Callable[[str], Any]) -> Callable[[str], Any]:
    """The templates here are about turns; all of them show tools in the same way."""
    return lambda template: make_tokenizer("{{ tools | tojson if tools }}" + template)


async def talk(client: TrackingClient, num_turns: int, *, user_every: int = 10**6) -> None:
    """An agent that calls a tool in every turn; the user speaks again every so often."""
    messages: list[Any] = [USER]
    for turn in range(num_turns):
        completion = await client.chat.completions.create(
            model="m",
            messages=messages,
            tools=[TOOL],  # type: ignore[list-item]
        )
        reply = completion.choices[0].message.model_dump(exclude_none=True)
        messages.append(reply)
        for call in reply.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"r{turn}"})
        if turn % user_every == user_every - 1 or not reply.get("tool_calls"):
            messages.append({"role": "user", "content": f"And {turn}?"})


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("keep_reasoning", [False, True])
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_the_prompt_is_the_one_of_the_whole_conversation(
    open_client: Open,
    make_tokenizer: Callable[[str], Any],
    name: str,
    keep_reasoning: bool,
    data: st.DataObject,
) -> None:
    replies = [
        "It is.",
        "<think>\nhm\n</think>\n\nIt is.",
        CALL,
        "<think>\nhm\n</think>\n\n" + CALL,
    ]
    script = data.draw(st.lists(st.sampled_from(replies), min_size=3, max_size=6))
    user_every = data.draw(st.sampled_from([2, 10**6]))
    reading = {"reasoning_parser": "qwen3", "keep_reasoning": keep_reasoning}
    tokenizer = make_tokenizer(TEMPLATES[name])
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for renders_whole in (False, True):
            if renders_whole:
                patch.setattr(ChatTemplate, "render_tail", lambda *_: None)
            client = open_client(*script, tokenizer=tokenizer, reading=reading)
            await talk(client, len(script), user_every=user_every)
            found.append(
                [
                    (tuple(i.prompt_ids), i.extends_parent, i.mismatch_cause)
                    for i in client.interactions
                ]
            )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "is_local"),
    [(n, n not in ("counted back", "total", "carried", "by macro")) for n in TEMPLATES],
)
def test_only_a_template_that_permits_it_is_rendered_at_the_end_alone(
    make_tokenizer: Callable[[str], Any], name: str, is_local: bool
) -> None:
    template = ChatTemplate(make_tokenizer(TEMPLATES[name]))
    turns = [{"role": r, "content": f"{r} {n}"} for n in range(5) for r in ("assistant", "tool")]
    messages = [USER, *turns]
    forms, inputs = TemplateForms(), TemplateInputs()
    now = template.render_tail(messages, 3, inputs, forms)
    past = template.render_tail(messages[:-2], 1, inputs, forms)
    assert (now is not None and past is not None and now.state == past.state) == is_local
    if is_local and now is not None:
        assert template.render(messages, inputs).endswith("".join(now.texts))


async def test_known_messages_are_not_worked_on_again(
    open_client: Open, make_tokenizer: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"validated": 0, "rendered": 0, "fingerprinted": 0, "transformed": 0}

    def count(owner: Any, name: str, key: str, measure: Callable[..., int] = lambda *_: 1) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            counts[key] += measure(*args)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    from agentrl_cli.tracking import message_meaning, tree
    from agentrl_cli.tracking.protocols import chat

    count(chat, "validate", "validated", lambda _, body: len(body["messages"]))
    count(ChatTemplate, "render", "rendered", lambda *args: len(args[1]))
    for module in (message_meaning, tree):
        count(module, "fingerprint", "fingerprinted")
    count(_transform, "_async_transform_typeddict", "transformed")
    thinks = "<think>\nhm\n</think>\n\n" + CALL
    reading = {"reasoning_parser": "qwen3"}
    client = open_client(*[thinks] * 30, tokenizer=make_tokenizer(KEEPS), reading=reading)
    await talk(client, 30)
    assert all(i.extends_parent for i in client.interactions[1:])
    for key, allowed in [
        ("validated", 3),
        ("rendered", 2),
        ("fingerprinted", 5),
        ("transformed", 6),
    ]:
        assert counts[key] <= 30 * allowed, counts


async def test_what_is_known_of_messages_holds_for_inputs_that_read_them_alike(
    open_client: Open, make_tokenizer: Callable[[str], Any]
) -> None:
    """Here the template reads a key where there are tools, and refuses some requests."""
    template = (
        "{{ raise_exception('bad') if messages[-1].content == 'bad' }}"
        "{% if tools %}{% for m in messages %}{{ m.mood }}{% endfor %}{% endif %}"
    )
    client = open_client(*"abcd", tokenizer=make_tokenizer(template + KEEPS))
    create: Any = client.chat.completions.create
    first = await create(model="m", messages=[USER])
    reply = first.choices[0].message.model_dump(exclude_none=True) | {"mood": "good"}
    with pytest.raises(openai.BadRequestError, match="bad"):
        await create(model="m", messages=[USER, reply, {"role": "user", "content": "bad"}])
    for options in ({}, {"tools": [TOOL]}, {}):
        await create(model="m", messages=[USER, reply, USER], **options)
    one, two, three, four = client.interactions
    edited = MismatchCause.HISTORY_EDITED
    found = [(i.parent_id, i.mismatch_cause) for i in (two, three, four)]
    assert found == [(one.id, None), (None, edited), (one.id, None)]


async def test_messages_that_are_objects_are_sent_as_the_sdk_sends_them(open_client: Open) -> None:
    client = open_client("one", CALL, "three")
    create: Any = client.chat.completions.create
    first = await create(model="m", messages=[USER], tools=[TOOL])
    messages: list[Any] = [USER, first.choices[0].message, USER]
    more = {"temperature": 0.5}
    second = await create(model="m", messages=iter(messages), tools=[TOOL], extra_body=more)
    messages.append(second.choices[0].message)
    await create(model="m", messages=messages, tools=[TOOL], temperature=0.5)
    _, two, three = client.interactions
    assert (two.extends_parent, two.temperature, three.temperature) == (True, 0.5, 0.5)
    assert (three.extends_parent, three.parent_id) == (True, two.id)
    assert three.messages[1] == {"role": "assistant", "content": "one"} | three.messages[1]


@pytest.mark.slow
async def test_a_session_holds_at_most_three_times_its_tokens_and_text(
    open_client: Open, make_tokenizer: Callable[[str], Any]
) -> None:
    text = (
        "<think>\nIt is known.\n</think>\n\n"
        + " ".join(f"The answer is forty two and {n}." for n in range(20))
        + CALL
    )
    reading = {"reasoning_parser": "qwen3"}
    client = open_client(
        *[text] * 202, tokenizer=make_tokenizer(KEEPS), reading=reading, max_model_len=10**6
    )
    engine: Any = client.gateway.engine  # type: ignore[attr-defined]
    await talk(TrackingClient(gateway=client.gateway), 2)
    engine.prompts.clear()

    def forget(*_: Any) -> None:
        """Nothing: what the scripted engine notes is no part of the session."""

    engine.prompts = type("Nothing", (list,), {"append": forget})()
    gc.collect()
    tracemalloc.start()
    try:
        await talk(client, 200)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    last = client.interactions[-1]
    num_sampled = sum(i.num_completion_tokens for i in client.interactions)
    messages = json.dumps([*last.messages, last.reply]).encode()
    assert held <= 3 * (len(messages) + 4 * len(last.prompt_ids) + 20 * num_sampled)


@pytest.mark.parametrize("parts", [[[1, 2, 3]], [[1], [], [2, 3], [4]], [[]]])
def test_a_shared_sequence_is_a_tuple_to_its_readers(parts: list[list[int]]) -> None:
    whole = tuple(n for part in parts for n in part)
    shared: SharedSequence[int] = SharedSequence()
    for part in parts:
        shared = SharedSequence(part, shared)
    assert (shared, whole, hash(shared)) == (whole, shared, hash(whole))
    assert (shared + (9,), (9,) + shared) == ((*whole, 9), (9, *whole))  # noqa: RUF005
    for start in range(-5, 6):
        for step in (1, 2, -1):
            assert shared[start::step] == whole[start::step]
            assert shared[:start:step] == whole[:start:step]
    assert [shared[n] for n in range(-len(whole), len(whole))] == [*whole, *whole]
    with pytest.raises(IndexError):
        shared[len(whole)]


def test_a_shared_sequence_may_begin_with_a_part_of_its_parent() -> None:
    first: SharedSequence[int] = SharedSequence((1, 2, 3))
    second = SharedSequence((4, 5), first)
    for num_shared in range(6):
        part = SharedSequence((8, 9), second, num_shared)
        whole = (*tuple(second)[:num_shared], 8, 9)
        assert (tuple(part), len(part), part[1:]) == (whole, len(whole), whole[1:])
        assert [part[n] for n in range(len(whole))] == [*whole]
        for one, other in ((part, second), (second, part)):
            assert one.count_shared(other) == num_shared
        assert SharedSequence((7,), part).count_shared(SharedSequence((), part, 1)) == 1
    # Equal, and held twice.
    assert first.count_shared(SharedSequence([1, 2, 3])) == 0
    assert SharedSequence((6,), second).count_shared(SharedSequence((6,), first, 2)) == 2
