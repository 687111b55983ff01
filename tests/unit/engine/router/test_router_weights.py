"""Publications and servers that come back: nobody serves weights that were not proven."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from agentrl_cli.engine.protocol import Probe, Sampling
from agentrl_cli.errors import EngineError, EngineTimeoutError, WeightMismatchError

#: Its completion is as long as it may be.
ENDLESS = [2000]


def build_probe(world: Any, weights: int, tolerance: float = 1e-3) -> Probe:
    ids = [5, 6, 7, 8, 9]
    logprobs = tuple(world.compute_logprob(ids[:place], weights) for place in (3, 4))
    return Probe(token_ids=tuple(ids), num_prompt_tokens=3, logprobs=logprobs, tolerance=tolerance)


def test_a_publication_reaches_all_servers_and_freezes_none_for_another(world: Any) -> None:
    async def story(w: Any) -> None:
        started = asyncio.get_running_loop().time()
        await w.router.publish_weights(1, {})
        assert [s.process.weights for s in w.servers] == [1, 1, 1]
        assert await w.router.policy_version() == 1
        assert not any(s.process.is_paused for s in w.servers)
        # Preparing once, then all servers at the same time.
        assert asyncio.get_running_loop().time() - started < 0.05 + 2 * 0.125

    world.run(story, num_servers=3)


def test_before_the_first_publication_calls_wait_for_it(world: Any) -> None:
    async def story(w: Any) -> None:
        call = asyncio.ensure_future(w.generate([4], 10))
        await asyncio.sleep(5)
        assert not call.done()
        await w.router.publish_weights(7, {})
        assert set((await call).versions) == {7}

    world.run(story, version=None)


def test_without_a_publication_the_deadline_says_so(world: Any) -> None:
    async def story(w: Any) -> None:
        with pytest.raises(EngineTimeoutError, match="no weights were published"):
            await w.generate([4], 10)

    world.run(story, version=None, generate_timeout_seconds=5.0)


def test_a_server_that_dies_meanwhile_does_not_fail_the_publication(world: Any) -> None:
    async def story(w: Any) -> None:
        publication = asyncio.ensure_future(w.router.publish_weights(1, {}))
        await asyncio.sleep(0.1)
        w.servers[0].kill()
        await publication
        assert w.router.num_servers_out == 1
        assert await w.router.policy_version() == 1

    world.run(story)


def test_a_server_that_hangs_meanwhile_does_not_fail_the_publication(world: Any) -> None:
    async def story(w: Any) -> None:
        w.servers[0].hang()
        await w.router.publish_weights(1, {})
        assert [s.name for s in w.router.replicas] == ["fake-1"]
        w.servers[0].hang(False)
        await asyncio.sleep(5)
        assert w.servers[0].process.weights == 1
        assert w.router.num_servers_out == 0

    world.run(story)


def test_a_living_server_that_refuses_the_weights_fails_the_publication(world: Any) -> None:
    async def story(w: Any) -> None:
        w.servers[1].process.refuses_weights = True
        with pytest.raises(EngineError) as caught:
            await w.router.publish_weights(1, {})
        text = str(caught.value)
        assert "policy version 1 did not reach fake-1" in text
        assert "weight update" in text
        assert "no space left" in text
        # What it holds now is unknown: it must not serve, and the other one may.
        assert [s.name for s in w.router.replicas] == ["fake-0"]
        assert set((await w.generate([4], 50)).versions) == {1}
        assert not w.servers[0].process.is_paused

    world.run(story)


def test_a_refusing_server_that_is_out_comes_back_when_it_takes_them(world: Any) -> None:
    async def story(w: Any) -> None:
        w.servers[1].start_again(refuses_weights=True)
        await asyncio.sleep(20)
        assert w.router.num_servers_out == 1
        w.servers[1].process.refuses_weights = False
        await asyncio.sleep(11)
        assert w.router.num_servers_out == 0

    async def begin(w: Any) -> None:
        await w.router.publish_weights(1, {})
        await story(w)

    world.run(begin, version=None)


def test_if_all_are_out_the_publication_waits_for_one(world: Any) -> None:
    async def story(w: Any) -> None:
        for server in w.servers:
            server.kill()
        publication = asyncio.ensure_future(w.router.publish_weights(1, {}))
        await asyncio.sleep(30)
        assert not publication.done()
        w.servers[1].start_again()
        await publication
        assert w.servers[1].process.weights == 1
        assert await w.router.policy_version() == 1

    world.run(story)


def test_if_none_comes_back_the_publication_fails_in_time(world: Any) -> None:
    async def story(w: Any) -> None:
        for server in w.servers:
            server.kill()
        started = asyncio.get_running_loop().time()
        with pytest.raises(EngineTimeoutError, match="fake-0 is out for"):
            await w.router.publish_weights(1, {})
        assert asyncio.get_running_loop().time() - started == pytest.approx(150, abs=10)

    world.run(story, publish_timeout_seconds=50.0)


def test_one_that_comes_back_gets_the_current_weights_first(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(w: Any) -> None:
        await w.router.publish_weights(1, {})
        w.router.expect(1, [build_probe(world, 1)])
        w.servers[0].kill()
        await asyncio.sleep(5)
        assert w.router.num_servers_out == 1
        w.servers[0].start_again()
        await asyncio.sleep(2)
        assert w.servers[0].process.weights == w.servers[0].process.label == 1
        assert w.router.num_servers_out == 0

    with caplog.at_level(logging.INFO, logger="agentrl_cli"):
        world.run(story, version=None)
    lines = "\n".join(caplog.messages)
    assert "fake-0 is out, its 0 calls go on elsewhere: fake-0 closed the connection" in lines
    assert "fake-0 is in again after" in lines
    assert "with policy version 1" in lines


def test_a_publication_during_the_return_leaves_no_older_weights(world: Any) -> None:
    async def story(w: Any) -> None:
        await w.router.publish_weights(1, {})
        for version in range(2, 40):
            w.servers[0].start_again()
            # At every moment of the return, in steps of 20 ms.
            await asyncio.sleep(1.2 + 0.02 * version)
            await w.router.publish_weights(version, {})
            for replica in w.router.replicas:
                assert await replica.policy_version() == version
            await asyncio.sleep(3)
            assert [s.process.weights for s in w.servers] == [version, version]

    world.run(story, version=None)


@pytest.mark.parametrize("fault", ["ignores_weights", "ignores_version"])
def test_one_that_comes_back_with_other_weights_ends_the_run(world: Any, fault: str) -> None:
    async def story(w: Any) -> None:
        await w.router.publish_weights(1, {})
        w.router.expect(1, [build_probe(world, 1)])
        w.servers[0].start_again(**{fault: True})
        await asyncio.sleep(10)
        for call in (
            w.router.generate([3], Sampling()),
            w.router.publish_weights(2, {}),
            w.router.policy_version(),
        ):
            with pytest.raises(WeightMismatchError, match="fake-0"):
                await call

    world.run(story, version=None)


def test_the_message_of_a_mismatch_has_both_numbers(world: Any) -> None:
    async def story(w: Any) -> None:
        await w.router.publish_weights(1, {})
        probe = build_probe(world, 1)
        w.router.expect(1, [probe])
        w.servers[0].start_again(ignores_weights=True)
        await asyncio.sleep(10)
        with pytest.raises(WeightMismatchError) as caught:
            await w.router.policy_version()
        assert f"trainer {probe.logprobs[0]:.6f}" in str(caught.value)
        assert f"logprob {world.compute_logprob([5, 6, 7], 0):.6f}" in str(caught.value)
        assert "allowed 1.00e-03" in str(caught.value)

    world.run(story, version=None)


def test_probes_that_come_after_the_return_are_still_compared(world: Any) -> None:
    async def story(w: Any) -> None:
        await w.router.publish_weights(1, {})
        w.servers[0].start_again(ignores_weights=True)
        await asyncio.sleep(5)
        assert w.router.num_servers_out == 0
        w.router.expect(1, [build_probe(world, 1)])
        await asyncio.sleep(10)
        with pytest.raises(WeightMismatchError, match="does not hold"):
            await w.router.generate([3], Sampling())

    world.run(story, version=None)


def test_probes_of_another_version_are_not_compared(world: Any) -> None:
    async def story(w: Any) -> None:
        await w.router.publish_weights(1, {})
        w.router.expect(1, [build_probe(world, 1)])
        await w.router.publish_weights(2, {})
        w.servers[0].start_again()
        await asyncio.sleep(5)
        assert w.router.num_servers_out == 0

    world.run(story, version=None)


def test_servers_that_disagree_are_named(world: Any) -> None:
    async def story(w: Any) -> None:
        await w.router.publish_weights(4, {})
        w.servers[1].process.label = 3
        with pytest.raises(
            WeightMismatchError, match=r"fake-0 reports policy version 4 and fake-1 reports 3"
        ):
            await w.router.policy_version()

    world.run(story)


def test_one_that_was_started_anew_unseen_is_not_asked_for_the_version(world: Any) -> None:
    async def story(w: Any) -> None:
        await w.router.publish_weights(4, {})
        w.servers[1].start_again()
        assert await w.router.policy_version() == 4
        assert [s.name for s in w.router.replicas] == ["fake-0"]

    world.run(story)


def test_pause_holds_all_until_resume_also_those_that_come_back(world: Any) -> None:
    async def story(w: Any) -> None:
        await w.router.pause()
        call = asyncio.ensure_future(w.generate(ENDLESS, 20))
        w.servers[0].start_again()
        await asyncio.sleep(5)
        await w.router.publish_weights(1, {})
        await asyncio.sleep(1)
        assert not call.done()
        await w.router.resume()
        assert set((await call).versions) == {1}
        await asyncio.sleep(1)
        assert w.router.num_servers_out == 0

    world.run(story)


def test_the_start_waits_for_one_server_and_takes_the_others_later(world: Any) -> None:
    async def story(w: Any) -> None:
        assert w.router.num_servers_out == 1
        assert set((await w.generate([4], 20)).versions) == {0}
        w.servers[0].start_again()
        await asyncio.sleep(1)
        assert w.router.num_servers_out == 0
        assert w.servers[0].process.label == 0

    class SlowWorld(world):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **config: Any) -> None:
            super().__init__(*args, **config)
            self.servers[0].kill()

    SlowWorld.run(story)


def test_the_start_says_who_did_not_answer(world: Any) -> None:
    class DeadWorld(world):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **config: Any) -> None:
            super().__init__(*args, **config)
            self.servers[0].kill()

    async def story(w: Any) -> None:
        raise AssertionError("it started without a server")

    with pytest.raises(EngineTimeoutError) as caught:
        DeadWorld.run(story, num_servers=1, start_timeout_seconds=20.0)
    assert "engine.start_timeout_seconds" in str(caught.value)
    assert "fake-0 closed the connection" in str(caught.value)


def test_a_cancelled_publication_leaves_no_server_half_updated(world: Any) -> None:
    async def story(w: Any) -> None:
        publication = asyncio.ensure_future(w.router.publish_weights(1, {}))
        await asyncio.sleep(0.1)
        publication.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publication
        assert w.router.num_servers_out == 2
        generation = await w.generate(ENDLESS, 20)
        assert set(generation.versions) == {1}

    world.run(story)


def test_the_start_does_not_wait_for_a_server_that_says_no(world: Any) -> None:
    class RefusingWorld(world):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **config: Any) -> None:
            super().__init__(*args, **config)
            self.servers[1].process.refuses_key = True

    async def story(w: Any) -> None:
        raise AssertionError("it started with a server that refuses it")

    with pytest.raises(EngineError, match="fake-1 refused the key"):
        RefusingWorld.run(story)


def test_servers_on_the_trainers_gpu_make_room_once_their_calls_have_ended(world: Any) -> None:
    async def story(w: Any) -> None:
        before = asyncio.ensure_future(w.generate([4], 100))
        await asyncio.sleep(0.1)
        await w.router.release_memory()
        assert all(s.process.is_asleep for s in w.servers)
        assert before.done() or not any(s.process.num_running for s in w.servers)
        await before
        waiting = asyncio.ensure_future(w.generate([5], 10))
        await asyncio.sleep(60)
        assert not waiting.done()
        await w.router.reclaim_memory()
        await w.router.publish_weights(1, {})
        await waiting
        assert not any(s.process.is_asleep for s in w.servers)

    world.run(story, shares_gpu=True)


def test_servers_with_gpus_of_their_own_keep_their_memory(world: Any) -> None:
    async def story(w: Any) -> None:
        await w.router.release_memory()
        assert not any(s.process.is_asleep for s in w.servers)
        await w.generate([4], 10)
        await w.router.reclaim_memory()

    world.run(story)


def test_a_server_that_reads_weights_for_minutes_is_not_taken_for_hung(world: Any) -> None:
    async def story(w: Any) -> None:
        for server in w.servers:
            server.process.load_seconds = 300.0
        call = asyncio.ensure_future(w.generate([4], 100))
        await asyncio.sleep(0.05)
        await w.router.publish_weights(1, {})
        assert w.router.num_servers_out == 0
        await call
        assert w.router.num_failovers == 0

    world.run(story)
