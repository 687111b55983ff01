"""Trajectories to samples: one flat token sequence each, with what the loss needs per token.

Turns are merged in ``tracking/sequences.py`` and nowhere else; here every token only
receives its own interaction's advantage, temperature and top_p.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl_cli.errors import RunError
from agentrl_cli.log import get_logger
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.tracking.sequences import ExportStyle, TokenSequence, build_sequences
from agentrl_cli.train.advantages import compute_score
from agentrl_cli.train.masks import FREE, MaskMaker, TokenMasks

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One flat token sequence to train on; every tensor has shape [tokens], on the CPU."""

    input_ids: Tensor
    """int64."""
    loss_mask: Tensor
    """Bool, True = trained on; the first token never is."""
    rollout_logprobs: Tensor
    """float32 nats; 0 where not sampled."""
    versions: Tensor
    """int64; -1 where not sampled."""
    advantages: Tensor
    """float32; 0 where not trained on."""
    temperatures: Tensor
    """float32; 1 where not trained on."""
    top_ps: Tensor
    """float32; 1 where not trained on."""
    trajectory_index: int
    """Position of the trajectory in the list that the samples were built from."""
    trajectory_id: str
    masks: TokenMasks | None = None
    """What constrained tokens were chosen from; None: none was constrained."""

    @property
    def num_tokens(self) -> int:
        """Length of the sequence, prompt included."""
        return int(self.input_ids.numel())

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that the mask lets through."""
        return int(self.loss_mask.sum())

    @property
    def has_advantage(self) -> bool:
        """False: without a KL term, its gradient is exactly 0 and no forward pass is needed."""
        return bool(self.advantages.any())


def build_samples(
    trajectories: Sequence[Trajectory],
    advantages: Mapping[str, float],
    export_style: ExportStyle,
    mask_maker: MaskMaker | None = None,
) -> list[Sample]:
    """The samples of all scored trajectories, those with advantage 0 included.

    Unscored trajectories give none: they count nowhere, neither in the loss nor in its
    denominators. Scored trajectories of advantage 0 do give samples, because their tokens
    stay in the denominators; the learner leaves them out of the forward pass unless a KL
    term wants them. Spans whose interaction has no return are masked. Constrained tokens get
    the masks that ``mask_maker`` makes.

    Raises:
        RunError: a token to train on has a rollout logprob that is not finite.
        MissingExtraError: tokens are constrained and xgrammar is not installed.
        ValueError: tokens are constrained and there is no ``mask_maker``.
    """
    samples = []
    for index, trajectory in enumerate(trajectories):
        if compute_score(trajectory) is None:
            continue
        for sequence in build_sequences(trajectory.interactions, export_style):
            sample = _build_sample(sequence, advantages, index, trajectory.id, mask_maker)
            if sample.num_trained_tokens:
                samples.append(sample)
    return samples


def count_trained_tokens(samples: Sequence[Sample], num_trajectories: int) -> list[int]:
    """Trained tokens of each trajectory, by trajectory index."""
    counts = [0] * num_trajectories
    for sample in samples:
        counts[sample.trajectory_index] += sample.num_trained_tokens
    return counts


def build_scoring_sample(
    token_ids: Sequence[int], start: int, *, temperature: float, top_p: float
) -> Sample:
    """A sample whose tokens from position ``start`` on are scored; for logprobs alone."""
    num_tokens = len(token_ids)
    return Sample(
        input_ids=torch.tensor(token_ids, dtype=torch.long),
        loss_mask=torch.arange(num_tokens) >= max(start, 1),
        rollout_logprobs=torch.zeros(num_tokens),
        versions=torch.full((num_tokens,), -1),
        advantages=torch.zeros(num_tokens),
        temperatures=torch.full((num_tokens,), temperature),
        top_ps=torch.full((num_tokens,), top_p),
        trajectory_index=0,
        trajectory_id="",
    )


def _build_sample(
    sequence: TokenSequence,
    advantages: Mapping[str, float],
    index: int,
    trajectory_id: str,
    mask_maker: MaskMaker | None,
) -> Sample:
    num_tokens = len(sequence.input_ids)
    loss_mask = torch.zeros(num_tokens, dtype=torch.bool)
    token_advantages = torch.zeros(num_tokens)
    temperatures, top_ps = torch.ones(num_tokens), torch.ones(num_tokens)
    mask_numbers = torch.full((num_tokens,), FREE)
    for span in sequence.spans:
        interaction = span.interaction
        if not span.trained or interaction.turn_return is None:
            continue
        numbers = _number_masks(interaction, mask_maker, trajectory_id)
        if numbers is None:
            continue
        mask_numbers[span.start : span.end] = torch.tensor(numbers)
        # The first token of a sequence has nothing before it that could predict it.
        place = slice(max(span.start, 1), span.end)
        loss_mask[place] = True
        token_advantages[place] = advantages[interaction.id]
        temperatures[place] = interaction.temperature
        top_ps[place] = interaction.top_p
        _check_logprobs(interaction.rollout_logprobs, interaction.id, trajectory_id)
    return Sample(
        input_ids=torch.tensor(sequence.input_ids, dtype=torch.long),
        loss_mask=loss_mask,
        rollout_logprobs=torch.tensor(sequence.rollout_logprobs, dtype=torch.float32),
        versions=torch.tensor(sequence.versions, dtype=torch.long),
        advantages=token_advantages,
        temperatures=temperatures,
        top_ps=top_ps,
        trajectory_index=index,
        trajectory_id=trajectory_id,
        masks=TokenMasks(mask_numbers, mask_maker.table)
        if mask_maker is not None and mask_numbers.any()
        else None,
    )


def _number_masks(
    interaction: Interaction, mask_maker: MaskMaker | None, trajectory_id: str
) -> list[int] | None:
    """The number of the mask of each completion token; None: they cannot be trained on."""
    tag = interaction.structural_tag
    if tag is None:
        return [FREE] * len(interaction.completion_ids)
    if mask_maker is None:
        raise ValueError("trajectories with a structural tag need a mask_maker")
    numbers = mask_maker.number_masks(tag, interaction.completion_ids)
    if numbers is None:
        _log.warning(
            "trajectory %s, interaction %s: its tokens are not allowed by the structural tag that "
            "they were sampled under, so their logprobs cannot be computed: they are not trained "
            "on. The engine's xgrammar may be another than the trainer's",
            *(trajectory_id, interaction.id),
        )
    return numbers


def _check_logprobs(logprobs: Sequence[float], interaction_id: str, trajectory_id: str) -> None:
    for position, logprob in enumerate(logprobs):
        if not math.isfinite(logprob):
            raise RunError(
                f"trajectory {trajectory_id}, interaction {interaction_id}: rollout logprob "
                f"{logprob} of completion token {position}. A sampled token has a finite one: "
                "this is a fault of the engine. Look at the trajectory with: "
                "agentrl inspect-trajectories RUN"
            )
