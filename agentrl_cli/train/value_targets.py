"""From the critic's values to the advantages of samples, and to what the critic learns."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl_cli.config.advantage import GaeAdvantageConfig
from agentrl_cli.errors import NotFiniteError
from agentrl_cli.records import Trajectory
from agentrl_cli.train.gae import GaeFactors, compute_gae, normalize_advantages
from agentrl_cli.train.packing import MicroBatch
from agentrl_cli.train.samples import Sample
from agentrl_cli.train.value_loss import compute_explained_variance


@dataclass(frozen=True, slots=True)
class ValueTargets:
    """What stays fixed for the critic during a step: float32 [targets] by ``id(sample)``."""

    values: Mapping[int, Tensor]
    """The critic's, from before the step's first update."""
    returns: Mapping[int, Tensor]
    """What they should have been: value + advantage, before advantages are normalized."""

    def join(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Values and returns of the micro-batch's targets, on its device."""
        device = batch.input_ids.device
        return (
            torch.cat([self.values[id(s)] for s in batch.samples]).to(device),
            torch.cat([self.returns[id(s)] for s in batch.samples]).to(device),
        )

    def summarize(self) -> dict[str, float]:
        """``value_mean``, ``return_mean`` and ``explained_variance`` over all targets; those
        that nothing is known of are missing."""
        if not self.values:
            return {}
        values = torch.cat(list(self.values.values()))
        returns = torch.cat(list(self.returns.values()))
        summary = {"value_mean": float(values.mean()), "return_mean": float(returns.mean())}
        explained = compute_explained_variance(values, returns)
        return summary if explained is None else summary | {"explained_variance": explained}


def assign_gae(
    trajectories: Sequence[Trajectory],
    samples: Sequence[Sample],
    values: Mapping[int, Tensor],
    config: GaeAdvantageConfig,
    turn_discount: float,
) -> tuple[list[Sample], ValueTargets]:
    """The samples with the advantages of their tokens, and what the critic learns from them.

    Args:
        trajectories: those that ``samples`` were built from, penalties taken off their returns.
        samples: of the whole batch: advantages are normalized over all of their targets.
        values: the critic's, float32 [targets] by ``id(sample)``.
        config: how far credit reaches.
        turn_discount: ``rollout.turn_discount``.

    Raises:
        NotFiniteError: a value is not finite.
    """
    _check_values(samples, values)
    factors = GaeFactors(
        gae_lambda=config.gae_lambda, discount=config.discount, turn_discount=turn_discount
    )
    of_turns: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
    for sample in samples:
        for turn in sample.turns:
            own = values[id(sample)][turn.start : turn.end]
            of_turns[sample.trajectory_index][turn.interaction_id] = own
    credited = {
        index: compute_gae(trajectories[index].interactions, turns, factors)
        for index, turns in of_turns.items()
    }
    raw = [_gather_turns(sample, credited[sample.trajectory_index]) for sample in samples]
    advantages = _normalize(raw) if config.normalization == "batch" else raw
    assigned = [
        dataclasses.replace(s, targets=dataclasses.replace(s.targets, advantages=advantage))
        for s, advantage in zip(samples, advantages, strict=True)
    ]
    old = {id(new): values[id(s)] for new, s in zip(assigned, samples, strict=True)}
    returns = {id(new): old[id(new)] + own for new, own in zip(assigned, raw, strict=True)}
    return assigned, ValueTargets(old, returns)


def _check_values(samples: Sequence[Sample], values: Mapping[int, Tensor]) -> None:
    for sample in samples:
        if not torch.isfinite(values[id(sample)]).all():
            raise NotFiniteError(
                f"trajectory {sample.trajectory_id}: the critic gives values that are not finite. "
                "Its updates were, so the model or checkpoint that it began with is damaged. Take "
                "another one, with train.critic.path=FOLDER trial_name=NAME"
            )


def _gather_turns(sample: Sample, advantages: Mapping[str, Tensor]) -> Tensor:
    """The advantages of a sample's targets; a turn without targets has none."""
    parts = [advantages[t.interaction_id] for t in sample.turns if t.end > t.start]
    return torch.cat(parts) if parts else torch.zeros(0)


def _normalize(advantages: Sequence[Tensor]) -> list[Tensor]:
    if not advantages:
        return []
    normalized = normalize_advantages(torch.cat(list(advantages)))
    return list(torch.split(normalized, [len(own) for own in advantages]))
