"""Plain English words for the examples' tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

ANIMALS = (
    "ant", "bat", "bear", "bee", "bird", "camel", "cat", "cow", "crab", "deer", "dog", "duck",
    "eagle", "fish", "fox", "frog", "goat", "hen", "horse", "lion", "mouse", "owl", "pig",
    "rabbit", "sheep", "snake", "spider", "tiger", "turtle", "whale", "wolf", "zebra",
)  # fmt: skip
THINGS = (
    "bag", "ball", "bed", "bell", "book", "bottle", "bowl", "box", "bread", "bus", "chair",
    "clock", "coat", "cup", "desk", "door", "egg", "flag", "garden", "glass", "hat", "house",
    "key", "lamp", "leaf", "map", "milk", "moon", "nail", "paper", "pen", "plate", "ring",
    "river", "road", "rope", "salt", "ship", "shoe", "snow", "soap", "song", "spoon", "star",
    "stone", "sun", "table", "tent", "train", "tree", "wall", "water", "wheel", "window",
)  # fmt: skip


def is_held_out(words: Sequence[str], one_in: int = 8) -> bool:
    """Whether a task of these words belongs to the test split: by a hash, so that training and
    test never share one, whatever seed made it."""
    digest = hashlib.sha256(" ".join(words).encode()).digest()
    return digest[0] % one_in == 0
