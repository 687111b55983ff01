"""Salts, which keep the caches of different weights apart."""

from __future__ import annotations

import asyncio

from agentrl_cli.engine.vllm_weights import WeightState


def test_calls_share_their_cache_while_the_weights_stay() -> None:
    weights = WeightState()
    assert weights.make_salt() == weights.make_salt()


def test_no_salt_outlives_a_change_of_the_weights() -> None:
    weights = WeightState()
    salts = [{weights.make_salt()}]
    for _ in range(3):
        weights.begin_change()
        # Sent while the weights are replaced: may be half old and half new, each for itself.
        during = {weights.make_salt(), weights.make_salt()}
        assert len(during) == 2
        salts.append(during)
        weights.end_change()
        salts.append({weights.make_salt()})
    assert len(set.union(*salts)) == sum(map(len, salts))


def test_two_clients_share_nothing() -> None:
    """A trainer that resumes publishes the same version again, with other weights maybe."""
    assert WeightState().make_salt() != WeightState().make_salt()


async def test_waiting_lasts_as_long_as_the_change() -> None:
    weights = WeightState()
    await asyncio.wait_for(weights.wait_settled(), 1)
    weights.begin_change()
    waiting = asyncio.create_task(weights.wait_settled())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    weights.end_change()
    await asyncio.wait_for(waiting, 1)
