"""Constrained sampling and likeliest tokens on a real vLLM, whose masks the trainer makes again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from agentrl_cli.engine.protocol import Generation, Sampling
from agentrl_cli.errors import EngineError
from agentrl_cli.launch.servers.server_group import ServerGroup
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.tracking.formats.format_choice import find_tool_call_format
from agentrl_cli.tracking.formats.reply_formats import ReplyFormats
from agentrl_cli.tracking.protocols.model_request import ReplyRules
from agentrl_cli.tracking.structured_output import build_structural_tag
from agentrl_cli.train.learner import Learner

#: float32 on both sides.
TOLERANCE = 1e-4
PROMPT = (10, 20, 30, 40, 50)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["sum", "product"]},
        "values": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["name", "kind", "values"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "double", "parameters": SCHEMA}}
FORMATS = ReplyFormats(tool_calls=find_tool_call_format("hermes"))


def build_tag(**rules: Any) -> str:
    tag = build_structural_tag(ReplyRules(**rules), [TOOL], FORMATS)
    assert tag is not None
    return tag


ANSWER = build_tag(
    response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    callable_tools=(),
)
CALL = build_tag(tool_choice="required", parallel_tool_calls=False)


@pytest.fixture
async def server(
    untied_server_group: ServerGroup, open_server: Callable[..., Any]
) -> AsyncIterator[Any]:
    """A client of weights that are version 1 meanwhile."""
    (endpoint,) = untied_server_group.endpoints
    client = open_server(endpoint)
    await client.set_policy_version(1)
    yield client
    await client.forget_version()


def build_trajectory(index: int, generation: Generation, sampling: Sampling) -> Trajectory:
    return Trajectory(
        id=f"g/{index}",
        group_id="g",
        task_id="0",
        sample_index=index,
        reward=float(index % 2),
        interactions=(
            Interaction(
                id=str(index),
                prompt_ids=PROMPT,
                completion_ids=generation.completion_ids,
                rollout_logprobs=generation.rollout_logprobs,
                versions=generation.versions,
                structural_tag=sampling.structural_tag,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                turn_return=float(index % 2),
            ),
        ),
    )


async def test_what_is_sampled_obeys_and_the_trainer_agrees(
    server: Any,
    build_tiny_model: Callable[..., Any],
    chat_tokenizer: Any,
    make_vllm_config: Callable[..., Any],
    untied_folder: Path,
) -> None:
    plain = Sampling(max_tokens=400)
    samplings = [
        replace(plain, structural_tag=ANSWER),
        replace(plain, structural_tag=CALL),
        replace(plain, structural_tag=ANSWER, temperature=0.7, top_p=0.8),
        replace(plain, max_tokens=20),
    ] * 6
    generations = await asyncio.gather(*(server.generate(PROMPT, one) for one in samplings))
    num_ended = 0
    for sampling, generation in zip(samplings, generations, strict=True):
        if sampling.structural_tag is None or generation.finish_reason == "length":
            continue
        num_ended += 1
        assert generation.completion_ids[-1] == chat_tokenizer.eos_token_id
        text = chat_tokenizer.decode(generation.completion_ids[:-1])
        if sampling.structural_tag == CALL:
            assert text.startswith("<tool_call>\n")
            assert text.endswith("\n</tool_call>")
            call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            assert call["name"] == "double"
            value = call["arguments"]
        else:
            value = json.loads(text)
        jsonschema.validate(value, SCHEMA)
    assert num_ended >= 12
    config = make_vllm_config(untied_folder, workflow_path="none.none", agent_builder_path=None)
    learner = Learner(build_tiny_model(), config, tokenizer=chat_tokenizer)
    batch = [
        build_trajectory(index, generation, sampling)
        for index, (sampling, generation) in enumerate(zip(samplings, generations, strict=True))
    ]
    metrics = learner.update(batch, 1)
    assert metrics["logprob_gap_max"] < TOLERANCE
    assert metrics["grad_norm"] > 0


# The whitespace allowed after the brace is at most 33 tokens, so that 60 reach a forced one.
@pytest.mark.parametrize(("structural_tag", "max_tokens"), [(None, 12), (ANSWER, 60)])
async def test_the_likeliest_tokens_are_those_of_a_plain_forward_pass(
    server: Any,
    build_tiny_model: Callable[..., Any],
    structural_tag: str | None,
    max_tokens: int,
) -> None:
    sampling = Sampling(
        max_tokens=max_tokens, structural_tag=structural_tag, num_top_logprobs=20, temperature=0.8
    )
    generation = await server.generate(PROMPT, sampling)
    ids = generation.completion_ids
    with torch.inference_mode():
        logits = build_tiny_model()(torch.tensor([[*PROMPT, *ids]])).logits[0].double()
    truth = (logits[len(PROMPT) - 1 : -1] / 0.8).log_softmax(-1)
    assert len(generation.top_logprobs) == len(ids)
    for place, tops in enumerate(generation.top_logprobs):
        if structural_tag is None:
            assert [token for token, _ in tops] == truth[place].topk(20).indices.tolist()
            expected = truth[place]
        else:
            # Renormalized over those allowed, of which the sampled one tells by how much.
            expected = truth[place] + generation.rollout_logprobs[place] - truth[place, ids[place]]
        for token, logprob in tops:
            assert logprob == pytest.approx(float(expected[token]), abs=TOLERANCE)
    if structural_tag is not None:
        # A forced token has no other beside it.
        assert min(len(tops) for tops in generation.top_logprobs) == 1


async def test_a_tag_that_is_none_is_refused(server: Any) -> None:
    tag = '{"type": "structural_tag", "format": {"type": "nonsense"}}'
    with pytest.raises(EngineError, match="tructural"):
        await server.generate(PROMPT, Sampling(max_tokens=5, structural_tag=tag))
    generation = await server.generate(PROMPT, Sampling(max_tokens=5))
    assert generation.completion_ids
