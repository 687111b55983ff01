"""A batch divided into minibatches, one optimizer update each, with their denominators."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.records import Trajectory
from agentrl_cli.scores import compute_score
from agentrl_cli.train.aggregation import compute_token_weights
from agentrl_cli.train.samples import Sample


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The samples of some whole groups, and what each of their tokens counts in the loss."""

    samples: tuple[Sample, ...]
    token_weights: dict[int, float]
    """By ``id(sample)``."""


def build_minibatches(
    trajectories: Sequence[Trajectory],
    samples: Sequence[Sample],
    config: ExperimentConfig,
    shuffle_key: str,
) -> list[Minibatch]:
    """``train.num_minibatches`` minibatches of whole groups (fewer when groups are fewer).

    The groups are shuffled from ``seed`` and ``shuffle_key``. Denominators count the scored
    trajectories and their trained tokens, those with advantage 0 included.
    """
    groups: defaultdict[str, set[int]] = defaultdict(set)
    for index, trajectory in enumerate(trajectories):
        if compute_score(trajectory) is not None:
            groups[trajectory.group_id].add(index)
    order = list(groups.values())
    random.Random(f"{config.seed}/{shuffle_key}").shuffle(order)
    count = min(config.train.num_minibatches, len(order))
    return [
        _build_minibatch(samples, set().union(*order[first::count]), config)
        for first in range(count)
    ]


def _build_minibatch(
    samples: Sequence[Sample], indices: set[int], config: ExperimentConfig
) -> Minibatch:
    chosen = tuple(s for s in samples if s.trajectory_index in indices)
    algorithm = config.train.algorithm
    weights = compute_token_weights(
        algorithm.aggregation,
        chosen,
        len(indices),
        algorithm.constant_denominator or config.gconfig.max_tokens,
    )
    return Minibatch(chosen, weights)
