"""Calls on servers that fail: every token is what the weights of its version say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import (
    ContextLengthError,
    EngineError,
    EngineTimeoutError,
    ServerBusyError,
    ServerDownError,
)

#: Its completion is as long as it may be.
ENDLESS = [2000]

limited = pytest.mark.parametrize("limits", [{}, {"stop": ("\n",)}, {"structural_tag": "{}"}])


def in_world(**options: Any) -> Any:
    return pytest.mark.parametrize("w", [options], indirect=True, ids=[""])


def split_by_load(w: Any) -> list[Any]:
    """Of two servers, the one that samples a call, and the other."""
    return sorted(w.servers, key=lambda server: -server.process.num_running)


@limited
async def test_a_call_is_sampled_again_elsewhere_from_its_start(
    w: Any, limits: dict[str, Any]
) -> None:
    call = asyncio.ensure_future(w.generate(ENDLESS, 200, seed=5, **limits))
    await asyncio.sleep(3.5)
    first, second = split_by_load(w)
    first.kill()
    assert (await call).versions == (0,) * 200
    assert second.process.prompts == [tuple(ENDLESS)]
    assert second.process.samplings == [Sampling(max_tokens=200, seed=5, **limits)]
    # 1 + 2 * 64 tokens of 50 a second had arrived.
    assert w.router.take_fault_metrics() == {
        **{"resampled_calls": 1.0, "lost_tokens": 129.0, "server_failures": 1.0},
        **{"server_recoveries": 0.0, "num_unhealthy_servers": 1.0},
    }
    assert w.router.take_fault_metrics()["lost_tokens"] == 0.0


async def test_the_load_is_that_of_the_servers_that_say_it(w: Any) -> None:
    calls = [asyncio.ensure_future(w.generate(ENDLESS, 200)) for _ in range(3)]
    await asyncio.sleep(0.5)
    load = await w.router.read_load()
    assert (load.num_seats, load.num_running, load.num_waiting) == (32, 3, 2)
    assert load.cache_use == 0.5
    first, second = split_by_load(w)
    second.hang()
    load = await w.router.read_load()
    assert (load.num_seats, load.num_running) == (16, 2)
    first.hang()
    assert await w.router.read_load() is None
    for server in w.servers:
        server.hang(False)
    await asyncio.gather(*calls)


async def test_a_call_under_which_every_server_dies_is_given_up(w: Any) -> None:
    call = asyncio.ensure_future(w.router.generate(ENDLESS, Sampling(max_tokens=200)))
    while not call.done():
        await asyncio.sleep(0.1)
        for server in w.servers:
            if server.process.num_running:
                server.start_again()
    with pytest.raises(ServerDownError, match=r"sampled again 3 times and more"):
        await call
    assert w.router.take_fault_metrics()["resampled_calls"] == 3 + 2 - 1


def refuse(w: Any, *statuses: int) -> None:
    refusals = iter(statuses)
    for server in w.servers:
        server.process.refusals = refusals


@pytest.mark.parametrize("streams", [True, False])
async def test_a_busy_server_is_asked_again_later_and_later(w: Any, streams: bool) -> None:
    refuse(w, *[429] * 8, 500, 500)
    begin = asyncio.get_running_loop().time()
    generation = await (w.stream if streams else w.generate)(ENDLESS, 50)
    assert (generation[0] if streams else generation).versions == (0,) * 50
    # 1 + 2 + 4 + 8 + 16 + 5 * 30, each at least half.
    assert 90 < asyncio.get_running_loop().time() - begin < 183
    metrics = w.router.take_fault_metrics()
    assert metrics["resampled_calls"] == 10
    assert metrics["server_failures"] == metrics["num_unhealthy_servers"] == 0


async def test_a_call_that_breaks_servers_is_given_up(w: Any) -> None:
    refuse(w, *[500] * 100)
    with pytest.raises(ServerBusyError, match=r"500.* sampled again 3 times and more"):
        await w.generate(ENDLESS, 50)
    assert w.router.take_fault_metrics()["resampled_calls"] == 3 + 2 - 1


@in_world(generate_timeout_seconds=100.0)
async def test_a_call_does_not_wait_for_a_busy_server_beyond_its_deadline(w: Any) -> None:
    refuse(w, *[429] * 100)
    begin = asyncio.get_running_loop().time()
    with pytest.raises(ServerBusyError, match=r"429.* engine.generate_timeout_seconds=100"):
        await w.generate(ENDLESS, 50)
    assert 70 < asyncio.get_running_loop().time() - begin < 100


@limited
@pytest.mark.parametrize("streams", [True, False])
async def test_a_call_survives_a_publication_with_both_versions(
    w: Any, limits: dict[str, Any], streams: bool
) -> None:
    call = asyncio.ensure_future((w.stream if streams else w.generate)(ENDLESS, 100, **limits))
    await asyncio.sleep(0.5)
    await w.router.publish_weights(1, {})
    generation = await call
    if streams:
        generation, num_pieces = generation
        assert num_pieces == 100
    assert set(generation.versions) == {0, 1}
    assert w.router.take_fault_metrics()["resampled_calls"] == 0


async def test_the_likeliest_tokens_stay_with_theirs(w: Any) -> None:
    # The servers here say of every token that it was the likeliest.
    for generation in (
        await w.generate(ENDLESS, 200, num_top_logprobs=1),
        (await w.stream(ENDLESS, 200, num_top_logprobs=1))[0],
    ):
        pairs = zip(generation.completion_ids, generation.rollout_logprobs, strict=True)
        assert generation.top_logprobs == tuple((pair,) for pair in pairs)


@pytest.mark.parametrize(("seconds", "num_lost"), [(0.01, 0), (0.51, 25)])
async def test_a_stream_is_sampled_again_unless_it_was_read(
    w: Any, seconds: float, num_lost: int
) -> None:
    call = asyncio.ensure_future(w.stream(ENDLESS, 100))
    await asyncio.sleep(seconds)
    first, second = split_by_load(w)
    first.kill()
    if num_lost:
        with pytest.raises(ServerDownError, match=r"fake-. closed .*A part of the streamed"):
            await call
        assert second.process.prompts == []
    else:
        assert (await call)[1] == 100
    metrics = w.router.take_fault_metrics()
    assert (metrics["lost_tokens"], metrics["resampled_calls"]) == (num_lost, num_lost == 0)
    await w.stream(ENDLESS, 20)


@in_world(version=None)
async def test_an_unnoticed_restart_is_recognized_by_the_versions(w: Any) -> None:
    await w.router.publish_weights(3, {})
    for server in w.servers:
        server.start_again()
    # Its tokens were handed out before anybody could know whose they are.
    with pytest.raises(ServerDownError, match=r"weights without a version.* restarted"):
        await w.stream([7, 8, 9], 50)
    generation = await w.generate([7, 8, 9], 50)
    assert set(generation.versions) == {3}


async def test_sessions_stick_and_new_ones_go_where_fewer_calls_are(w: Any) -> None:
    async def take_turn(turn: int) -> None:
        await asyncio.gather(
            *(w.generate([index, turn], 20, session_id=f"s{index}") for index in range(10))
        )

    for turn in range(1, 4):
        await take_turn(turn)
    first, second = ({p[0] for p in s.process.prompts} for s in w.servers)
    assert len(first) == len(second) == 5
    assert not first & second
    # Those of a dead server move, and the others stay where they are.
    w.servers[0].kill()
    await take_turn(9)
    assert {p[0] for p in w.servers[1].process.prompts} == set(range(10))


@in_world(generate_timeout_seconds=30.0)
async def test_without_any_server_a_call_waits_until_its_deadline(w: Any) -> None:
    for server in w.servers:
        server.kill()
    started = asyncio.get_running_loop().time()
    with pytest.raises(EngineTimeoutError, match=r"engine\.generate_timeout_seconds") as caught:
        await w.generate([5], 10)
    assert asyncio.get_running_loop().time() - started == pytest.approx(30, abs=0.1)
    for text in ("fake-0 has been unhealthy for ", "fake-1 has been", "closed the connection"):
        assert text in str(caught.value)


@in_world(generate_timeout_seconds=3.0)
async def test_a_call_that_takes_too_long_says_how_far_it_came(w: Any) -> None:
    with pytest.raises(EngineTimeoutError, match=r"129 tokens were sampled by fake-"):
        await w.generate(ENDLESS, 300)
    assert sum(s.process.num_running for s in w.servers) == 0


async def test_cancelling_and_closing_abort_the_call_in_the_server(w: Any) -> None:
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
    assert w.num_unhealthy == 0


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
async def test_what_cannot_be_served_is_refused_before_it_is_sent(
    w: Any, prompt: list[int], sampling: Sampling, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await w.router.generate(prompt, sampling)
    with pytest.raises(error):
        w.router.stream(prompt, sampling)
    assert [s.process.prompts for s in w.servers] == [[], []]


async def test_a_replica_answers_for_itself_alone(w: Any) -> None:
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
    w.servers[0].kill()
    with pytest.raises(ServerDownError, match="fake-0"):
        await first.policy_version()
    assert w.num_unhealthy == 2


async def test_closing_fails_calls_in_flight_and_closes_everything(w: Any) -> None:
    call = asyncio.ensure_future(w.router.generate(ENDLESS, Sampling(max_tokens=100)))
    await asyncio.sleep(0.3)
    await w.router.close()
    await w.router.close()
    for one in (call, w.router.generate(ENDLESS, Sampling()), w.router.publish_weights(1, {})):
        with pytest.raises(EngineError, match="closed"):
            await one
    assert all(server.is_closed for server in w.servers)
    assert w.transfer.is_closed


async def test_all_calls_fail_once_the_servers_are_given_up(w: Any) -> None:
    for server in w.servers:
        server.kill()
    call = asyncio.ensure_future(w.router.generate([3], Sampling()))
    await asyncio.sleep(1)
    w.router.fail(EngineError("vllm-0 died 4 times in an hour"))
    with pytest.raises(EngineError, match="4 times"):
        await call
