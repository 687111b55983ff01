"""The process's global generators: seeded once, saved with a checkpoint, and put back.

Nothing of agentrl draws from them: samples and orders have seeds of their own. Agents, tools
and rewards that run in the trainer's process may.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_generators(seed: int) -> None:
    """Seeds the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def collect_random_states() -> dict[str, Tensor]:
    """The states of all generators, as tensors by name."""
    _, words, gauss = random.getstate()
    states = {"cpu": torch.get_rng_state(), "python": torch.tensor(words, dtype=torch.int64)}
    if gauss is not None:
        states["python_gauss"] = torch.tensor([gauss], dtype=torch.float64)
    numpy_state: Any = np.random.get_state(legacy=False)
    if numpy_state["bit_generator"] == "MT19937":
        key = numpy_state["state"]["key"].astype(np.int64).tolist()
        words = [*key, numpy_state["state"]["pos"], numpy_state["has_gauss"]]
        states["numpy"] = torch.tensor(words, dtype=torch.int64)
        states["numpy_gauss"] = torch.tensor([numpy_state["gauss"]], dtype=torch.float64)
    if torch.cuda.is_available():
        states |= {f"cuda:{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_random_states(states: Mapping[str, Tensor]) -> None:
    """Puts back what :func:`collect_random_states` gave; a generator that is not in it stays."""
    torch.set_rng_state(states["cpu"])
    if "python" in states:
        gauss = states.get("python_gauss")
        words = tuple(states["python"].tolist())
        random.setstate((3, words, None if gauss is None else gauss.item()))
    if "numpy" in states:
        *key, position, has_gauss = states["numpy"].tolist()
        cached = float(states["numpy_gauss"].item())
        np.random.set_state(
            ("MT19937", np.array(key, dtype=np.uint32), position, has_gauss, cached)
        )
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{index}"], index)
