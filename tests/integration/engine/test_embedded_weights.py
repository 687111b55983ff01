"""Publishing weights into the embedded engine, also under its calls."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import EngineError, EngineTimeoutError

pytestmark = pytest.mark.slow

IDS = list(range(20, 60))
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("tied", [True, False])
async def test_calls_in_flight_go_on_with_the_new_weights(
    open_engine, build_tiny_model, compute_truth, tied
):
    old, new = build_tiny_model(tied=tied), build_tiny_model(seed=9, tied=tied)
    sampling = Sampling(max_tokens=400, temperature=1.0)
    async with open_engine(
        build_tiny_model(tied=tied), max_model_len=512, max_num_seqs=4
    ) as engine:
        # Six for four places: some run, some wait, and all share the start of their prompts.
        tasks = [
            asyncio.create_task(engine.generate([*IDS, i], sampling, session_id=str(i)))
            for i in range(6)
        ]
        stream = engine.stream([*IDS, 7], Sampling(max_tokens=400))
        processor = engine._manager.batch_processor
        while not processor.has_pending_requests():
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.03)
        await engine.publish_weights(1, new.state_dict())
        done = await asyncio.gather(*tasks)
        streamed = [piece async for piece in stream]
    assert any(set(generation.versions) == {0, 1} for generation in done)
    for i, generation in enumerate(done):
        assert list(generation.versions) == sorted(generation.versions)
        by_old = compute_truth(old, [*IDS, i], generation, sampling).tolist()
        by_new = compute_truth(new, [*IDS, i], generation, sampling).tolist()
        # Caches are computed anew: each token follows the weights of its version exactly.
        expected = [
            (by_old, by_new)[version][place] for place, version in enumerate(generation.versions)
        ]
        assert generation.rollout_logprobs == pytest.approx(expected, abs=1e-4)
    assert {version for piece in streamed for version in piece.versions} == {1}


async def test_publishing_copies_and_does_not_keep(open_engine, build_tiny_model):
    async with open_engine() as engine:
        greedy = Sampling(max_tokens=10, temperature=0.0)
        published = build_tiny_model(seed=5)
        await engine.publish_weights(3, published.state_dict())
        before = await engine.generate(IDS, greedy)
        with torch.no_grad():
            for tensor in published.parameters():
                tensor.zero_()
        assert await engine.generate(IDS, greedy) == before
    assert before.versions == (3,) * 10


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ({"model.projj.weight": torch.zeros(2)}, r"projj\.weight: unknown"),
        ({NAME: None}, r"model\.layers\.1\.mlp\.up_proj\.weight: missing"),
        ({NAME: torch.zeros(5, 64)}, r"shape \(5, 64\), the model has \(128, 64\)"),
    ],
)
async def test_weights_that_do_not_fit_change_nothing(
    open_engine, build_tiny_model, spoilt, message
):
    greedy = Sampling(max_tokens=10, temperature=0.0)
    async with open_engine() as engine:
        before = await engine.generate(IDS, greedy)
        weights = {**dict(build_tiny_model(seed=4).named_parameters()), **spoilt}
        weights = {name: tensor for name, tensor in weights.items() if tensor is not None}
        with pytest.raises(EngineError, match=message):
            await engine.publish_weights(1, weights)
        after = await engine.generate(IDS, greedy)
        assert await engine.policy_version() == 0
    assert after == before


async def test_the_tied_head_may_be_given_alone_or_twice(open_engine, build_tiny_model):
    """Also in another number type."""
    published = build_tiny_model(seed=6).bfloat16()
    async with open_engine(build_tiny_model(seed=6).bfloat16().float()) as engine:
        expected = await engine.generate(IDS, Sampling(max_tokens=10, temperature=0.0))
    both = {k: v.clone() for k, v in published.state_dict().items()}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(both)
    head = {k: v for k, v in both.items() if k != "model.embed_tokens.weight"}
    for weights in (both, head):
        async with open_engine() as engine:
            await engine.publish_weights(1, weights)
            got = await engine.generate(IDS, Sampling(max_tokens=10, temperature=0.0))
        assert got.completion_ids == expected.completion_ids


async def test_a_publication_past_its_deadline(open_engine, build_tiny_model, monkeypatch):
    monkeypatch.setattr(
        "agentrl_cli.engine.embedded.embedded_engine.copy_weights", lambda *_: time.sleep(0.5)
    )
    async with open_engine(publish_timeout_seconds=0.1) as engine:
        with pytest.raises(EngineTimeoutError, match=r"publishing weights .* 0\.1 s"):
            await engine.publish_weights(1, dict(build_tiny_model().named_parameters()))


async def test_weights_that_are_not_numbers_fail_calls_and_not_the_engine(
    open_engine, build_tiny_model
):
    good = dict(build_tiny_model().named_parameters())
    bad = {name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()}
    async with open_engine() as engine:
        await engine.publish_weights(1, bad)
        for temperature in (1.0, 0.0):
            with pytest.raises(EngineError, match=r"not a number \(policy version 1\)"):
                await engine.generate(IDS, Sampling(temperature=temperature))
        await engine.publish_weights(2, good)
        assert (await engine.generate(IDS, Sampling(max_tokens=3))).versions == (2, 2, 2)


async def test_a_pause_holds_calls_and_lets_weights_in(open_engine, build_tiny_model):
    async with open_engine() as engine:
        stream = engine.stream(IDS, Sampling(max_tokens=60, temperature=0.0))
        await anext(stream)
        await engine.pause()
        held = asyncio.create_task(engine.generate(IDS, Sampling(max_tokens=2)))
        seen, piece = 1, asyncio.ensure_future(anext(stream))
        # What was sampled before the pause is still on its way.
        while (await asyncio.wait([piece], timeout=0.3))[0]:
            seen, piece = seen + 1, asyncio.ensure_future(anext(stream))
        assert seen < 60
        assert not held.done()
        await engine.publish_weights(1, dict(build_tiny_model(seed=2).named_parameters()))
        await engine.pause()
        await asyncio.sleep(0.1)
        assert not held.done()
        assert not piece.done()
        await engine.resume()
        rest = [await piece, *[piece async for piece in stream]]
        assert {version for piece in rest for version in piece.versions} == {1}
        num_tokens = seen + sum(len(piece.completion_ids) for piece in rest)
        # Wherever the pause came, the new weights may end the completion.
        assert num_tokens == 60 or rest[-1].finish_reason == "stop"
        assert (await held).versions == (1, 1)
