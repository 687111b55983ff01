"""What an update counted: over micro-batches, without updates left out, and over ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl_cli.train.data.packing import MicroBatch, build_micro_batch
from agentrl_cli.train.data.samples import Sample, build_scoring_sample
from agentrl_cli.train.loss.gae import ValueLoss
from agentrl_cli.train.loss.policy_loss import LossOutput
from agentrl_cli.train.monitor.update_metrics import UpdateMetrics
from agentrl_cli.train.ranks import SINGLE


def sample(*versions: int) -> Sample:
    """One token of prompt, and a target for each version that sampled one."""
    built = build_scoring_sample([1] * (len(versions) + 1), 1, temperature=1.0, top_p=1.0)
    targets = dataclasses.replace(built.targets, versions=torch.tensor(versions))
    return dataclasses.replace(built, targets=targets)


def batch_of(num_targets: int) -> MicroBatch:
    return build_micro_batch([sample(*[0] * num_targets)], torch.device("cpu"))


def output(loss: float, sums: float, largest: float) -> LossOutput:
    """Every sum is ``sums``, that of squares 4 x as much, every maximum ``largest``."""
    names = ("approx_kl", "clipfrac", "kl", "logprob_gap", "importance_weight")
    return LossOutput(
        torch.tensor(loss, requires_grad=True),
        {name: torch.tensor(sums) for name in (*names, "importance_weight_clipped")}
        | {"importance_weight_squared": torch.tensor(4 * sums)},
        {name: torch.tensor(largest) for name in ("logprob_gap", "importance_weight")},
    )


def entropies(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


def filled() -> UpdateMetrics:
    """Two updates of 1 + 2 and 1 targets, passed forward as 2 + 3 and 2 tokens."""
    metrics = UpdateMetrics([sample(3, 3, 1), sample(3)], 3)
    metrics.add_micro_batch(batch_of(1), output(0.5, 2.0, 7.0), entropies(1.0))
    metrics.add_micro_batch(batch_of(2), output(0.25, 4.0, 3.0), entropies(2.0, 0.5))
    metrics.add_update(2.0)
    metrics.add_micro_batch(batch_of(1), output(-0.25, 2.0, 5.0), entropies(0.5))
    metrics.add_update(4.0)
    return metrics


#: Sums of 8 over 4 targets, entropies of 4; losses 0.75 and -0.25; norms 2 and 4. Weights 8 and
#: squares 32, as of 4, 4, 0, 0: 8² / (4 x 32). One of four tokens is 2 versions old.
EXPECTED = {
    "approx_kl": 2.0, "clipfrac": 2.0, "kl": 2.0, "entropy": 1.0, "loss": 0.25, "grad_norm": 3.0,
    "logprob_gap_mean": 2.0, "logprob_gap_max": 7.0, "importance_weight_mean": 2.0,
    "importance_weight_max": 7.0, "importance_weight_clipfrac": 2.0, "effective_sample_size": 0.5,
    "token_age_mean": 0.5, "token_age_max": 2.0, "off_policy_fraction": 0.25,
    "num_samples": 2.0, "num_micro_batches": 3.0, "num_updates": 2.0,
    "num_skipped_updates": 0.0, "train_tokens": 7.0,
}  # fmt: skip


def test_by_hand():
    metrics = filled()
    metrics.add_ranks(SINGLE)
    assert metrics.summarize() == EXPECTED


def test_an_update_that_is_left_out_counts_nowhere():
    metrics = filled()
    metrics.add_micro_batch(batch_of(1), output(torch.nan, torch.nan, 99.0), entropies(9.0))
    metrics.skip_update()
    metrics.add_critic_micro_batch(
        batch_of(1), ValueLoss(torch.tensor(torch.nan), torch.tensor(1.0))
    )
    metrics.skip_update()
    assert metrics.summarize() == EXPECTED | {"num_skipped_updates": 2.0}


def test_the_critics_numbers_are_over_its_own_updates():
    metrics = filled()
    for loss, num_clipped, num_targets, norm in [(3.0, 1.0, 3, 6.0), (1.0, 0.0, 1, 2.0)]:
        value_loss = ValueLoss(torch.tensor(loss), torch.tensor(num_clipped))
        metrics.add_critic_micro_batch(batch_of(num_targets), value_loss)
        metrics.add_critic_update(norm, 0.125)
    assert metrics.summarize() == EXPECTED | {
        "value_loss": 2.0,
        "value_clipfrac": 0.25,
        "critic_grad_norm": 4.0,
        "critic_learning_rate": 0.125,
    }


def test_nothing_trained_is_0():
    metrics = UpdateMetrics([], 3).summarize()
    assert set(metrics) == set(EXPECTED)
    assert set(metrics.values()) == {0.0}


class TwoRanks:
    """The other rank counted the same, but that its largest values are 100."""

    index, count = 0, 2

    def gather_objects(self, value: Any) -> list[Any]:
        sums, maxima = value
        return [value, [sums, dict.fromkeys(maxima, 100.0)]]


def test_ranks_add_up():
    metrics = filled()
    metrics.add_ranks(TwoRanks())  # type: ignore[arg-type]
    found = metrics.summarize()
    # Means are over twice as many targets; a loss is the sum of the ranks' parts.
    expected = EXPECTED | {
        "loss": 0.5,
        "logprob_gap_max": 100.0,
        "importance_weight_max": 100.0,
        "num_micro_batches": 6.0,
        "train_tokens": 14.0,
    }
    assert found == pytest.approx(expected)
