"""Generalized advantage estimation (GAE) through the turns of a conversation tree, and the loss of
the critic that it takes its values from.

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
  minus ``turn_discount`` x the mean of its successors' returns. So the returns, whatever made them,
  are what is estimated: with ``gae_lambda`` and ``discount`` 1, A_t + V_t is the turn's return for
  every token, whatever the critic says.
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
from agentrl_cli.train.data.samples import Sample
from agentrl_cli.train.loss.advantages import DEVIATION_EPSILON


def compute_gae(
    interactions: Iterable[Interaction],
    values: Mapping[str, Tensor],
    config: GaeAdvantageConfig,
    turn_discount: float,
) -> dict[str, Tensor]:
    """The advantages of the trained tokens of one trajectory, float32 [tokens], by interaction id.

    ``values`` are of the trained tokens of each interaction, [tokens], by its id; interactions
    without any are not trained.

    Raises:
        ValueError: ``values`` of an interaction that did not complete.
    """
    by_id = {i.id: i for i in interactions}
    successors = find_successors(by_id.values())
    strangers = values.keys() - successors.keys()
    if strangers:
        raise ValueError(f"values of interactions that did not complete: {sorted(strangers)}")
    # Of each turn: its return, and V and A of its first token.
    begins: dict[str, tuple[float, float, float]] = {}
    found: dict[str, Tensor] = {}
    for name, following in successors.items():
        later, value, advantage = _average([begins[s] for s in following])
        reward, turn_return = by_id[name].reward or 0.0, by_id[name].turn_return
        if turn_return is None:
            turn_return = reward + turn_discount * later
        else:
            reward = turn_return - turn_discount * later
        own = values[name].tolist() if name in values else []
        if not own:
            value, advantage = reward + turn_discount * value, turn_discount * advantage
        discount = config.discount * turn_discount
        advantages = []
        for token_value in reversed(own):
            delta = reward + discount * value - token_value
            advantage = delta + discount * config.gae_lambda * advantage
            advantages.append(advantage)
            value, reward, discount = token_value, 0.0, config.discount
        begins[name] = (turn_return, value, advantage)
        if own:
            found[name] = torch.tensor(advantages[::-1], dtype=torch.float32)
    return found


def _average(begins: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Column by column; 0 at the end of a trajectory."""
    count = max(len(begins), 1)
    later, value, advantage = (sum(one[column] for one in begins) / count for column in range(3))
    return later, value, advantage


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


@dataclass(frozen=True, slots=True)
class ValueTargets:
    """What stays fixed for the critic during a step: float32 [targets] by ``id(sample)``."""

    values: Mapping[int, Tensor]
    """The critic's, from before the step's first update."""
    returns: Mapping[int, Tensor]
    """What they should have been: value + advantage, before advantages are normalized."""

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
    of_turns: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
    for sample in samples:
        own = values[id(sample)]
        if not torch.isfinite(own).all():
            raise NotFiniteError(
                f"trajectory {sample.trajectory_id}: the critic gives values that are not finite. "
                "Its updates were, so the model or checkpoint that it started from is damaged. "
                "Take another one, with train.critic.path=FOLDER trial_name=NAME"
            )
        for turn in sample.turns:
            of_turns[sample.trajectory_index][turn.interaction_id] = own[turn.start : turn.end]
    credited = {
        index: compute_gae(trajectories[index].interactions, turns, config, turn_discount)
        for index, turns in of_turns.items()
    }
    raw = []
    for sample in samples:
        of_turn = credited[sample.trajectory_index]
        # A turn without targets has no advantages.
        parts = [of_turn[t.interaction_id] for t in sample.turns if t.end > t.start]
        raw.append(torch.cat([torch.zeros(0), *parts]))
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


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """A part of a minibatch's value loss, and how many of its targets are clipped."""

    loss: Tensor
    """Scalar with gradient: the parts of a minibatch add up to its loss."""
    num_clipped: Tensor
    """Targets whose gradient the clip removes."""


def compute_value_loss(
    new_values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip_range: float | None,
    num_targets: int,
) -> ValueLoss:
    """The sum of max((V - R)², (clip(V, V_old ± clip_range) - R)²) / 2, over ``num_targets``.

    PPO's value loss (arXiv 1707.06347, equation 9) with the clip of its reference implementation
    (arXiv 2005.12729, section 3): a value that is farther than ``clip_range`` from the old one, on
    the side of its return, has no gradient.

    Args:
        new_values: the critic's, with gradient.
        old_values: from before the step's first update.
        returns: what values should be.
        clip_range: in units of the reward; None: no clip.
        num_targets: of the whole minibatch.
    """
    squares = (new_values - returns) ** 2
    if clip_range is None:
        return ValueLoss(squares.sum() / (2 * num_targets), squares.new_zeros(()))
    clipped = old_values + (new_values - old_values).clamp(-clip_range, clip_range)
    clipped_squares = (clipped - returns) ** 2
    num_clipped = (clipped_squares > squares).sum().float()
    larger = torch.maximum(squares, clipped_squares)
    return ValueLoss(larger.sum() / (2 * num_targets), num_clipped)


def compute_explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 one that knows nothing,
    below 0 a harmful one; None where returns do not vary."""
    if returns.numel() == 0:
        return None
    variance = returns.double().var(correction=0)
    if variance <= 1e-12 * returns.double().square().mean():
        return None
    residual = (returns.double() - values.double()).var(correction=0)
    return float(1.0 - residual / variance)
