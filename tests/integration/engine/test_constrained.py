"""Constrained sampling on the embedded engine: the text obeys, and the logprobs say so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from agentrl_cli.engine.grammar import TokenGrammars
from agentrl_cli.engine.protocol import Generation, Sampling, join_pieces
from agentrl_cli.errors import EngineError
from agentrl_cli.tracking.formats.format_choice import find_tool_call_format
from agentrl_cli.tracking.formats.reply_formats import ReplyFormats
from agentrl_cli.tracking.protocols.model_request import ReplyRules
from agentrl_cli.tracking.structured_output import build_structural_tag

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["sum", "product"]},
        "values": {"type": "array", "items": {"$ref": "#/$defs/value"}, "maxItems": 3},
    },
    "required": ["name", "kind", "values"],
    "additionalProperties": False,
    "$defs": {
        "value": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]}
    },
}
ANSWER = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["x"],
            },
        },
    }
    for name in ("double", "halve")
]
HERMES = ReplyFormats(tool_calls=find_tool_call_format("hermes"))


def build_tag(**rules: Any) -> str:
    tag = build_structural_tag(
        ReplyRules(**rules), TOOLS if "response_format" not in rules else (), HERMES
    )
    assert tag is not None
    return tag


@pytest.fixture
def prompt_ids(tiny_tokenizer: Any) -> list[int]:
    return tiny_tokenizer.encode("What is 12 plus 34?")


@pytest.fixture
def compute_masked_truth(tiny_tokenizer: Any) -> Callable[..., torch.Tensor]:
    """Logprobs [tokens, vocabulary] of a completion by one plain forward pass."""

    @torch.no_grad()
    def compute(
        model: PreTrainedModel,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        sampling: Sampling,
    ) -> torch.Tensor:
        logits = model(torch.tensor([[*prompt_ids, *completion_ids]])).logits[0].double()
        logits = logits[len(prompt_ids) - 1 : -1]
        tag = sampling.structural_tag
        grammars = TokenGrammars(tiny_tokenizer, logits.shape[1], [tiny_tokenizer.eos_token_id])
        matcher = grammars.start(tag) if tag is not None else None
        rows = []
        for row, token in zip(logits, completion_ids, strict=True):
            scaled = row / (sampling.temperature or 1.0)
            if matcher is not None:
                words = torch.zeros((1, grammars.num_words), dtype=torch.int32).numpy()
                assert matcher.fill(words, 0)
                bits = [int(words[0, i // 32]) >> (i % 32) & 1 for i in range(len(row))]
                scaled = scaled.masked_fill(~torch.tensor(bits).bool(), -torch.inf)
                assert matcher.accept(token)
            if sampling.top_p < 1:
                probs = scaled.softmax(-1)
                order = probs.argsort(descending=True)
                before = probs[order].cumsum(0) - probs[order]
                scaled[order[before >= sampling.top_p]] = -torch.inf
            rows.append(scaled.log_softmax(-1))
        return torch.stack(rows)

    return compute


def check_answer(text: str) -> None:
    answer = json.loads(text)
    assert list(answer) == ["name", "kind", "values"]
    assert isinstance(answer["name"], str)
    assert len(answer["name"]) <= 6
    assert answer["kind"] in ("sum", "product")
    assert len(answer["values"]) <= 3
    assert all(v is None or (type(v) is int and 0 <= v <= 99) for v in answer["values"])


def read_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    calls = []
    for part in text.removesuffix("<|im_end|>").split("</tool_call>")[:-1]:
        call = json.loads(part.strip().removeprefix("<tool_call>"))
        assert 0 <= call["arguments"]["x"] <= 9
        calls.append((call["name"], call["arguments"]))
    return calls


async def sample(
    engine: Any, prompt_ids: list[int], sampling: Sampling, num: int
) -> list[Generation]:
    return await asyncio.gather(*(engine.generate(prompt_ids, sampling) for _ in range(num)))


@pytest.mark.slow
async def test_a_schema_is_always_obeyed_beside_calls_that_are_free(
    open_engine, tiny_tokenizer, build_tiny_model, prompt_ids, compute_masked_truth, compute_truth
):
    model = build_tiny_model()
    held = Sampling(max_tokens=400, structural_tag=build_tag(response_format=ANSWER))
    free = Sampling(max_tokens=20)
    async with open_engine(max_model_len=512) as engine:
        constrained, others = await asyncio.gather(
            sample(engine, prompt_ids, held, 40), sample(engine, prompt_ids, free, 10)
        )
    ended = [g for g in constrained if g.finish_reason == "stop"]
    assert len(ended) >= 35
    for generation in ended:
        assert generation.completion_ids[-1] == tiny_tokenizer.eos_token_id
        check_answer(tiny_tokenizer.decode(generation.completion_ids[:-1]))
    assert len({g.completion_ids for g in ended}) > 30
    for generation in constrained[:10]:
        ids = list(generation.completion_ids)
        truth = compute_masked_truth(model, prompt_ids, ids, held)
        expected = truth.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
        found = torch.tensor(generation.rollout_logprobs, dtype=torch.float64)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    for generation in others:
        expected = compute_truth(model, prompt_ids, generation, free)
        assert generation.rollout_logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "names", "most"),
    [
        ({}, {"double", "halve"}, 99),
        ({"callable_tools": ("halve",), "parallel_tool_calls": False}, {"halve"}, 1),
    ],
)
async def test_a_required_call_is_made_and_the_named_one_if_one_is_named(
    open_engine, tiny_tokenizer, prompt_ids, rules, names, most
):
    tag = build_tag(tool_choice="required", **rules)
    async with open_engine(max_model_len=512) as engine:
        sampling = Sampling(max_tokens=400, structural_tag=tag)
        generations = await sample(engine, prompt_ids, sampling, 24)
    called: set[str] = set()
    for generation in generations:
        if generation.finish_reason == "length":
            continue
        calls = read_calls(tiny_tokenizer.decode(generation.completion_ids))
        assert 1 <= len(calls) <= most
        called |= {name for name, _ in calls}
    assert called == names


@pytest.mark.slow
@pytest.mark.parametrize("structural_tag", [None, build_tag(response_format=ANSWER)])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8), (0.0, 1.0)])
async def test_top_logprobs_are_those_of_the_distribution_sampled_from(
    open_engine,
    build_tiny_model,
    prompt_ids,
    compute_masked_truth,
    structural_tag,
    temperature,
    top_p,
):
    sampling = Sampling(
        max_tokens=30,
        temperature=temperature,
        top_p=top_p,
        seed=3,
        structural_tag=structural_tag,
        num_top_logprobs=5,
    )
    async with open_engine() as engine:
        generation = await engine.generate(prompt_ids, sampling)
    assert len(generation.top_logprobs) == len(generation.completion_ids)
    truth = compute_masked_truth(
        build_tiny_model(), prompt_ids, generation.completion_ids, sampling
    )
    for place, tops in enumerate(generation.top_logprobs):
        logprobs = [logprob for _, logprob in tops]
        assert logprobs == sorted(logprobs, reverse=True)
        for token, logprob in tops:
            assert logprob == pytest.approx(float(truth[place, token]), abs=1e-4)
        assert tops[0][0] == int(truth[place].argmax())
        assert len(tops) == min(5, int((truth[place] > -torch.inf).sum()))


@pytest.mark.slow
async def test_a_stream_a_pause_and_new_weights_leave_the_grammar_where_it_was(
    open_engine, tiny_tokenizer, build_tiny_model, prompt_ids
):
    sampling = Sampling(max_tokens=400, seed=1, structural_tag=build_tag(response_format=ANSWER))
    async with open_engine(max_model_len=512) as engine:
        pieces = []
        async for piece in engine.stream(prompt_ids, sampling):
            pieces.append(piece)
            if len(pieces) == 6:
                await engine.pause()
                await engine.publish_weights(1, build_tiny_model(5).state_dict())
                await engine.resume()
        whole = join_pieces(pieces)
        stopped = await engine.generate(prompt_ids, replace(sampling, stop=('"kind"',)))
    assert set(whole.versions) == {0, 1}
    assert whole.finish_reason == "stop"
    check_answer(tiny_tokenizer.decode(whole.completion_ids[:-1]))
    assert stopped.stop_text == '"kind"'


@pytest.mark.slow
async def test_a_tag_that_is_none_is_refused_and_the_engine_lives_on(open_engine, prompt_ids):
    async with open_engine() as engine:
        for tag in ("{", '{"type": "structural_tag", "format": {"type": "nonsense"}}'):
            with pytest.raises(EngineError, match="structural_tag"):
                await engine.generate(prompt_ids, Sampling(structural_tag=tag))
        assert (await engine.generate(prompt_ids, Sampling(max_tokens=3))).completion_ids
        with pytest.raises(EngineError, match="num_top_logprobs 21"):
            await engine.generate(prompt_ids, Sampling(num_top_logprobs=21))
