"""Servers as another process sees them: it calls them, and the router decides about them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from agentrl_cli.errors import EngineError, RunError, WeightMismatchError

ENDLESS = [2000]
far_away = pytest.mark.parametrize("w", [{"news_seconds": 0.3}], indirect=True)


@far_away
async def test_calls_wait_for_the_first_news(w: Any) -> None:
    call = asyncio.ensure_future(w.generate([4], 10))
    await asyncio.sleep(0.25)
    assert not w.servers[0].process.prompts
    await call


@far_away
async def test_a_server_that_fails_under_a_call_is_reported_and_comes_back(w: Any) -> None:
    calls = [asyncio.ensure_future(w.generate(ENDLESS, 100)) for _ in range(4)]
    await asyncio.sleep(1.0)
    w.servers[0].start_again()
    await asyncio.gather(*calls)
    # Elsewhere, before anybody has answered.
    assert len(w.servers[1].process.prompts) == 4
    w.engine.report_counts()
    await asyncio.sleep(5.0)
    assert w.num_unhealthy == 0
    sessions = [w.generate([7, n], 10, session_id=f"s{n}") for n in range(4)]
    await asyncio.gather(*sessions)
    assert [7] in [list(p[:1]) for p in w.servers[0].process.prompts]


@far_away
async def test_a_server_that_was_started_elsewhere_is_called_there(w: Any) -> None:
    call = asyncio.ensure_future(w.generate(ENDLESS, 100, session_id="s"))
    await asyncio.sleep(1.0)
    [server] = [one for one in w.servers if one.process.prompts]
    server.start_again()
    moved = replace(server.endpoint, base_url="http://elsewhere:2", api_key="sk-2")
    w.router.move(moved)
    await call
    await asyncio.sleep(5.0)
    assert w.num_unhealthy == 0
    assert moved in w.router.endpoints
    assert moved in [one.client.endpoint for one in w.engine._mirror.servers]


@far_away
async def test_what_is_counted_there_is_counted_once(w: Any) -> None:
    await asyncio.sleep(1.0)
    calls = [asyncio.ensure_future(w.generate(ENDLESS, 200)) for _ in range(4)]
    await asyncio.sleep(2.5)
    w.servers[0].kill()
    await asyncio.gather(*calls)
    w.engine.report_counts()
    w.engine.report_counts()
    await asyncio.sleep(1.0)
    metrics = w.router.take_fault_metrics()
    assert metrics["resampled_calls"] == 2
    assert metrics["lost_tokens"] > 0
    assert metrics["server_failures"] == 1


@far_away
async def test_no_call_shares_its_cache_with_older_ones_while_weights_change(w: Any) -> None:
    salts: list[Any] = []

    async def pause_and_look(pause: Any) -> None:
        salts.append([s.client.cache_salt for s in w.engine._mirror.servers])
        await pause()

    for server in w.servers:
        server.cache_salt = "old"
        server.pause = partial(pause_and_look, server.pause)
    await asyncio.sleep(1.0)
    publication = asyncio.ensure_future(w.router.publish_weights(1, {}))
    await asyncio.sleep(0.2)
    assert not salts, "it waits until the other process knows"
    for server in w.servers:
        server.cache_salt = "new"
    await publication
    assert salts == [[None, None]] * 2
    await asyncio.sleep(1.0)
    assert [s.client.cache_salt for s in w.engine._mirror.servers] == ["new", "new"]


@far_away
async def test_a_process_that_does_not_answer_delays_no_publication_for_long(w: Any) -> None:
    await asyncio.sleep(1.0)
    w.mirror._send = list
    started = asyncio.get_running_loop().time()
    await w.router.publish_weights(1, {})
    assert 2.0 <= asyncio.get_running_loop().time() - started < 2.5
    w.mirror.is_stalled = True
    started = asyncio.get_running_loop().time()
    await w.router.publish_weights(2, {})
    assert asyncio.get_running_loop().time() - started < 0.5


@far_away
@pytest.mark.parametrize(
    ("error", "kind"),
    [(WeightMismatchError("other weights"), RunError), (EngineError("given up"), EngineError)],
)
async def test_what_ends_the_engine_ends_calls_elsewhere_too(w: Any, error: Any, kind: Any) -> None:
    call = asyncio.ensure_future(w.generate(ENDLESS, 400))
    await asyncio.sleep(1.0)
    w.router.fail(error)
    with pytest.raises(kind, match=str(error)) as raised:
        await call
    assert type(raised.value) is type(error)


@far_away
async def test_weights_are_not_to_be_had_there(w: Any) -> None:
    with pytest.raises(EngineError, match=r"Type|type rollout\.num_workers=0"):
        await w.engine.publish_weights(1, {})
