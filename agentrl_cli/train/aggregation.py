"""What each token's loss counts in the loss of a whole minibatch."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl_cli.config.algorithm import Aggregation
from agentrl_cli.train.samples import Sample


def compute_token_weights(
    aggregation: Aggregation,
    samples: Sequence[Sample],
    num_trajectories: int,
    constant_denominator: float,
) -> dict[int, float]:
    """The weight of each of a sample's tokens, by ``id(sample)``.

    They are made from the whole minibatch before it is cut into micro-batches or divided among
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
    tokens: dict[int, int] = {}
    for sample in samples:
        index = sample.trajectory_index
        tokens[index] = tokens.get(index, 0) + sample.num_targets
    return {
        id(sample): 1.0 / (num_trajectories * tokens[sample.trajectory_index]) for sample in samples
    }
