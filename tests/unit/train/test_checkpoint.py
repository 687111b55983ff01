"""The generators resume where they were, whatever was drawn in between."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from agentrl_cli.train.checkpoint import (
    collect_random_states,
    restore_random_states,
    seed_generators,
)


def draw() -> list[float]:
    # Normal numbers come in pairs, of which each generator keeps the second for later.
    return [
        random.random(),
        random.gauss(0.0, 1.0),
        float(np.random.random()),
        float(np.random.standard_normal()),
        float(torch.rand(())),
        float(torch.randn(())),
    ]


@pytest.fixture(autouse=True)
def leave_generators_as_they_were():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.mark.parametrize("num_drawn_before", [0, 1, 2])
def test_restored_generators_draw_what_they_would_have(num_drawn_before: int) -> None:
    seed_generators(5)
    for _ in range(num_drawn_before):
        draw()
    # As a file holds them.
    states = load(save(collect_random_states()))
    expected = [draw() for _ in range(3)]
    seed_generators(6)
    assert draw() != expected[0]
    restore_random_states(states)
    assert [draw() for _ in range(3)] == expected


def test_a_seed_gives_the_same_numbers_and_another_one_others() -> None:
    drawn = []
    for seed in (7, 7, 2**40 + 7):
        seed_generators(seed)
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[0][:2], drawn[2][:2], strict=True))
