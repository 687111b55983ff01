"""Generalized advantage estimation (GAE) through the turns of a conversation tree.

The actions are the trained tokens; what lies between two turns (a tool's result, the next
prompt) is not an action and is skipped: the last token of a turn is followed by the first of its
successor. Successors are the same as for returns: where a turn has several children, what follows
it is their mean; a leaf without a reward hands over to the interaction that started after it
ended. With successors s of a turn's last token t, and otherwise the next token as the only one
(arXiv 1506.02438, equations 11 and 16):

    delta_t = r_t + d_t * mean over s of V_s  -  V_t
    A_t     = delta_t + d_t * gae_lambda * mean over s of A_s

- ``d_t`` is ``discount`` for every action, times ``turn_discount`` for the last of a turn. So the
  two act together: ``discount`` counts tokens, ``turn_discount`` turns. Tool and prompt tokens
  count nowhere, however many there are.
- ``r_t`` is 0 except at the last token of a turn, where the whole turn's reward enters: its return
  minus ``turn_discount`` x the mean of its successors' returns. So whatever made the returns (a
  workflow's own credit, a penalty taken off them), they are what is estimated: with ``gae_lambda``
  and ``discount`` 1, A_t + V_t is the turn's return for every token, whatever the critic says.
- A turn without trained tokens (greedy, no token ids) is not an action: its reward and what follows
  it pass through, times ``turn_discount`` alone.
- Where nothing follows, the trajectory is over: V and A are 0 there, even if a budget ended it, as
  its reward is for what was done by then. There is no padding.

A shared turn is trained in one sample, but receives credit from all of its branches: credit follows
the tree, not the samples. Each turn has its advantages once.

Example: turn 1 samples tokens a, b with values 0.5, 0.6; a tool answers with 100 tokens; turn 2
samples c with value 0.8 and earns reward 1. ``discount`` 1, ``gae_lambda`` 0.5, ``turn_discount``
0.9, and so returns 0.9 (turn 1) and 1 (turn 2), rewards 0.9 - 0.9 x 1 = 0 and 1:

    A_c = 1 - 0.8                                 = 0.2
    A_b = (0 + 0.9 x 0.8 - 0.6) + 0.9 x 0.5 x 0.2 = 0.12 + 0.09 = 0.21
    A_a = (0 + 0.6 - 0.5) + 0.5 x 0.21            = 0.1 + 0.105 = 0.205
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl_cli.config.algorithm_config import GaeAdvantageConfig
from agentrl_cli.errors import NotFiniteError
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.scores import EQUAL_SCORES_TOLERANCE
from agentrl_cli.tracking.credit import find_successors
from agentrl_cli.train.data.packing import MicroBatch
from agentrl_cli.train.data.samples import Sample
from agentrl_cli.train.loss.advantages import DEVIATION_EPSILON
from agentrl_cli.train.loss.value_loss import compute_explained_variance


@dataclass(frozen=True, slots=True, kw_only=True)
class GaeFactors:
    """How far credit reaches."""

    gae_lambda: float
    """Of each action: 1 trusts the rewards alone, 0 the critic's value of what follows."""
    discount: float
    """Of each action."""
    turn_discount: float
    """Of each turn."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """V and A of what follows an action, 0 at the end of a trajectory."""

    value: float = 0.0
    advantage: float = 0.0


def compute_turn_advantages(
    values: Sequence[float], reward: float, outlook: Outlook, factors: GaeFactors
) -> list[float]:
    """The advantage of each trained token of one turn.

    Args:
        values: the critic's, of the state that each token was sampled in.
        reward: the turn's own; it enters at the last token.
        outlook: on what follows the turn.
        factors: see above.
    """
    discount = factors.discount * factors.turn_discount
    advantages = [0.0] * len(values)
    next_value, next_advantage = outlook.value, outlook.advantage
    for position in reversed(range(len(values))):
        value = values[position]
        delta = reward + discount * next_value - value
        advantages[position] = delta + discount * factors.gae_lambda * next_advantage
        next_value, next_advantage = value, advantages[position]
        reward, discount = 0.0, factors.discount
    return advantages


def compute_gae(
    interactions: Iterable[Interaction], values: Mapping[str, Tensor], factors: GaeFactors
) -> dict[str, Tensor]:
    """The advantages of the trained tokens of one trajectory, float32 [tokens], by interaction id.

    Args:
        interactions: the trajectory's.
        values: of the trained tokens of each interaction, [tokens], by its id; interactions
            without any are not trained.
        factors: see above.

    Raises:
        ValueError: ``values`` of an interaction that did not complete.
    """
    interactions = tuple(interactions)
    successors = find_successors(interactions)
    strangers = values.keys() - successors.keys()
    if strangers:
        raise ValueError(f"values of interactions that did not complete: {sorted(strangers)}")
    rewards = _compute_turn_rewards(interactions, successors, factors.turn_discount)
    first: dict[str, Outlook] = {}
    advantages: dict[str, Tensor] = {}
    for name, following in successors.items():
        outlook = _average([first[s] for s in following])
        own = values[name].tolist() if name in values else []
        if not own:
            first[name] = Outlook(
                rewards[name] + factors.turn_discount * outlook.value,
                factors.turn_discount * outlook.advantage,
            )
            continue
        computed = compute_turn_advantages(own, rewards[name], outlook, factors)
        first[name] = Outlook(own[0], computed[0])
        advantages[name] = torch.tensor(computed, dtype=torch.float32)
    return advantages


def normalize_advantages(advantages: Tensor) -> Tensor:
    """The same with mean 0 and unbiased deviation 1 (float32 [tokens]); exactly 0 where all are
    equal, and for a single one."""
    exact = advantages.double()
    if exact.numel() < 2:
        return torch.zeros_like(advantages)
    spread = exact.max() - exact.min()
    if spread <= EQUAL_SCORES_TOLERANCE * exact.abs().max():
        return torch.zeros_like(advantages)
    return ((exact - exact.mean()) / (exact.std() + DEVIATION_EPSILON)).to(advantages.dtype)


def _compute_turn_rewards(
    interactions: Iterable[Interaction],
    successors: Mapping[str, tuple[str, ...]],
    turn_discount: float,
) -> dict[str, float]:
    """What each turn adds to its return by itself; its own reward where it has no return."""
    by_id = {i.id: i for i in interactions}
    returns: dict[str, float] = {}
    rewards: dict[str, float] = {}
    for name, following in successors.items():
        later = sum(returns[s] for s in following) / len(following) if following else 0.0
        interaction = by_id[name]
        if interaction.turn_return is None:
            rewards[name] = interaction.reward or 0.0
            returns[name] = rewards[name] + turn_discount * later
        else:
            returns[name] = interaction.turn_return
            rewards[name] = returns[name] - turn_discount * later
    return rewards


def _average(outlooks: Sequence[Outlook]) -> Outlook:
    if not outlooks:
        return Outlook()
    return Outlook(
        sum(o.value for o in outlooks) / len(outlooks),
        sum(o.advantage for o in outlooks) / len(outlooks),
    )


@dataclass(frozen=True, slots=True)
class ValueTargets:
    """What stays fixed for the critic during a step: float32 [targets] by ``id(sample)``."""

    values: Mapping[int, Tensor]
    """The critic's, from before the step's first update."""
    returns: Mapping[int, Tensor]
    """What they should have been: value + advantage, before advantages are normalized."""

    def join(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Values and returns of the micro-batch's targets, on its device."""
        return batch.join(self.values), batch.join(self.returns)

    def summarize(self) -> dict[str, float]:
        """``value_mean``, ``return_mean`` and ``explained_variance`` over all targets, as far as
        they are defined."""
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
        trajectories: those that ``samples`` were built from, with penalties subtracted.
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
    advantages: Sequence[Tensor] = raw
    if config.normalization == "batch":
        normalized = normalize_advantages(torch.cat([torch.zeros(0), *raw]))
        advantages = torch.split(normalized, [len(own) for own in raw])
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
                "Its updates were, so the model or checkpoint that it started from is damaged. "
                "Take another one, with train.critic.path=FOLDER trial_name=NAME"
            )


def _gather_turns(sample: Sample, advantages: Mapping[str, Tensor]) -> Tensor:
    """The advantages of a sample's targets; a turn without targets has none."""
    parts = [advantages[t.interaction_id] for t in sample.turns if t.end > t.start]
    return torch.cat([torch.zeros(0), *parts])
