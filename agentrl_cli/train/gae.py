"""Generalized advantage estimation (GAE) through the turns of a conversation tree.

The actions are the trained tokens; what lies between two turns (a tool's result, the next
prompt) is none and is skipped: the last token of a turn is followed by the first of its
successor. Successors are those of rule 4, as for returns: where a turn has several children, what
follows it is their mean; a leaf without a reward hands over to the interaction that started after
it ended. With successors s of a turn's last token t, and otherwise the next token as the only one
(arXiv 1506.02438, equations 11 and 16):

    delta_t = r_t + d_t * mean over s of V_s  -  V_t
    A_t     = delta_t + d_t * gae_lambda * mean over s of A_s

- ``d_t`` is ``discount`` for every action, times ``turn_discount`` for the last of a turn. So the
  two act together: ``discount`` counts tokens, ``turn_discount`` turns. Tool and prompt tokens
  count nowhere, however many there are.
- ``r_t`` is 0 but at the last token of a turn, where the whole turn's reward enters: its return
  less ``turn_discount`` x the mean of its successors' returns. So whatever made the returns (a
  workflow's own credit, a penalty taken off them), they are what is estimated: with ``gae_lambda``
  and ``discount`` 1, A_t + V_t is the turn's return for every token, whatever the critic says.
- A turn without trained tokens (greedy, no token ids) is no action: its reward and what follows
  it pass through, times ``turn_discount`` alone.
- Where nothing follows, the trajectory is over: V and A are 0 there, also where a budget ended
  it, as its reward is for what was done by then. Padding does not exist.

A shared turn is trained in one sample, but what it gave each of its branches comes back to it:
credit goes along the tree, not along samples. Each turn has its advantages once.

Example: turn 1 samples tokens a, b with values 0.5, 0.6; a tool answers with 100 tokens; turn 2
samples c with value 0.8 and earns reward 1. ``discount`` 1, ``gae_lambda`` 0.5, ``turn_discount``
0.9, and so returns 0.9 (turn 1) and 1 (turn 2), rewards 0.9 - 0.9 x 1 = 0 and 1:

    A_c = 1 - 0.8                                 = 0.2
    A_b = (0 + 0.9 x 0.8 - 0.6) + 0.9 x 0.5 x 0.2 = 0.12 + 0.09 = 0.21
    A_a = (0 + 0.6 - 0.5) + 0.5 x 0.21            = 0.1 + 0.105 = 0.205
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl_cli.records import Interaction
from agentrl_cli.scores import EQUAL_SCORES_TOLERANCE
from agentrl_cli.tracking.credit import find_successors
from agentrl_cli.train.advantages import DEVIATION_EPSILON


@dataclass(frozen=True, slots=True, kw_only=True)
class GaeFactors:
    """How far credit reaches."""

    gae_lambda: float
    """Of each action: 1 believes the rewards alone, 0 the critic's value of what follows."""
    discount: float
    """Of each action."""
    turn_discount: float
    """Of each turn."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What an action leads to: V and A of what follows it, 0 at the end of a trajectory."""

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
            that have none are not trained.
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
    """What each turn itself adds to its return; its own reward where it has no return."""
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
