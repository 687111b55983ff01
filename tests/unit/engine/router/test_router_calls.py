"""Calls on servers that fail: every token is what the weights of its version say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl_cli.engine.protocol import Sampling, ServerFaultCounter
from agentrl_cli.errors import (
    ContextLengthError,
    EngineError,
    EngineTimeoutError,
    ServerDownError,
)

#: Its completion is as long as it may be.
ENDLESS = [2000]


def test_a_call_goes_on_elsewhere_from_the_tokens_that_are_certain(world: Any) -> None:
    async def story(w: Any) -> None:
        call = asyncio.ensure_future(w.generate(ENDLESS, 200, seed=5))
        await asyncio.sleep(3.5)
        first = next(s for s in w.servers if s.process.num_running)
        second = next(s for s in w.servers if s is not first)
        first.kill()
        generation = await call
        assert generation.versions == (0,) * 200
        (sent,) = second.process.prompts
        # 64-token pieces of 50 tokens a second: 128 have arrived, and the last is not certain.
        assert len(sent) == 1 + 1 + 128 - 1
        (sampling,) = second.process.samplings
        assert sampling.max_tokens == 200 - 128
        assert sampling.seed not in (None, 5)
        assert w.router.num_failovers == 1
        assert w.router.num_servers_out == 1
        assert isinstance(w.router, ServerFaultCounter)
        assert w.router.fault_counts == {
            "failovers": 1, "server_outages": 1, "server_returns": 0
        }  # fmt: skip

    world.run(story)


def test_a_young_attempt_starts_over_as_its_process_is_unproven(world: Any) -> None:
    async def story(w: Any) -> None:
        call = asyncio.ensure_future(w.generate(ENDLESS, 200, seed=5))
        await asyncio.sleep(0.5)
        first = next(s for s in w.servers if s.process.num_running)
        first.kill()
        await call
        (second,) = (s for s in w.servers if s is not first)
        assert second.process.prompts == [tuple(ENDLESS)]
        assert second.process.samplings[0].seed == 5

    world.run(story)


def test_tokens_that_arrived_after_a_pause_began_are_sampled_again(world: Any) -> None:
    async def story(w: Any) -> None:
        call = asyncio.ensure_future(w.generate(ENDLESS, 400))
        await asyncio.sleep(1.8)
        first = next(s for s in w.servers if s.process.num_running)
        (second,) = (s for s in w.servers if s is not first)
        await w.router.publish_weights(1, {})
        await asyncio.sleep(2.0)
        first.kill()
        generation = await call
        (sent,) = second.process.prompts
        # 1 + 64 tokens of version 0 have arrived before the pause, the last followed by others.
        assert len(sent) == 1 + 65
        assert generation.versions[:65] == (0,) * 65
        assert set(generation.versions[65:]) == {1}

    world.run(story)


def test_a_call_survives_a_publication_with_both_versions(world: Any) -> None:
    async def story(w: Any) -> None:
        call = asyncio.ensure_future(w.generate(ENDLESS, 300))
        await asyncio.sleep(1.0)
        await w.router.publish_weights(1, {})
        generation = await call
        assert set(generation.versions) == {0, 1}
        assert w.router.num_failovers == 0

    world.run(story)


@pytest.mark.parametrize("reason", [{"stop": ("\n",)}, {"structural_tag": "{}"}])
def test_stop_texts_and_grammars_make_a_broken_call_start_over(
    world: Any, reason: dict[str, Any]
) -> None:
    async def story(w: Any) -> None:
        call = asyncio.ensure_future(w.stream(ENDLESS, 200, seed=3, **reason))
        await asyncio.sleep(3.5)
        first = next(s for s in w.servers if s.process.num_running)
        first.kill()
        _, num_pieces = await call
        assert num_pieces == 1
        (second,) = (s for s in w.servers if s is not first)
        assert second.process.prompts == [tuple(ENDLESS)]
        (sampling,) = second.process.samplings
        assert (sampling.seed, sampling.max_tokens) == (3, 200)
        assert {key: getattr(sampling, key) for key in reason} == reason

    world.run(story)


@pytest.mark.parametrize("reads_along", [True, False])
def test_the_likeliest_tokens_stay_with_theirs_when_a_server_dies(
    world: Any, reads_along: bool
) -> None:
    async def story(w: Any) -> None:
        sampling = Sampling(max_tokens=200, num_top_logprobs=1)
        generations = []

        async def run() -> None:
            if not reads_along:
                generations.append(await w.router.generate(ENDLESS, sampling))
                return
            async for piece in w.router.stream(ENDLESS, sampling):
                generations.append(piece)

        call = asyncio.ensure_future(run())
        await asyncio.sleep(3.5)
        next(s for s in w.servers if s.process.num_running).kill()
        await call
        assert w.router.num_failovers == 1
        ids = [i for g in generations for i in g.completion_ids]
        logprobs = [x for g in generations for x in g.rollout_logprobs]
        assert len(ids) == 200
        # The servers here say of every token that it was the likeliest.
        tops = [top for g in generations for top in g.top_logprobs]
        assert tops == [((i, x),) for i, x in zip(ids, logprobs, strict=True)]

    world.run(story)


def test_a_reader_gets_token_after_token_and_survives_too(world: Any) -> None:
    async def story(w: Any) -> None:
        call = asyncio.ensure_future(w.stream(ENDLESS, 100))
        await asyncio.sleep(0.5)
        first = next(s for s in w.servers if s.process.num_running)
        first.kill()
        _, num_pieces = await call
        # The first and the last of each attempt come in one piece with a neighbour.
        assert num_pieces >= 95
        (second,) = (s for s in w.servers if s is not first)
        (sent,) = second.process.prompts
        assert len(sent) > 20

    world.run(story)


def test_a_reader_waits_for_the_end_after_a_publication(world: Any) -> None:
    async def story(w: Any) -> None:
        pieces = []

        async def read() -> None:
            async for piece in w.router.stream(ENDLESS, Sampling(max_tokens=300)):
                pieces.append(piece)

        call = asyncio.ensure_future(read())
        await asyncio.sleep(0.5)
        await w.router.publish_weights(1, {})
        num_pieces = len(pieces)
        await call
        assert len(pieces) == num_pieces + 1
        assert set(pieces[-1].versions) == {0, 1}
        assert len(pieces[-1].versions) == sum(len(p.completion_ids) for p in pieces)

    world.run(story)


def test_a_hung_server_is_found_and_its_call_moved(world: Any) -> None:
    async def story(w: Any) -> None:
        call = asyncio.ensure_future(w.generate(ENDLESS, 100))
        await asyncio.sleep(1.0)
        first = next(s for s in w.servers if s.process.num_running)
        first.hang()
        started = asyncio.get_running_loop().time()
        await call
        # Three checks of 5 s, 1 s apart.
        assert 15 < asyncio.get_running_loop().time() - started < 25
        assert first.process.num_aborted == 1

    world.run(story)


def test_a_restart_that_no_check_saw_is_found_by_the_versions(world: Any) -> None:
    async def story(w: Any) -> None:
        await w.router.publish_weights(3, {})
        for server in w.servers:
            server.start_again()
        started = asyncio.get_running_loop().time()
        generation = await w.generate([7, 8, 9], 50)
        assert set(generation.versions) == {3}
        assert asyncio.get_running_loop().time() - started < 6

    world.run(story, version=None)


def test_a_restart_that_no_check_saw_hands_no_token_to_a_reader(world: Any) -> None:
    async def story(w: Any) -> None:
        await w.router.publish_weights(3, {})
        for server in w.servers:
            server.start_again()
        generation, _ = await w.stream([7, 8, 9], 50)
        assert set(generation.versions) == {3}

    world.run(story, version=None)


def test_sessions_stick_and_new_ones_go_where_fewer_calls_are(world: Any) -> None:
    async def story(w: Any) -> None:
        for turn in range(1, 4):
            await asyncio.gather(
                *(w.generate([index, turn], 20, session_id=f"s{index}") for index in range(10))
            )
        first, second = ({p[0] for p in s.process.prompts} for s in w.servers)
        assert len(first) == len(second) == 5
        assert not first & second
        # Those of a dead server move, and the others stay where they are.
        w.servers[0].kill()
        await asyncio.gather(
            *(w.generate([index, 9], 20, session_id=f"s{index}") for index in range(10))
        )
        assert {p[0] for p in w.servers[1].process.prompts} == set(range(10))

    world.run(story)


def test_without_any_server_a_call_waits_until_its_deadline(world: Any) -> None:
    async def story(w: Any) -> None:
        for server in w.servers:
            server.kill()
        started = asyncio.get_running_loop().time()
        with pytest.raises(EngineTimeoutError) as caught:
            await w.generate([5], 10)
        assert asyncio.get_running_loop().time() - started == pytest.approx(30, abs=0.1)
        text = str(caught.value)
        assert "engine.generate_timeout_seconds" in text
        assert "fake-0 is out for " in text
        assert "fake-1 is out for " in text
        assert "closed the connection" in text

    world.run(story, generate_timeout_seconds=30.0)


def test_a_call_that_takes_too_long_says_how_far_it_came(world: Any) -> None:
    async def story(w: Any) -> None:
        with pytest.raises(EngineTimeoutError, match=r"129 of at most 300 tokens"):
            await w.generate(ENDLESS, 300)
        assert sum(s.process.num_running for s in w.servers) == 0

    world.run(story, generate_timeout_seconds=3.0)


def test_cancelling_and_closing_abort_the_call_in_the_server(world: Any) -> None:
    async def story(w: Any) -> None:
        call = asyncio.ensure_future(w.router.generate(ENDLESS, Sampling(max_tokens=100)))
        await asyncio.sleep(0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        stream = w.router.stream(ENDLESS, Sampling(max_tokens=100))
        await anext(stream)
        await stream.aclose()
        assert [s.process.num_running for s in w.servers] == [0, 0]
        assert [s.process.num_aborted for s in w.servers] == [1, 1]
        assert w.router.num_in_flight == 0
        assert w.router.num_servers_out == 0

    world.run(story)


@pytest.mark.parametrize(
    ("prompt", "sampling", "error"),
    [
        ([1] * 512, Sampling(), ContextLengthError),
        ([], Sampling(), EngineError),
        ([1], Sampling(temperature=-1.0), EngineError),
        ([1], Sampling(top_p=0.0), EngineError),
        ([1], Sampling(max_tokens=0), EngineError),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_is_sent(
    world: Any, prompt: list[int], sampling: Sampling, error: type[Exception]
) -> None:
    async def story(w: Any) -> None:
        with pytest.raises(error):
            await w.router.generate(prompt, sampling)
        with pytest.raises(error):
            w.router.stream(prompt, sampling)
        assert [s.process.prompts for s in w.servers] == [[], []]

    world.run(story)


def test_a_replica_answers_for_itself_alone(world: Any) -> None:
    async def story(w: Any) -> None:
        first, second = w.router.replicas
        assert (first.name, second.name) == ("fake-0", "fake-1")
        for _ in range(3):
            await first.generate([4], Sampling(max_tokens=5))
        assert len(w.servers[0].process.prompts) == 3
        assert await second.policy_version() == 0
        call = asyncio.ensure_future(second.generate([4], Sampling(max_tokens=100)))
        await asyncio.sleep(0.01)
        w.servers[1].kill()
        with pytest.raises(ServerDownError, match="fake-1"):
            await call
        assert [replica.name for replica in w.router.replicas] == ["fake-0"]
        with pytest.raises(ServerDownError, match="fake-1"):
            await second.generate([4], Sampling(max_tokens=5))

    world.run(story)


def test_closing_fails_calls_in_flight_and_closes_everything(world: Any) -> None:
    async def story(w: Any) -> None:
        call = asyncio.ensure_future(w.router.generate(ENDLESS, Sampling(max_tokens=100)))
        await asyncio.sleep(0.3)
        await w.router.close()
        await w.router.close()
        with pytest.raises(EngineError, match="closed"):
            await call
        with pytest.raises(EngineError, match="closed"):
            await w.router.generate(ENDLESS, Sampling())
        with pytest.raises(EngineError, match="closed"):
            await w.router.publish_weights(1, {})
        assert all(server.is_closed for server in w.servers)
        assert w.transfer.is_closed

    world.run(story)


def test_who_gave_up_the_servers_can_fail_all_calls(world: Any) -> None:
    async def story(w: Any) -> None:
        for server in w.servers:
            server.kill()
        call = asyncio.ensure_future(w.router.generate([3], Sampling()))
        await asyncio.sleep(1)
        w.router.fail(EngineError("vllm-0 died 4 times in an hour"))
        with pytest.raises(EngineError, match="4 times"):
            await call

    world.run(story)


@pytest.mark.parametrize("ends_by", ["end token", "length"])
@pytest.mark.parametrize("reads_along", [False, True])
def test_a_death_after_the_last_token_leaves_the_completion_an_end(
    world: Any, ends_by: str, reads_along: bool
) -> None:
    """All tokens are there, but nobody has said that the last one was the last."""
    prompt, max_tokens = ENDLESS, 150
    if ends_by == "end token":
        prompts = ([first] for first in range(3, 2000))
        prompt = next(p for p in prompts if 120 < count_tokens(world, p) < 150)
        max_tokens = 400

    async def story(w: Any) -> None:
        for server in w.servers:
            server.process.end_delay = 5.0
        run = w.stream if reads_along else w.generate
        call = asyncio.ensure_future(run(prompt, max_tokens))
        await asyncio.sleep(3.8)
        first = next(s for s in w.servers if s.process.num_running)
        first.kill()
        await call
        (second,) = (s for s in w.servers if s is not first)
        (sampling,) = second.process.samplings
        assert 1 <= sampling.max_tokens <= max_tokens - 120

    world.run(story)


def count_tokens(world: Any, prompt: list[int]) -> int:
    prefix = list(prompt)
    while len(prefix) < 300 and prefix[-1] != world.end_id:
        prefix.append(world.sample_token(prefix, 0))
    return len(prefix) - len(prompt)
