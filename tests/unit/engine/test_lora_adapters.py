"""Which adapter calls ask for, and which nobody uses any more."""

from __future__ import annotations

from contextlib import suppress

from agentrl_cli.engine.lora_adapters import LoraAdapter, LoraAdapters


def test_no_name_is_given_twice() -> None:
    """A trainer that resumes loads the same version again, with other weights maybe."""
    adapters = LoraAdapters()
    names = [adapters.name_next(1) for _ in range(5)] + [LoraAdapters().name_next(1)]
    assert len(set(names)) == 6


def test_calls_without_an_adapter_are_counted() -> None:
    adapters = LoraAdapters()
    with adapters.hold() as first:
        adapters.current = LoraAdapter(adapters.name_next(1), 1)
        with adapters.hold() as second:
            assert (first, second) == (None, adapters.current)
            assert adapters.num_base_calls == 1
    assert adapters.num_base_calls == 0


def test_an_adapter_is_dropped_when_the_last_call_has_left_it() -> None:
    """Also by failing."""
    adapters = LoraAdapters()
    old = adapters.current = LoraAdapter(adapters.name_next(1), 1)
    left_behind = LoraAdapters().name_next(1)
    with suppress(RuntimeError), adapters.hold() as first, adapters.hold() as second:
        assert first == second == old
        new = adapters.current = LoraAdapter(adapters.name_next(2), 2)
        loaded = ["the-model", left_behind, old.name, new.name]
        assert adapters.find_unused(loaded) == [left_behind]
        raise RuntimeError
    assert adapters.find_unused(loaded) == [left_behind, old.name]
