"""What a trajectory's interactions are worth, and the token sequences that train on them.

A turn whose prompt and completion ids are a prefix of the next turn's prompt is part of the same
sequence, so that every sampled token is trained exactly once.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl_cli.records import ExportStyle, Interaction, InteractionStatus

if TYPE_CHECKING:
    import torch


#: The square of a larger one, in a group's deviation, is no number of the trainer's type.
_MAX_REWARD = 1e9


def parse_reward(value: Any) -> float | None:
    """A reward as a float; None (unscored) for None and NaN.

    Accepts numbers of any library: bool, int, float, numpy scalars, 0-d tensors.

    Raises:
        TypeError: ``value`` is no number.
        ValueError: ``value`` is infinite, or too large.
    """
    if value is None:
        return None
    if not isinstance(value, numbers.Real) and callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"a reward must be a number, a bool or None (unscored), not "
            f"{type(value).__name__}: {value!r:.200}"
        )
    try:
        reward = float(value)
    except OverflowError as error:
        raise ValueError(f"a reward must be finite, and not this large: {error}") from None
    if math.isnan(reward):
        return None
    if abs(reward) > _MAX_REWARD:
        raise ValueError(
            f"a reward must be finite, from -{_MAX_REWARD:g} to {_MAX_REWARD:g}, not {reward}"
        )
    return reward


def compute_turn_returns(
    interactions: Iterable[Interaction], turn_discount: float
) -> dict[str, float]:
    """The return of every completed interaction: reward + turn_discount x successors' mean.

    Whatever was sampled shares in the outcome: see :func:`find_successors`. Empty when no
    interaction has a reward.
    """
    by_id = {i.id: i for i in interactions}
    successors = find_successors(by_id.values())
    if all(by_id[interaction_id].reward is None for interaction_id in successors):
        return {}
    returns: dict[str, float] = {}
    for interaction_id, later in successors.items():
        credit = sum(returns[s] for s in later) / len(later) if later else 0.0
        returns[interaction_id] = (by_id[interaction_id].reward or 0.0) + turn_discount * credit
    return returns


def find_successors(interactions: Iterable[Interaction]) -> dict[str, tuple[str, ...]]:
    """Whose credit every completed interaction shares in, by ids; successors come first.

    Successors are an interaction's children in the conversation tree. A leaf without a
    reward of its own hands over to the first interaction that started after it ended
    (a handoff, a sub-agent's end, a compacted history); where none did (calls made in
    parallel at the end), to the trajectory's last interaction.
    """
    completed = sorted(
        (i for i in interactions if i.status is InteractionStatus.COMPLETED),
        key=lambda i: i.started,
    )
    children: dict[str, list[str]] = {}
    for interaction in completed:
        if interaction.parent_id is not None:
            children.setdefault(interaction.parent_id, []).append(interaction.id)
    last = max(completed, key=_end, default=None)
    found: dict[str, tuple[str, ...]] = {}
    if last is None:
        return found

    # A successor starts after its predecessor ended, so walking backwards in order of
    # start meets it first. The last interaction to end has no successor of its own.
    for interaction in [last, *reversed(completed)]:
        if interaction.id in found:
            continue
        successors = tuple(children.get(interaction.id, ()))
        if not successors and interaction.reward is None and interaction is not last:
            later = (i for i in completed if i.started > _end(interaction))
            successors = (next(later, last).id,)
        found[interaction.id] = successors
    return found


def _end(interaction: Interaction) -> int:
    return interaction.ended if interaction.ended is not None else interaction.started


@dataclass(frozen=True, slots=True)
class Span:
    """Where one interaction's completion lies in a sequence: tokens ``start`` to ``end`` - 1."""

    interaction: Interaction
    trained: bool
    """False: another sequence trains these tokens, or they carry no gradient (greedy)."""

    @property
    def start(self) -> int:
        """The completion's first token."""
        return len(self.interaction.prompt_ids)

    @property
    def end(self) -> int:
        """The token after the completion."""
        return self.start + len(self.interaction.completion_ids)


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One flat token sequence: an interaction, with all turns that it extends.

    All per-token tuples have the length of ``input_ids``.
    """

    spans: tuple[Span, ...]
    """The merged turns, in order."""
    style: ExportStyle
    """How turns were merged."""

    @property
    def interaction(self) -> Interaction:
        """The interaction that the sequence ends with."""
        return self.spans[-1].interaction

    @property
    def id(self) -> str:
        """The interaction's id."""
        return self.interaction.id

    @property
    def reward(self) -> float | None:
        """The return if credit was handed out, else the interaction's own reward."""
        interaction = self.interaction
        return interaction.reward if interaction.turn_return is None else interaction.turn_return

    @property
    def input_ids(self) -> tuple[int, ...]:
        """The tokens."""
        return (*self.interaction.prompt_ids, *self.interaction.completion_ids)

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """True = trained on."""
        return self._spread(False, lambda span: [span.trained] * (span.end - span.start))

    @property
    def rollout_logprobs(self) -> tuple[float, ...]:
        """0.0 where not sampled."""
        return self._spread(0.0, lambda span: span.interaction.rollout_logprobs)

    @property
    def versions(self) -> tuple[int, ...]:
        """-1 where not sampled."""
        return self._spread(-1, lambda span: span.interaction.versions)

    def _spread(self, default: Any, read: Callable[[Span], Sequence[Any]]) -> tuple[Any, ...]:
        """What every span's tokens have, ``default`` for all others."""
        values = [default] * len(self.input_ids)
        for span in self.spans:
            values[span.start : span.end] = read(span)
        return tuple(values)

    def to_tensor_dict(self) -> dict[str, torch.Tensor]:
        """Tensors of shape [1, T], and ``rewards`` of shape [1].

        ``input_ids`` int64; ``loss_mask`` bool, True = trained on; ``logprobs`` float32,
        the rollout's, 0 where not sampled; ``versions`` int32, -1 where not sampled;
        ``attention_mask`` bool, all True; ``rewards`` float32, NaN when unscored.
        """
        import torch

        reward = float("nan") if self.reward is None else self.reward
        return {
            "input_ids": torch.tensor([self.input_ids], dtype=torch.int64),
            "loss_mask": torch.tensor([self.loss_mask], dtype=torch.bool),
            "logprobs": torch.tensor([self.rollout_logprobs], dtype=torch.float32),
            "versions": torch.tensor([self.versions], dtype=torch.int32),
            "attention_mask": torch.ones((1, len(self.input_ids)), dtype=torch.bool),
            "rewards": torch.tensor([reward], dtype=torch.float32),
        }


def build_sequences(interactions: Iterable[Interaction], style: ExportStyle) -> list[TokenSequence]:
    """The token sequences of one trajectory, in the order in which their last turns began.

    ``concat`` merges every chain of turns that extend each other; where branches share
    turns, the first branch in time trains them and the others mask them. ``individual``
    gives one sequence per interaction. Failed and unfinished calls, and calls without
    token ids, give none.
    """
    usable = {
        i.id: i
        for i in sorted(interactions, key=lambda i: i.started)
        if i.status is InteractionStatus.COMPLETED and i.completion_ids
    }
    if style == "individual":
        chains = [[interaction] for interaction in usable.values()]
    else:
        parents = {
            i.id: usable[i.parent_id or ""]
            for i in usable.values()
            if i.extends_parent and i.parent_id in usable
        }
        extended = {parent.id for parent in parents.values()}
        chains = [_chain(last, parents) for last in usable.values() if last.id not in extended]
    seen: set[str] = set()
    sequences = []
    for chain in chains:
        spans = [Span(turn, turn.id not in seen and turn.temperature > 0) for turn in chain]
        seen.update(turn.id for turn in chain)
        sequences.append(TokenSequence(tuple(spans), style))
    return sequences


def _chain(last: Interaction, parents: Mapping[str, Interaction]) -> list[Interaction]:
    """The turns that end in ``last``, each extending the one before it."""
    chain = [last]
    while chain[-1].id in parents:
        chain.append(parents[chain[-1].id])
    return chain[::-1]
