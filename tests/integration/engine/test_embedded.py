"""The embedded engine: what it samples, and how calls end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl_cli.engine.embedded.embedded_engine import EmbeddedEngine
from agentrl_cli.engine.embedded.token_sampling import StopTextFinder
from agentrl_cli.engine.probes import PROBE_SAMPLING
from agentrl_cli.engine.protocol import Generation, InferenceEngine, Sampling, join_pieces
from agentrl_cli.errors import ContextLengthError, EngineError, EngineTimeoutError

PROMPT = "You are a helpful assistant that can use tools. What is 12 plus 34?"


@pytest.fixture
def prompt_ids(tiny_tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tiny_tokenizer.encode(PROMPT)


async def _collect(engine: EmbeddedEngine, ids: list[int], sampling: Sampling) -> list[Generation]:
    return [piece async for piece in engine.stream(ids, sampling)]


def _random_sampling(chance: random.Random) -> Sampling:
    return Sampling(
        max_tokens=chance.randint(1, 24),
        temperature=chance.choice([0.5, 0.9, 1.0, 1.7]),
        top_p=chance.choice([1.0, 1.0, 0.95, 0.6, 0.1]),
        stop=chance.choice([(), (), ("e",), ("zz", "th")]),
        seed=chance.choice([None, chance.randint(0, 99)]),
    )


async def _check_against_truth(
    engine: EmbeddedEngine,
    truth: PreTrainedModel,
    compute_truth: Callable[..., torch.Tensor],
    vocabulary_size: int,
    num_completions: int,
    seed: int,
) -> int:
    """Samples a mixed batch and compares every logprob; the number of tokens compared."""
    chance = random.Random(seed)
    shared = [chance.randrange(vocabulary_size) for _ in range(40)]
    asked = []
    for _ in range(num_completions):
        own = [chance.randrange(vocabulary_size) for _ in range(chance.randint(1, 30))]
        asked.append((shared + own if chance.random() < 0.5 else own, _random_sampling(chance)))
    done = await asyncio.gather(*(engine.generate(ids, sampling) for ids, sampling in asked))
    num_tokens = 0
    for (ids, sampling), generation in zip(asked, done, strict=True):
        torch.testing.assert_close(
            torch.tensor(generation.rollout_logprobs, dtype=torch.float64),
            compute_truth(truth, ids, generation, sampling),
            atol=1e-4,
            rtol=0,
        )
        num_tokens += len(generation.completion_ids)
    return num_tokens


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_logprobs_equal_a_plain_forward_pass_also_after_publications(
    open_engine, build_tiny_model, compute_truth, tied
):
    size = build_tiny_model(tied=tied).config.vocab_size
    async with open_engine(build_tiny_model(tied=tied)) as engine:
        first = await _check_against_truth(
            engine, build_tiny_model(tied=tied), compute_truth, size, 200, seed=1
        )
        assert first > 1000
        for version in (1, 2, 3):
            published = build_tiny_model(seed=version, tied=tied)
            await engine.publish_weights(version, dict(published.named_parameters()))
            # The same prompts as before: caches of the old weights would be met again.
            num_tokens = await _check_against_truth(
                engine, published, compute_truth, size, 200 if version == 3 else 40, seed=1
            )
            assert num_tokens > 100
            assert await engine.policy_version() == version
        assert isinstance(engine, InferenceEngine)


async def test_greedy_follows_the_plain_model(open_engine, build_tiny_model, prompt_ids):
    model = build_tiny_model()
    ids = list(prompt_ids)
    with torch.no_grad():
        for _ in range(20):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    async with open_engine() as engine:
        greedy = await engine.generate(prompt_ids, Sampling(max_tokens=20, temperature=0.0))
    assert list(greedy.completion_ids) == ids[len(prompt_ids) :]
    assert greedy.rollout_logprobs == (0.0,) * 20


async def test_a_seed_gives_the_same_tokens_whatever_else_runs(open_engine, prompt_ids):
    seeded = Sampling(max_tokens=30, seed=7, temperature=1.3, top_p=0.9)
    async with open_engine(max_num_seqs=8) as engine:
        alone = await engine.generate(prompt_ids, seeded)
        crowd = [
            engine.generate([5 + i, *prompt_ids], Sampling(max_tokens=5 + i, temperature=i / 5))
            for i in range(20)
        ]
        others = [replace(seeded, seed=seed) for seed in (8, None, None)]
        asked = [engine.generate(prompt_ids, one) for one in (seeded, *others)]
        *_, again, other, first, second = await asyncio.gather(*crowd, *asked)
    assert again.completion_ids == alone.completion_ids
    assert len({one.completion_ids for one in (alone, other, first, second)}) == 4


async def test_streaming_gives_the_tokens_one_by_one(open_engine, prompt_ids):
    sampling = Sampling(max_tokens=25, seed=3)
    async with open_engine() as engine:
        whole = await engine.generate(prompt_ids, sampling)
        pieces = await _collect(engine, prompt_ids, sampling)
    assert {len(piece.completion_ids) for piece in pieces} == {1}
    joined = join_pieces(pieces)
    assert joined.rollout_logprobs == pytest.approx(whole.rollout_logprobs, abs=1e-5)
    assert replace(joined, rollout_logprobs=whole.rollout_logprobs) == whole
    assert {piece.finish_reason for piece in pieces[:-1]} == {None}


async def test_stop_texts_end_the_completion_across_token_borders(
    open_engine, tiny_tokenizer, prompt_ids
):
    async with open_engine() as engine:
        free = await engine.generate(prompt_ids, Sampling(max_tokens=60, seed=11))
        texts = [tiny_tokenizer.decode(free.completion_ids[:end]) for end in range(1, 60)]
        # A character of either side of a border, which occurs nowhere before it.
        stop, end = next(
            (after[len(before) - 1 : len(before) + 1], end)
            for end, (before, after) in enumerate(pairwise(texts), start=2)
            if "\ufffd" not in after
            and after.find(after[len(before) - 1 : len(before) + 1]) == len(before) - 1
        )
        stopped = await engine.generate(
            prompt_ids, Sampling(max_tokens=60, seed=11, stop=("never spelled", stop))
        )
    assert (stopped.finish_reason, stopped.stop_text) == ("stop", stop)
    assert stopped.completion_ids == free.completion_ids[:end]


@pytest.mark.parametrize(
    ("text", "stop", "found"),
    [
        ("The quick brown fox", ("k b",), "k b"),
        ("Schöne Grüße, Äpfel", ("ße",), "ße"),  # a character of several byte tokens
        ("日本語のテキスト 🙂🙃", ("🙂🙃",), "🙂🙃"),
        ("aXbYc", ("Y", "X"), "X"),  # the earliest in the text
        ("ab", ("abc", "b"), "b"),
        ("say END now", ("END", "EN"), "EN"),  # the shorter one is complete first
        ("a<tool_call>b", ("<tool_call>",), "<tool_call>"),
        ("a<|im_end|>b", ("<|im_end|>",), "<|im_end|>"),
        ("nothing of it", ("zzz",), None),
        ("almost EN D", ("END",), None),
    ],
)
def test_a_stop_text_is_found_with_the_token_that_completes_it(tiny_tokenizer, text, stop, found):
    ids = tiny_tokenizer.encode(text)
    finder = StopTextFinder(tiny_tokenizer, stop)
    results = [finder.find(token) for token in ids]
    if found is None:
        assert results == [None] * len(ids)
        return
    place = next(i for i, result in enumerate(results) if result is not None)
    assert results[place] == found
    # With this token the text holds it, and before this token it held none of them.
    assert found in tiny_tokenizer.decode(ids[: place + 1])
    assert not any(one in tiny_tokenizer.decode(ids[:place]) for one in stop)


@pytest.mark.slow
async def test_end_tokens_stop_and_are_kept(
    open_engine, build_tiny_model, tiny_tokenizer, prompt_ids
):
    sampling = Sampling(max_tokens=20, seed=5)
    async with open_engine() as engine:
        free = await engine.generate(prompt_ids, sampling)
        assert (free.finish_reason, len(free.completion_ids)) == ("length", 20)
        chosen = free.completion_ids[7]
        cut = free.completion_ids.index(chosen) + 1
        asked = replace(sampling, stop_token_ids=(chosen,))
        for max_tokens in (20, cut):
            stopped = await engine.generate(prompt_ids, replace(asked, max_tokens=max_tokens))
            assert stopped.completion_ids == free.completion_ids[:cut]
            assert (stopped.finish_reason, stopped.stop_text) == ("stop", None)
    model = build_tiny_model()
    model.generation_config.eos_token_id = [chosen, 1]
    async with open_engine(model) as engine:
        ended = await engine.generate(prompt_ids, sampling)
        # The tokenizer's end token counts too, though the model's list does not name it.
        with torch.no_grad():
            model.lm_head.weight[tiny_tokenizer.eos_token_id] = 0.0
        many = [engine.generate(prompt_ids, Sampling(temperature=5.0)) for _ in range(64)]
        done = await asyncio.gather(*many)
    assert (ended.completion_ids, ended.finish_reason) == (free.completion_ids[:cut], "stop")
    ends = {g.completion_ids[-1] for g in done if g.finish_reason == "stop"}
    assert tiny_tokenizer.eos_token_id in ends
    for generation in done:
        assert tiny_tokenizer.eos_token_id not in generation.completion_ids[:-1]


async def test_lengths_are_limited(open_engine, prompt_ids):
    async with open_engine(max_model_len=64) as engine:
        limit = Sampling(max_tokens=500, temperature=0.0)
        ids = (prompt_ids * 4)[:60]
        clamped = await engine.generate(ids, limit)
        assert (len(clamped.completion_ids), clamped.finish_reason) == (4, "length")
        unlimited = await engine.generate(ids, Sampling(temperature=0.0))
        assert len(unlimited.completion_ids) == 4
        assert len((await engine.generate((ids * 2)[:63], limit)).completion_ids) == 1
        with pytest.raises(ContextLengthError) as caught:
            await engine.generate((ids * 2)[:64], limit)
        assert (caught.value.num_prompt_tokens, caught.value.max_model_len) == (64, 64)
        with pytest.raises(ContextLengthError):
            engine.stream((ids * 2)[:64], limit)


@pytest.mark.parametrize(
    ("ids", "sampling", "message"),
    [
        ([], Sampling(), "prompt is empty"),
        ([3, 100_000], Sampling(), "token id 100000 is outside"),
        ([3, -1], Sampling(), "token id -1 is outside"),
        ([3], Sampling(temperature=float("nan")), "temperature nan is not allowed"),
    ],
)
async def test_bad_requests_are_refused_and_the_engine_lives_on(
    open_engine, ids, sampling, message
):
    async with open_engine() as engine:
        with pytest.raises(EngineError, match=message):
            await engine.generate(ids, sampling)
        assert (await engine.generate([3], Sampling(max_tokens=2))).completion_ids


async def test_no_more_than_max_num_seqs_are_sampled_at_once(open_engine, prompt_ids):
    most, running = 0, set()

    async def run(engine: EmbeddedEngine, number: int) -> None:
        nonlocal most
        async for _ in engine.stream(prompt_ids, Sampling(max_tokens=10, temperature=0.0)):
            running.add(number)
            most = max(most, len(running))
        running.discard(number)

    async with open_engine(max_num_seqs=3) as engine:
        await asyncio.gather(*(run(engine, number) for number in range(11)))
        assert 1 < most <= 3


@pytest.mark.slow
async def test_probes_go_before_the_calls_that_wait(open_engine, prompt_ids):
    sampling = Sampling(max_tokens=100, temperature=0.0)
    async with open_engine(max_num_seqs=2) as engine, asyncio.TaskGroup() as group:
        calls = [group.create_task(engine.generate(prompt_ids, sampling)) for _ in range(8)]
        async for _ in engine.stream(prompt_ids, Sampling(max_tokens=1, temperature=0.0)):
            # By now all others are there: two run and six wait.
            await engine.generate(prompt_ids, PROBE_SAMPLING)
        assert sum(call.done() for call in calls) <= 2


async def test_cancelled_calls_leave_the_engine(open_engine, prompt_ids):
    endless = Sampling(temperature=0.0)
    async with open_engine(max_num_seqs=2, max_model_len=4096) as engine:
        processor = engine._manager.batch_processor
        tasks = [asyncio.create_task(engine.generate(prompt_ids, endless)) for _ in range(6)]
        stream = engine.stream(prompt_ids, endless)
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results)
        await anext(stream)
        await stream.aclose()
        # Both places are free again, and so is the cache.
        await asyncio.wait_for(
            engine.generate([3, 4], Sampling(max_tokens=5, temperature=0.0)), timeout=5
        )
        assert not processor.has_pending_requests()
        allocators = processor.cache.cache_allocators.values()
        assert not any(any(allocator.block_table.values()) for allocator in allocators)


async def test_a_call_past_its_deadline_is_aborted(open_engine, prompt_ids):
    async with open_engine(max_model_len=4096, generate_timeout_seconds=0.3) as engine:
        started = time.monotonic()
        with pytest.raises(EngineTimeoutError, match=r"0\.3 s"):
            await engine.generate(prompt_ids, Sampling(temperature=0.0))
        with pytest.raises(EngineTimeoutError):
            await _collect(engine, prompt_ids, Sampling(temperature=0.0))
        assert time.monotonic() - started < 5
        await engine.generate(prompt_ids, Sampling(max_tokens=2))
        assert not engine._manager.batch_processor.has_pending_requests()


async def test_calls_from_several_event_loops_share_the_engine(open_engine, prompt_ids):
    sampling = Sampling(max_tokens=20, seed=2)
    async with open_engine() as engine:
        here = await engine.generate(prompt_ids, sampling)

        def run_elsewhere() -> Generation:
            return asyncio.run(engine.generate(prompt_ids, sampling))

        there = await asyncio.gather(*(asyncio.to_thread(run_elsewhere) for _ in range(4)))
    assert {g.completion_ids for g in there} == {here.completion_ids}


async def test_a_small_cache_still_finishes_every_call(
    open_engine, build_tiny_model, compute_truth, prompt_ids, monkeypatch
):
    """Requests that were evicted go on where they were, with exact logprobs."""
    monkeypatch.setattr("agentrl_cli.engine.embedded.continuous_batching._HEADROOM", 0.2)
    async with open_engine(max_num_seqs=16, max_model_len=128) as engine:
        sampling = Sampling(max_tokens=80, temperature=1.0)
        asked = [[i + 3, *prompt_ids[:20]] for i in range(16)]
        done = await asyncio.gather(*(engine.generate(ids, sampling) for ids in asked))
    model = build_tiny_model()
    for ids, generation in zip(asked, done, strict=True):
        expected = compute_truth(model, ids, generation, sampling)
        assert generation.rollout_logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        assert len(generation.versions) == len(generation.completion_ids)


@pytest.mark.slow
async def test_cancelling_all_that_an_eviction_left_does_not_hold_the_queue(
    open_engine, prompt_ids, monkeypatch
):
    monkeypatch.setattr("agentrl_cli.engine.embedded.continuous_batching._HEADROOM", 0.2)
    async with open_engine(max_num_seqs=8, max_model_len=512) as engine:
        endless = Sampling(temperature=0.0)
        tasks = {
            f"call-{i}": asyncio.create_task(engine.generate([i + 3, *prompt_ids], endless))
            for i in range(8)
        }
        await asyncio.sleep(0)  # each has opened its call, in this order
        scheduler = engine._manager.batch_processor.scheduler
        for _ in range(2000):
            await asyncio.sleep(0.002)
            if scheduler.block_new_requests:
                break
        else:
            pytest.fail("nothing was evicted")
        await engine.pause()
        active = list(scheduler.active_requests)
        assert 0 < len(active) < 8
        for name in active:
            tasks.pop(name).cancel()
        await asyncio.sleep(0)
        await engine.resume()
        done = await asyncio.wait_for(asyncio.gather(*tasks.values()), 60)
    assert all(generation.finish_reason == "length" for generation in done)
