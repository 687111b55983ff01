"""The metrics of one update, added up over its micro-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl_cli.train.data.packing import MicroBatch
from agentrl_cli.train.data.samples import Sample
from agentrl_cli.train.loss.gae import ValueLoss
from agentrl_cli.train.loss.policy_loss import LossOutput
from agentrl_cli.train.ranks import Ranks


class UpdateMetrics:
    """Collects what happens in an update; every mean is over the tokens passed forward."""

    def __init__(self, samples: Sequence[Sample], policy_version: int) -> None:
        self._num_samples = len(samples)
        self._ages = _summarize_ages(samples, policy_version)
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._maxima: defaultdict[str, float] = defaultdict(float)
        self._grad_norms: list[float] = []
        self._critic_grad_norms: list[float] = []
        self._critic_learning_rate = 0.0
        self._num_skipped_updates = 0
        self.begin_update()

    def begin_update(self) -> None:
        """Starts counting for the next update."""
        self._before = (self._sums.copy(), self._maxima.copy())

    def skip_update(self) -> None:
        """Counts an update that was skipped, and drops what was counted for it."""
        self._sums, self._maxima = self._before
        self._num_skipped_updates += 1
        self.begin_update()

    def add_micro_batch(self, batch: MicroBatch, output: LossOutput, entropies: Tensor) -> None:
        """Counts one micro-batch."""
        for name, value in output.sums.items():
            self._sums[name] += float(value)
        self._sums["entropy"] += float(entropies.detach().sum())
        self._sums["loss"] += float(output.loss.detach())
        self._sums["scored_tokens"] += len(batch.targets)
        self._sums["num_micro_batches"] += 1
        self._sums["train_tokens"] += batch.num_tokens
        for name, value in output.maxima.items():
            self._maxima[name] = max(self._maxima[name], float(value))

    def add_update(self, grad_norm: float) -> None:
        """Counts one optimizer update; ``grad_norm`` is before clipping."""
        self._grad_norms.append(grad_norm)
        self.begin_update()

    def add_critic_micro_batch(self, batch: MicroBatch, output: ValueLoss) -> None:
        """Counts one micro-batch of the critic."""
        self._sums["value_loss"] += float(output.loss.detach())
        self._sums["value_clipped"] += float(output.num_clipped)
        self._sums["valued_tokens"] += len(batch.targets)

    def add_critic_update(self, grad_norm: float, learning_rate: float) -> None:
        """Counts one update of the critic; ``grad_norm`` is before clipping."""
        self._critic_grad_norms.append(grad_norm)
        self._critic_learning_rate = learning_rate
        self.begin_update()

    def add_ranks(self, ranks: Ranks) -> None:
        """Adds what the other ranks have counted; updates are the same for all."""
        parts = ranks.gather_objects([self._sums, self._maxima])
        self._sums, self._maxima = defaultdict(float), defaultdict(float)
        for sums, maxima in parts:
            for name, value in sums.items():
                self._sums[name] += value
            for name, value in maxima.items():
                self._maxima[name] = max(self._maxima[name], value)

    def summarize(self) -> dict[str, float]:
        """The metrics; means of nothing are 0.

        ``effective_sample_size`` is (sum w)² / (n x sum w²) over the n tokens passed forward; w are
        their importance weights within the bounds (Kish, Survey Sampling, 1965): a mean over them
        varies as one over this share of n tokens of equal weight does. 1: all weigh alike.
        """
        sums, num_updates = self._sums, len(self._grad_norms)
        num_tokens = max(sums["scored_tokens"], 1.0)
        weight, squared = sums["importance_weight"], sums["importance_weight_squared"]
        means = {
            name: sums[name] / num_tokens for name in ("approx_kl", "clipfrac", "kl", "entropy")
        }
        return {
            **means,
            **self._summarize_critic(),
            "loss": sums["loss"] / max(num_updates, 1),
            "grad_norm": sum(self._grad_norms) / max(num_updates, 1),
            "logprob_gap_mean": sums["logprob_gap"] / num_tokens,
            "logprob_gap_max": self._maxima["logprob_gap"],
            "importance_weight_mean": weight / num_tokens,
            "importance_weight_max": self._maxima["importance_weight"],
            "importance_weight_clipfrac": sums["importance_weight_clipped"] / num_tokens,
            "effective_sample_size": weight**2 / (num_tokens * squared) if squared else 0.0,
            **self._ages,
            "num_samples": float(self._num_samples),
            "num_micro_batches": sums["num_micro_batches"],
            "num_updates": float(num_updates),
            "num_skipped_updates": float(self._num_skipped_updates),
            "train_tokens": sums["train_tokens"],
        }

    def _summarize_critic(self) -> dict[str, float]:
        num_updates = len(self._critic_grad_norms)
        if num_updates == 0:
            return {}
        return {
            "value_loss": self._sums["value_loss"] / num_updates,
            "value_clipfrac": self._sums["value_clipped"] / max(self._sums["valued_tokens"], 1.0),
            "critic_grad_norm": sum(self._critic_grad_norms) / num_updates,
            "critic_learning_rate": self._critic_learning_rate,
        }


def _summarize_ages(samples: Sequence[Sample], policy_version: int) -> dict[str, float]:
    """How many policy versions before ``policy_version`` the trained tokens were sampled."""
    versions = [sample.targets.versions for sample in samples]
    ages = policy_version - torch.cat([*versions, torch.empty(0, dtype=torch.long)])
    count = max(ages.numel(), 1)
    return {
        "token_age_mean": float(ages.sum()) / count,
        "token_age_max": float(ages.max()) if ages.numel() else 0.0,
        "off_policy_fraction": float((ages != 0).sum()) / count,
    }
