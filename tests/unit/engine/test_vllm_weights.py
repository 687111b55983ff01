"""Salts and adapters, which keep the caches and calls of different weights apart."""

from __future__ import annotations

import asyncio

import pytest

from agentrl_cli.engine.vllm_weights import Adapter, WeightState


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
    assert WeightState().name_adapter(3) != WeightState().name_adapter(3)


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


def test_an_adapter_is_dropped_when_the_last_call_has_left_it() -> None:
    weights = WeightState()
    old = weights.adapter = Adapter(weights.name_adapter(1), 1)
    left_behind = WeightState().name_adapter(1)
    with weights.use_adapter() as first, weights.use_adapter() as second:
        assert first == second == old
        new = weights.adapter = Adapter(weights.name_adapter(2), 2)
        loaded = ["the-model", left_behind, old.name, new.name]
        assert weights.find_unused(loaded) == [left_behind]
    assert weights.find_unused(loaded) == [left_behind, old.name]


def test_an_adapter_is_free_again_after_a_call_that_failed() -> None:
    weights = WeightState()
    old = weights.adapter = Adapter(weights.name_adapter(1), 1)
    with pytest.raises(RuntimeError), weights.use_adapter():
        raise RuntimeError
    weights.adapter = Adapter(weights.name_adapter(2), 2)
    assert weights.find_unused([old.name]) == [old.name]


def test_names_of_adapters_never_come_twice() -> None:
    weights = WeightState()
    assert len({weights.name_adapter(1) for _ in range(5)}) == 5
    with weights.use_adapter() as adapter:
        assert adapter is None
