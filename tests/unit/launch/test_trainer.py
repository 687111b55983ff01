"""What lives as long as the process is left alone by the garbage collector, for a while."""

from __future__ import annotations

import gc
import weakref

import pytest

from agentrl_cli.rollout.background_loop import frozen_heap


class Knot:
    """Refers to itself: only the garbage collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.slow
def test_old_objects_are_not_searched_and_new_ones_are() -> None:
    old = Knot()
    old_is_there = weakref.ref(old)
    with frozen_heap():
        new = Knot()
        new_is_there = weakref.ref(new)
        del old, new
        gc.collect()
        assert old_is_there() is not None
        assert new_is_there() is None
    gc.collect()
    assert old_is_there() is None


def test_an_error_in_the_block_ends_it_too() -> None:
    num_before = gc.get_freeze_count()
    with pytest.raises(ValueError, match="of the block"), frozen_heap():
        raise ValueError(f"of the block, in which {gc.get_freeze_count()} objects are frozen")
    assert gc.get_freeze_count() == num_before
