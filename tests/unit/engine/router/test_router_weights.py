"""Publications and servers that recover: none serves weights that were not verified."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl_cli.engine.protocol import Probe, Sampling
from agentrl_cli.errors import EngineError, EngineTimeoutError, WeightMismatchError

#: Its completion is as long as it may be.
ENDLESS = [2000]


def in_world(**options: Any) -> Any:
    return pytest.mark.parametrize("w", [options], indirect=True, ids=[""])


def build_probe(w: Any, weights: int) -> Probe:
    ids = (5, 6, 7)
    likely = (w.sample_token(ids, weights), w.compute_logprob(ids, weights))
    return Probe(prompt_ids=ids, logprobs=(likely,), tolerance=1e-3)


@in_world(num_servers=3)
async def test_a_publication_reaches_all_servers_and_freezes_none_for_another(w: Any) -> None:
    started = asyncio.get_running_loop().time()
    await w.router.publish_weights(1, {})
    assert [s.process.weights for s in w.servers] == [1, 1, 1]
    assert await w.ask_versions() == {1}
    assert not any(s.process.is_paused for s in w.servers)
    # Preparing once, then all servers at the same time.
    assert asyncio.get_running_loop().time() - started < 0.05 + 2 * 0.125


@in_world(version=None)
async def test_before_the_first_publication_calls_wait_for_it(w: Any) -> None:
    call = asyncio.ensure_future(w.generate([4], 10))
    await asyncio.sleep(5)
    assert not call.done()
    await w.router.publish_weights(7, {})
    assert set((await call).versions) == {7}


@in_world(version=None, generate_timeout_seconds=5.0)
async def test_without_a_publication_the_deadline_says_so(w: Any) -> None:
    with pytest.raises(EngineTimeoutError, match="no weights were published"):
        await w.generate([4], 10)


@pytest.mark.parametrize("fault", ["dies", "hangs"])
async def test_a_server_that_fails_meanwhile_does_not_fail_the_publication(
    w: Any, fault: str
) -> None:
    if fault == "hangs":
        w.servers[0].hang()
    publication = asyncio.ensure_future(w.router.publish_weights(1, {}))
    await asyncio.sleep(0.1)
    if fault == "dies":
        w.servers[0].kill()
    await publication
    assert [s.name for s in w.router.replicas] == ["fake-1"]
    assert await w.ask_versions() == {1}
    if fault == "hangs":
        w.servers[0].hang(False)
        await asyncio.sleep(6)
        assert w.servers[0].process.weights == 1
        assert w.num_unhealthy == 0


async def test_a_living_server_that_refuses_the_weights_fails_the_publication(w: Any) -> None:
    w.servers[1].process.refuses_weights = True
    with pytest.raises(
        EngineError, match=r"policy version 1 did not reach fake-1: load: .*no space left"
    ):
        await w.router.publish_weights(1, {})
    # What it holds now is unknown: it must not serve, and the other one may.
    assert [s.name for s in w.router.replicas] == ["fake-0"]
    assert set((await w.generate([4], 50)).versions) == {1}
    assert not w.servers[0].process.is_paused


@in_world(num_servers=1)
async def test_a_server_too_slow_for_the_weights_is_given_them_again(w: Any) -> None:
    pause, num_late = w.servers[0].pause, 3

    async def pause_late() -> None:
        nonlocal num_late
        num_late -= 1
        if num_late >= 0:
            raise EngineTimeoutError("pause: fake-0 did not finish")
        await pause()

    w.servers[0].pause = pause_late
    await w.router.publish_weights(1, {})
    assert num_late == -1
    assert w.servers[0].process.weights == 1
    assert await w.ask_versions() == {1}


@in_world(version=None)
async def test_a_server_that_refused_them_recovers_when_it_takes_them(w: Any) -> None:
    await w.router.publish_weights(1, {})
    w.servers[1].start_again(refuses_weights=True)
    await w.ask_versions()
    await asyncio.sleep(20)
    assert w.num_unhealthy == 1
    w.servers[1].process.refuses_weights = False
    await asyncio.sleep(11)
    assert w.num_unhealthy == 0


async def test_if_all_are_unhealthy_the_publication_waits_for_one(w: Any) -> None:
    for server in w.servers:
        server.kill()
    publication = asyncio.ensure_future(w.router.publish_weights(1, {}))
    await asyncio.sleep(30)
    assert not publication.done()
    w.servers[1].start_again()
    await publication
    assert w.servers[1].process.weights == 1
    assert await w.ask_versions() == {1}


@in_world(publish_timeout_seconds=50.0, max_restarts=0)
async def test_if_none_recovers_the_publication_fails_in_time(w: Any) -> None:
    for server in w.servers:
        server.kill()
    started = asyncio.get_running_loop().time()
    with pytest.raises(EngineTimeoutError, match="fake-0 has been unhealthy for"):
        await w.router.publish_weights(1, {})
    assert asyncio.get_running_loop().time() - started == pytest.approx(150, abs=10)


@in_world(version=None)
async def test_one_that_recovers_gets_the_current_weights_first(
    w: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await w.router.publish_weights(1, {})
    w.router.expect(1, [build_probe(w, 1)])
    w.servers[0].kill()
    await w.ask_versions()
    assert w.num_unhealthy == 1
    w.servers[0].start_again()
    await asyncio.sleep(2)
    assert w.servers[0].process.weights == w.servers[0].process.label == 1
    assert w.num_unhealthy == 0
    lines = "\n".join(caplog.messages)
    assert "fake-0 is unhealthy (0 calls were running on it): fake-0 closed the conn" in lines
    assert "fake-0 is healthy again after" in lines
    assert "with policy version 1" in lines


@in_world(version=None)
async def test_a_publication_during_the_recovery_leaves_no_older_weights(w: Any) -> None:
    await w.router.publish_weights(1, {})
    for version in range(2, 40):
        w.servers[0].start_again()
        await w.ask_versions()
        # At every moment of the recovery, in steps of 20 ms.
        await asyncio.sleep(0.4 + 0.02 * version)
        await w.router.publish_weights(version, {})
        for replica in w.router.replicas:
            assert await replica.policy_version() == version
        await asyncio.sleep(3)
        assert [s.process.weights for s in w.servers] == [version, version]


@in_world(version=None)
@pytest.mark.parametrize("fault", ["ignores_weights", "ignores_version"])
async def test_one_that_recovers_with_other_weights_ends_the_run(w: Any, fault: str) -> None:
    await w.router.publish_weights(1, {})
    probe = build_probe(w, 1)
    w.router.expect(1, [probe])
    w.servers[0].start_again(**{fault: True})
    await w.ask_versions()
    await asyncio.sleep(10)
    for call in (w.router.generate([3], Sampling()), w.router.publish_weights(2, {})):
        with pytest.raises(WeightMismatchError, match="fake-0") as caught:
            await call
    if fault == "ignores_weights":
        assert f"trainer {probe.logprobs[0][1]:.6f}" in str(caught.value)
        assert "allowed 1.00e-03" in str(caught.value)


@in_world(version=None)
async def test_probes_that_come_after_the_recovery_are_still_compared(w: Any) -> None:
    await w.router.publish_weights(1, {})
    w.servers[0].start_again(ignores_weights=True)
    await w.ask_versions()
    await asyncio.sleep(5)
    assert w.num_unhealthy == 0
    w.router.expect(1, [build_probe(w, 1)])
    await asyncio.sleep(10)
    with pytest.raises(WeightMismatchError, match="does not hold"):
        await w.router.generate([3], Sampling())


@in_world(version=None)
async def test_one_is_not_judged_by_probes_of_earlier_weights_of_the_same_version(
    w: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for num_milliseconds in range(0, 50, 2):
        await w.router.publish_weights(1, {"number": 2})
        w.servers[0].start_again()
        await w.ask_versions()
        await asyncio.sleep(2)
        publication = asyncio.ensure_future(w.router.publish_weights(1, {}))
        # The server is compared while the weights are prepared, and paused for them meanwhile.
        await asyncio.sleep(num_milliseconds / 1000)
        w.router.expect(1, [build_probe(w, 2)])
        await publication
        await asyncio.sleep(2)
        assert [s.process.weights for s in w.servers] == [1, 1]
    assert "does not hold" not in "\n".join(caplog.messages)


@in_world(version=None)
async def test_probes_of_another_version_are_not_compared(w: Any) -> None:
    await w.router.publish_weights(1, {})
    w.router.expect(1, [build_probe(w, 1)])
    await w.router.publish_weights(2, {})
    w.servers[0].start_again()
    await w.ask_versions()
    await asyncio.sleep(5)
    assert w.num_unhealthy == 0


async def test_one_that_was_restarted_unnoticed_does_not_count_for_the_version(w: Any) -> None:
    await w.router.publish_weights(4, {})
    w.servers[1].start_again()
    assert await w.ask_versions() == {4}
    assert [s.name for s in w.router.replicas] == ["fake-0"]


async def test_the_start_waits_for_one_server_and_takes_the_others_later(world: Any) -> None:
    w = world(2)
    w.servers[0].kill()
    async with w.started():
        assert w.num_unhealthy == 1
        assert set((await w.generate([4], 20)).versions) == {0}
        w.servers[0].start_again()
        await asyncio.sleep(1)
        assert w.num_unhealthy == 0
        assert w.servers[0].process.label == 0


async def test_the_start_says_which_server_did_not_answer(world: Any) -> None:
    w = world(1, start_timeout_seconds=20.0)
    w.servers[0].kill()
    with pytest.raises(
        EngineTimeoutError, match=r"engine\.start_timeout_seconds.*fake-0 closed the connection"
    ):
        async with w.started():
            pass
    # One that refuses it will not change its mind.
    w = world(2)
    w.servers[1].process.refuses_key = True
    with pytest.raises(EngineError, match="fake-1 refused the key"):
        async with w.started():
            pass


async def test_a_cancelled_publication_leaves_no_server_half_updated(w: Any) -> None:
    publication = asyncio.ensure_future(w.router.publish_weights(1, {}))
    await asyncio.sleep(0.1)
    publication.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publication
    assert w.num_unhealthy == 2
    generation = await w.generate(ENDLESS, 20)
    assert set(generation.versions) == {1}


@in_world(shares_gpu=True)
async def test_servers_on_the_trainers_gpu_make_room_once_their_calls_have_ended(w: Any) -> None:
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


async def test_servers_with_gpus_of_their_own_keep_their_memory(w: Any) -> None:
    await w.router.release_memory()
    assert not any(s.process.is_asleep for s in w.servers)
    await w.generate([4], 10)
    await w.router.reclaim_memory()
