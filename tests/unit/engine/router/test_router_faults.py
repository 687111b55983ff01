"""Random deaths, hangs and publications: every call ends, and no token is claimed wrongly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_cli.errors import EngineTimeoutError, ServerDownError

SECONDS = 30.0
NUM_SERVERS = 3

moments = st.floats(0.0, SECONDS)
deaths = st.tuples(
    st.just("death"),
    moments,
    st.integers(0, NUM_SERVERS - 1),
    # Until the process is there again; 0: before anybody could see it gone.
    st.sampled_from([0.0, 0.0, 0.004, 0.3, 4.0, 40.0]),
)
hangs = st.tuples(
    st.just("hang"), moments, st.integers(0, NUM_SERVERS - 1), st.sampled_from([0.5, 8.0, 60.0])
)
publications = st.tuples(st.just("publication"), moments, st.just(0), st.just(0.0))
calls = st.fixed_dictionaries(
    {
        "begins": moments,
        "first_id": st.sampled_from([2000, 11, 12, 13]),
        "max_tokens": st.sampled_from([1, 2, 40, 65, 300]),
        "stop": st.sampled_from([(), (), ("\n",)]),
        "streams": st.booleans(),
    }
)


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """Keeps the lines of thousands of faults out of a failure's report."""
    logger = logging.getLogger("agentrl_cli.engine")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    faults=st.lists(deaths | hangs, max_size=12),
    publications=st.lists(publications, max_size=8),
    called=st.lists(calls, min_size=1, max_size=10),
    # By the router itself, or in another process, which hears late of the servers.
    news_seconds=st.sampled_from([None, 0.001, 0.2, 1.8]),
)
def test_every_call_ends_and_says_the_truth(
    world: Any,
    faults: list[Any],
    publications: list[Any],
    called: list[dict[str, Any]],
    news_seconds: float | None,
) -> None:
    published = 1

    async def publish(w: Any) -> None:
        nonlocal published
        for version, (_, moment, _, _) in enumerate(sorted(publications), start=2):
            await _sleep_until(moment)
            await _publish(w, version, num_tries=1 + len(faults))
            published = version
            assert await w.ask_versions() <= {version}

    async def strike(w: Any, kind: str, moment: float, index: int, seconds: float) -> None:
        await _sleep_until(moment)
        server = w.servers[index]
        if kind == "hang":
            server.hang()
            process = server.process
            await asyncio.sleep(seconds)
            process.is_hung = False
            process.touch()
            return
        server.kill()
        if seconds:
            await asyncio.sleep(seconds)
        server.start_again()

    async def call(w: Any, number: int, begins: float, streams: bool, **request: Any) -> None:
        await _sleep_until(begins)
        oldest = published
        prompt = [request.pop("first_id"), number]
        try:
            if streams:
                generation, _ = await w.stream(prompt, **request)
            else:
                generation = await w.generate(prompt, **request)
        except ServerDownError as error:
            if ("handed out already" if streams else "sampled again 3 times") in str(error):
                return
            raise
        assert min(generation.versions) >= oldest
        assert list(generation.versions) == sorted(generation.versions)

    async def play() -> None:
        async with world(NUM_SERVERS, news_seconds=news_seconds).started(None) as w:
            await w.router.publish_weights(1, {})
            async with asyncio.TaskGroup() as group:
                group.create_task(publish(w))
                for fault in faults:
                    group.create_task(strike(w, *fault))
                for number, request in enumerate(called):
                    group.create_task(call(w, number, **request))
            await asyncio.sleep(60)
            # By this it notices servers that were restarted while they were idle.
            await w.ask_versions()
            await asyncio.sleep(10)
            assert w.num_unhealthy == 0
            assert {s.process.weights for s in w.servers} == {1 + len(publications)}
            assert not any(s.process.is_paused or s.process.num_running for s in w.servers)

    world.run(play())


async def _sleep_until(moment: float) -> None:
    await asyncio.sleep(1000.0 + moment - asyncio.get_running_loop().time())


async def _publish(w: Any, version: int, num_tries: int) -> None:
    """Publishes; a hang that ends right after its leg's deadline may fail that once."""
    for number in range(num_tries):
        try:
            await w.router.publish_weights(version, {})
            return
        except EngineTimeoutError:
            if number == num_tries - 1:
                raise
