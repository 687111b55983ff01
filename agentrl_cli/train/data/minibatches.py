"""Divides a batch into minibatches, one optimizer update each, with their denominators."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_cli.config.algorithm_config import Aggregation
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.records import Trajectory
from agentrl_cli.scores import compute_score
from agentrl_cli.train.data.samples import Sample


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The samples of some whole groups, and the weight of each of their tokens in the loss."""

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
    algorithm = config.train.algorithm
    constant = algorithm.constant_denominator or config.gconfig.max_tokens
    minibatches = []
    for first in range(count):
        indices = set().union(*order[first::count])
        chosen = tuple(s for s in samples if s.trajectory_index in indices)
        weights = compute_token_weights(algorithm.aggregation, chosen, len(indices), constant)
        minibatches.append(Minibatch(chosen, weights))
    return minibatches


def compute_token_weights(
    aggregation: Aggregation,
    samples: Sequence[Sample],
    num_trajectories: int,
    constant_denominator: float,
) -> dict[int, float]:
    """The weight of each of a sample's tokens, by ``id(sample)``.

    They are computed from the whole minibatch before it is cut into micro-batches or divided among
    processes, so that the weighted sums of all parts add up to its loss.

    Args:
        aggregation: ``token_mean``: every token alike, 1 / tokens (DAPO, arXiv 2503.14476,
            equation 8); ``sequence_mean``: every sample alike, 1 / (samples x its tokens);
            ``trajectory_mean``: every trajectory alike, 1 / (trajectories x its tokens), over
            all its samples (GRPO, arXiv 2402.03300, equation 3); ``constant``:
            1 / (trajectories x ``constant_denominator``) (Dr. GRPO, arXiv 2503.20783, section
            3.2).
        samples: all of the minibatch, those of advantage 0 included: their tokens stay in the
            denominators.
        num_trajectories: scored ones, those without a trained token included.
        constant_denominator: tokens, for ``constant``.
    """
    if aggregation == "token_mean":
        num_tokens = sum(sample.num_targets for sample in samples)
        return {id(sample): 1.0 / num_tokens for sample in samples}
    if aggregation == "sequence_mean":
        return {id(sample): 1.0 / (len(samples) * sample.num_targets) for sample in samples}
    if aggregation == "constant":
        return {id(sample): 1.0 / (num_trajectories * constant_denominator) for sample in samples}
    tokens: Counter[int] = Counter()
    for sample in samples:
        tokens[sample.trajectory_index] += sample.num_targets
    return {id(s): 1.0 / (num_trajectories * tokens[s.trajectory_index]) for s in samples}
