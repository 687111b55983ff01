"""Penalties that are subtracted from the rewards of trajectories before advantages are computed."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from agentrl_cli.config.algorithm_config import KlConfig, OverlongConfig
from agentrl_cli.errors import RunError
from agentrl_cli.records import Trajectory
from agentrl_cli.scores import compute_score
from agentrl_cli.train.data.samples import Sample
from agentrl_cli.train.loss.policy_loss import compute_kl


@dataclass(slots=True)
class Penalties:
    """The penalties of a batch, summed over their kinds."""

    num_trajectories: int
    amounts: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """By trajectory index."""
    means: dict[str, float] = field(default_factory=dict)
    """The metrics ``<kind>_penalty_mean``, over all trajectories, and ``kl``, over all tokens."""

    def add(self, kind: str, amounts: Mapping[int, float]) -> None:
        """Adds the penalties of one kind, by trajectory index."""
        for index, amount in amounts.items():
            self.amounts[index] += amount
        self.means[f"{kind}_penalty_mean"] = math.fsum(amounts.values()) / self.num_trajectories

    def add_kl(
        self, samples: Sequence[Sample], ref_logprobs: Mapping[int, Tensor], config: KlConfig
    ) -> None:
        """Adds :func:`compute_kl_penalties`; the metric ``kl`` is their estimate per token."""
        amounts = compute_kl_penalties(samples, ref_logprobs, config)
        self.add("kl", amounts)
        num_targets = sum(sample.num_targets for sample in samples)
        self.means["kl"] = math.fsum(amounts.values()) / (config.coef * max(num_targets, 1))


def compute_overlong_penalty(num_tokens: int, config: OverlongConfig, max_tokens: int) -> float:
    """The penalty for ``num_tokens`` sampled tokens: the soft overlong punishment of DAPO (arXiv
    2503.14476, equation 13).

    0 up to ``max_tokens - buffer_tokens``, ``coef`` from ``max_tokens`` on, linear between.
    """
    excess = num_tokens - (max_tokens - config.buffer_tokens)
    return config.coef * min(max(excess / config.buffer_tokens, 0.0), 1.0)


def compute_overlong_penalties(
    trajectories: Sequence[Trajectory], config: OverlongConfig, max_tokens: int
) -> dict[int, float]:
    """The penalty of every scored trajectory, by its index, over the tokens of all its calls.

    ``max_tokens`` is the limit where ``config`` gives none.
    """
    limit = config.max_tokens or max_tokens
    return {
        index: compute_overlong_penalty(trajectory.num_completion_tokens, config, limit)
        for index, trajectory in enumerate(trajectories)
        if compute_score(trajectory) is not None
    }


def compute_kl_penalties(
    samples: Sequence[Sample], ref_logprobs: Mapping[int, Tensor], config: KlConfig
) -> dict[int, float]:
    """coef x the divergence of what each trajectory sampled, by trajectory index.

    The sum of the estimates over its trained tokens, of the policy that sampled them: the reward
    of RLHF (arXiv 2203.02155, equation 2), as RLOO keeps it (arXiv 2402.14740).

    Args:
        samples: of the whole batch.
        ref_logprobs: [targets] by ``id(sample)``.
        config: coefficient and estimator.

    Raises:
        RunError: a penalty is not finite.
    """
    penalties: defaultdict[int, float] = defaultdict(float)
    for sample in samples:
        rollout = sample.targets.rollout_logprobs
        kl = compute_kl(config.estimator, rollout, ref_logprobs[id(sample)])
        penalties[sample.trajectory_index] += config.coef * float(kl.double().sum())
        if not math.isfinite(penalties[sample.trajectory_index]):
            raise RunError(
                f"trajectory {sample.trajectory_id}: its divergence from the reference model is "
                f"{float(kl.sum())} nats. The weights were not changed. Look at it with: "
                "agentrl inspect-trajectories RUN. model.dtype=float32 often helps"
            )
    return dict(penalties)


def reduce_rewards(
    trajectories: Sequence[Trajectory], penalties: Mapping[int, float]
) -> list[Trajectory]:
    """The trajectories with ``penalties``, by trajectory index, subtracted from their rewards.

    Every interaction that has a return loses the whole penalty: it is part of the outcome, which
    every turn carries. Rewards of single turns stay as they are: whether a turn has one decides
    whose credit it shares, and advantages are computed from returns.
    """
    reduced = list(trajectories)
    for index, penalty in penalties.items():
        trajectory = trajectories[index]
        if penalty == 0.0 or trajectory.reward is None:
            continue
        reduced[index] = dataclasses.replace(
            trajectory,
            reward=trajectory.reward - penalty,
            interactions=tuple(
                i
                if i.turn_return is None
                else dataclasses.replace(i, turn_return=i.turn_return - penalty)
                for i in trajectory.interactions
            ),
        )
    return reduced
