"""Chat completions on exact replies, the official SDK as the judge."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.tracking.client import TrackingClient

Open = Callable[..., TrackingClient]
USER: Any = {"role": "user", "content": "What?"}
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def make_tool(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}


TOOLS = [make_tool("f"), make_tool("g")]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


async def create(client: openai.AsyncOpenAI, **options: Any) -> Any:
    options = {"model": "m", "messages": [USER], **options}
    return await client.chat.completions.create(**options)


def list_samplings(client: TrackingClient) -> Any:
    return client.gateway.engine.samplings  # type: ignore[attr-defined]


async def test_logprobs_have_bytes_and_the_likeliest_tokens(open_client: Open) -> None:
    client = open_client("Ünï", "Ünï", "a")
    options: Any = {"logprobs": True, "top_logprobs": 3}
    completion = await create(client, **options)
    content = completion.choices[0].logprobs.content
    # The end of the turn was sampled, too.
    assert content[-1].token == "<|im_end|>"
    assert bytes(b for t in content[:-1] for b in t.bytes).decode() == "Ünï"
    for token in content:
        assert token.top_logprobs[0].token == token.token
        assert [t.logprob for t in token.top_logprobs] == [token.logprob - n for n in range(3)]
    chunks = [chunk async for chunk in await create(client, stream=True, **options)]
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert streamed == content
    assert (await create(client)).choices[0].logprobs is None
    assert [sampling.num_top_logprobs for sampling in list_samplings(client)] == [3, 3, 0]


async def test_usage_comes_last_and_is_null_before(open_client: Open) -> None:
    client = open_client("ab")
    options: Any = {"stream_options": {"include_usage": True, "include_obfuscation": False}}
    chunks = [chunk.to_dict() async for chunk in await create(client, stream=True, **options)]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    without = [chunk.to_dict() async for chunk in await create(open_client("ab"), stream=True)]
    assert all("usage" not in chunk for chunk in without)


async def test_thoughts_are_reasoning_content(open_client: Open, thinking_tokenizer: Any) -> None:
    text = "<think>\nI see\n</think>\n\nYes"
    client = open_client(text, text, tokenizer=thinking_tokenizer)
    completion = await create(client)
    message = completion.choices[0].message
    assert (message.reasoning_content, message.content) == ("I see", "Yes")
    assert 0 < completion.usage.completion_tokens_details.reasoning_tokens < 30
    deltas = [c.choices[0].delta.to_dict() async for c in await create(client, stream=True)]
    assert sum("reasoning_content" in delta for delta in deltas) > 1
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I see"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes"


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_choice_none_keeps_the_tools_in_the_prompt(
    open_client: Open, stream: bool
) -> None:
    client = open_client(CALL, CALL)
    first = (await create(client, tools=TOOLS)).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "4"}
    messages = [USER, first.model_dump(exclude_none=True), result]
    options: Any = {"messages": messages, "tools": TOOLS, "tool_choice": "none"}
    if stream:
        chunks = [chunk async for chunk in await create(client, stream=True, **options)]
        assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)
    else:
        message = (await create(client, **options)).choices[0].message
        assert (message.content, message.tool_calls) == (CALL, None)
    one, two = client.interactions
    assert (two.parent_id, two.extends_parent, two.mismatch_cause) == (one.id, True, None)
    assert (two.tools, two.structural_tag) == (one.tools, None)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"f", "g"}),
        ({"type": "function", "function": {"name": "g"}}, {"g"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            },
            {"f"},
        ),
    ],
)
async def test_a_required_call_is_asked_of_the_engine(
    open_client: Open, choice: Any, names: set[str]
) -> None:
    client = open_client(CALL)
    completion = await create(client, tools=TOOLS, tool_choice=choice)
    assert completion.choices[0].finish_reason == "tool_calls"
    [sampling] = list_samplings(client)
    assert client.interactions[0].structural_tag == sampling.structural_tag
    tag = json.loads(sampling.structural_tag)
    assert tag["type"] == "structural_tag"
    assert {name for name in ("f", "g") if f'"name": "{name}"' in str(tag)} == names


@pytest.mark.parametrize(
    ("parser", "call"),
    [
        ("hermes", CALL),
        ("glm45", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">1</parameter>\n</invoke>',
        ),
    ],
)
async def test_one_call_a_turn_is_read_with_its_end(
    open_client: Open, parser: str, call: str
) -> None:
    client = open_client(call, call, reading={"tool_call_parser": parser})
    completion = await create(client, tools=TOOLS, parallel_tool_calls=False)
    [found] = completion.choices[0].message.tool_calls
    assert (found.function.name, found.function.arguments) == ("f", '{"x": 1}')
    await create(client, parallel_tool_calls=False)
    with_tools, without = list_samplings(client)
    assert call.endswith(with_tools.stop[0])
    assert without.stop == ()


@pytest.mark.parametrize("parser", ["mistral", "llama3_json", "pythonic"])
async def test_one_call_a_turn_where_no_text_ends_a_call(open_client: Open, parser: str) -> None:
    client = open_client("never called", reading={"tool_call_parser": parser})
    if parser == "pythonic":
        with pytest.raises(openai.BadRequestError, match="and parallel_tool_calls=False"):
            await create(client, tools=TOOLS, parallel_tool_calls=False)
        return
    await create(client, tools=TOOLS, parallel_tool_calls=False)
    assert '"stop_after_first": true' in list_samplings(client)[0].structural_tag


async def test_several_choices_stream_side_by_side(open_client: Open) -> None:
    client = open_client("one", "two words", CALL)
    texts = {0: "", 1: "", 2: ""}
    reasons: dict[int, Any] = {}
    async for chunk in await create(client, stream=True, n=3, tools=TOOLS):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {0: "one", 1: "two words", 2: ""}
    assert reasons == {0: "stop", 1: "stop", 2: "tool_calls"}
    assert [i.finish_reason for i in client.interactions] == ["stop", "stop", "tool_calls"]


@pytest.mark.parametrize("n", [1, 2])
async def test_token_ids_come_as_vllm_gives_them(open_client: Open, n: int) -> None:
    client = open_client(*[CALL, "one"][:n] * 2, "x")
    options: Any = {"n": n, "tools": TOOLS, "extra_body": {"return_token_ids": True}}
    whole = (await create(client, **options)).model_dump()
    chunks = [chunk.model_dump() async for chunk in await create(client, stream=True, **options)]
    streamed: dict[int, list[int]] = {index: [] for index in range(n)}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        streamed[choice["index"]] += choice.get("token_ids") or []
    sampled = [list(i.completion_ids) for i in client.interactions[:n]]
    assert [choice["token_ids"] for choice in whole["choices"]] == sampled
    assert list(streamed.values()) == [list(i.completion_ids) for i in client.interactions[n:]]
    prompt_ids = list(client.interactions[0].prompt_ids)
    assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == prompt_ids
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert "prompt_token_ids" not in (await create(client)).model_dump()


async def test_a_seed_repeats_a_reply_and_not_its_choices(open_client: Open) -> None:
    client = open_client(*"abcdef", sampling=Sampling(seed=7))
    for seed in (7, 7, 8):
        await create(client, seed=seed, n=2)
    one, two, *again, other, another = [sampling.seed for sampling in list_samplings(client)]
    assert again == [one, two]
    assert len({one, two, other, another}) == 4


async def test_developer_role_and_neutral_keys_are_taken(open_client: Open) -> None:
    client = open_client("a")
    developer = {"role": "developer", "content": [{"type": "text", "text": "Be"}, {
        "type": "text", "text": "brief."}]}  # fmt: skip
    await create(
        client,
        messages=[developer, USER],
        metadata={"a": "b"},
        store=True,
        user="u",
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        verbosity="low",
        extra_body={"top_k": -1, "min_p": 0, "repetition_penalty": 1.0},
    )
    tokenizer = client.gateway.template.tokenizer
    prompt = tokenizer.decode(client.interactions[0].prompt_ids)
    assert prompt.startswith("<|im_start|>system\nBe\nbrief.<|im_end|>")
