"""A garbage collector that leaves alone what lives as long as the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """A block inside which objects that existed before it are not searched for garbage.

    Torch and transformers leave a million objects behind. Searching them stops the process for
    250 ms, and calls passing through it make Python do so every few hundred calls: at 256
    sessions that was half of the CPU time of gateway and router.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        # What is frozen at the exit of the interpreter is reported as leaked by some libraries.
        gc.unfreeze()
