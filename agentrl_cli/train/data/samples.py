"""Trajectories to samples: one flat token sequence each, with what the loss needs per token.

Turns are merged in ``tracking/credit.py`` and nowhere else; here every token only
receives its own interaction's advantage, temperature and top_p.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl_cli.errors import RunError
from agentrl_cli.log import get_logger
from agentrl_cli.records import ExportStyle, Interaction, Trajectory
from agentrl_cli.scores import compute_score
from agentrl_cli.tracking.credit import Span, TokenSequence, build_sequences
from agentrl_cli.train.masks import FREE, MaskMaker, TokenMasks, join_masks

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The tokens that are trained on, or scored; every tensor has shape [targets]."""

    sources: Tensor
    """int64: the position whose hidden state predicts the target: that of the token before."""
    ids: Tensor
    """int64."""
    rollout_logprobs: Tensor
    """float32 nats."""
    versions: Tensor
    """int64: the policy version that sampled it."""
    advantages: Tensor
    """float32."""
    temperatures: Tensor
    """float32."""
    top_ps: Tensor
    """float32."""
    masks: TokenMasks | None = None
    """What constrained targets were chosen from; None: none was constrained."""

    def __len__(self) -> int:
        return int(self.ids.numel())

    def move(self, sources: Tensor, device: torch.device) -> Targets:
        """The same targets on ``device``, predicted from ``sources``."""
        moved = {
            field.name: getattr(self, field.name).to(device)
            for field in dataclasses.fields(self)
            if field.name not in ("sources", "masks")
        }
        masks = self.masks and TokenMasks(self.masks.numbers.to(device), self.masks.table)
        return Targets(sources=sources.to(device), masks=masks, **moved)


def join_targets(parts: Sequence[Targets]) -> Targets:
    """Targets one after the other; their sources stay as they are."""
    joined = {
        field.name: torch.cat([getattr(part, field.name) for part in parts])
        for field in dataclasses.fields(Targets)
        if field.name != "masks"
    }
    masks = join_masks([part.masks for part in parts], [len(part) for part in parts])
    return Targets(masks=masks, **joined)


@dataclass(frozen=True, slots=True)
class Turn:
    """Which of a sample's targets one interaction's completion gave."""

    interaction_id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One flat token sequence and what is trained in it; tensors are on the CPU."""

    input_ids: Tensor
    """int64 [tokens]."""
    targets: Targets
    """In the order of their tokens."""
    turns: tuple[Turn, ...] = ()
    """In order; together they cover all targets."""
    trajectory_index: int
    """Position of the trajectory in the list that the samples were built from."""
    trajectory_id: str

    @property
    def num_tokens(self) -> int:
        """Length of the sequence, prompt included."""
        return int(self.input_ids.numel())

    @property
    def num_targets(self) -> int:
        """Tokens that are trained on."""
        return len(self.targets)

    @property
    def has_advantage(self) -> bool:
        """False: without a KL term, its gradient is exactly 0 and no forward pass is needed."""
        return bool(self.targets.advantages.any())


def build_samples(
    trajectories: Sequence[Trajectory],
    export_style: ExportStyle,
    mask_maker: MaskMaker | None = None,
) -> list[Sample]:
    """The samples of all scored trajectories, those with advantage 0 included.

    Unscored trajectories give none: they count nowhere, neither in the loss nor in its
    denominators. Scored trajectories of advantage 0 do give samples, because their tokens
    stay in the denominators; the learner leaves them out of the forward pass unless a KL
    term wants them. Turns whose interaction has no return are not trained. Constrained tokens get
    the masks that ``mask_maker`` makes. ``export_style`` is that of trajectories which have none
    of their own. Advantages are 0 until :func:`assign_advantages`.

    Raises:
        RunError: a token to train on has a rollout logprob that is not finite.
        MissingExtraError: tokens are constrained and xgrammar is not installed.
        ValueError: tokens are constrained and there is no ``mask_maker``.
    """
    samples = []
    for index, trajectory in enumerate(trajectories):
        if compute_score(trajectory) is None:
            continue
        style = trajectory.export_style or export_style
        for sequence in build_sequences(trajectory.interactions, style):
            sample = _build_sample(sequence, index, trajectory.id, mask_maker)
            if sample is not None:
                samples.append(sample)
    return samples


def assign_advantages(samples: Sequence[Sample], advantages: Mapping[str, float]) -> list[Sample]:
    """The samples with their interactions' ``advantages``, by interaction id, on every token."""
    assigned = []
    for sample in samples:
        spread = torch.zeros(sample.num_targets)
        for turn in sample.turns:
            spread[turn.start : turn.end] = advantages[turn.interaction_id]
        targets = dataclasses.replace(sample.targets, advantages=spread)
        assigned.append(dataclasses.replace(sample, targets=targets))
    return assigned


def build_scoring_sample(
    token_ids: Sequence[int], start: int, *, temperature: float, top_p: float
) -> Sample:
    """A sample whose tokens from position ``start`` on are scored; for logprobs alone."""
    input_ids = torch.tensor(token_ids, dtype=torch.long)
    sources = torch.arange(max(start, 1) - 1, len(token_ids) - 1)
    return _score_at(input_ids, sources, input_ids[sources + 1], temperature, top_p)


def build_candidate_sample(prompt_ids: Sequence[int], candidate_ids: Sequence[int]) -> Sample:
    """A sample in which each candidate is scored as the token after the prompt."""
    input_ids = torch.tensor(prompt_ids, dtype=torch.long)
    sources = torch.full((len(candidate_ids),), len(prompt_ids) - 1)
    return _score_at(input_ids, sources, torch.tensor(candidate_ids, dtype=torch.long), 1.0, 1.0)


def _score_at(
    input_ids: Tensor, sources: Tensor, ids: Tensor, temperature: float, top_p: float
) -> Sample:
    """A sample for logprobs alone, of ``ids`` as predicted from ``sources``."""
    count = len(sources)
    return Sample(
        input_ids=input_ids,
        targets=Targets(
            sources=sources,
            ids=ids,
            rollout_logprobs=torch.zeros(count),
            versions=torch.full((count,), -1),
            advantages=torch.zeros(count),
            temperatures=torch.full((count,), temperature),
            top_ps=torch.full((count,), top_p),
        ),
        trajectory_index=0,
        trajectory_id="",
    )


def _build_sample(
    sequence: TokenSequence, index: int, trajectory_id: str, mask_maker: MaskMaker | None
) -> Sample | None:
    """None: nothing of the sequence is trained."""
    parts: list[Targets] = []
    turns: list[Turn] = []
    for span in sequence.spans:
        interaction = span.interaction
        if not span.trained or interaction.turn_return is None:
            continue
        numbers = _number_masks(interaction, mask_maker, trajectory_id)
        if numbers is None:
            continue
        _check_logprobs(interaction, trajectory_id)
        part = _build_targets(span, numbers, mask_maker)
        first = turns[-1].end if turns else 0
        turns.append(Turn(interaction.id, first, first + len(part)))
        parts.append(part)
    if not any(len(part) for part in parts):
        return None
    return Sample(
        input_ids=torch.tensor(sequence.input_ids, dtype=torch.long),
        targets=join_targets(parts),
        turns=tuple(turns),
        trajectory_index=index,
        trajectory_id=trajectory_id,
    )


def _build_targets(
    span: Span, mask_numbers: Sequence[int], mask_maker: MaskMaker | None
) -> Targets:
    """The tokens of one completion; the first token of a sequence has nothing before it that could
    predict it."""
    interaction = span.interaction
    skipped = 1 if span.start == 0 else 0
    ids = torch.tensor(interaction.completion_ids[skipped:], dtype=torch.long)
    numbers = torch.tensor(mask_numbers[skipped:], dtype=torch.long)
    masks = None
    if mask_maker is not None and bool((numbers != FREE).any()):
        masks = TokenMasks(numbers, mask_maker.table)
    return Targets(
        sources=torch.arange(span.start + skipped, span.end) - 1,
        ids=ids,
        rollout_logprobs=torch.tensor(interaction.rollout_logprobs[skipped:], dtype=torch.float32),
        versions=torch.tensor(interaction.versions[skipped:], dtype=torch.long),
        advantages=torch.zeros(ids.shape),
        temperatures=torch.full(ids.shape, interaction.temperature),
        top_ps=torch.full(ids.shape, interaction.top_p),
        masks=masks,
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
            trajectory_id,
            interaction.id,
        )
    return numbers


def _check_logprobs(interaction: Interaction, trajectory_id: str) -> None:
    for position, logprob in enumerate(interaction.rollout_logprobs):
        if not math.isfinite(logprob):
            raise RunError(
                f"trajectory {trajectory_id}, interaction {interaction.id}: rollout logprob "
                f"{logprob} of completion token {position}. A sampled token has a finite one: "
                "this is a fault of the engine. Look at the trajectory with: "
                "agentrl inspect-trajectories RUN"
            )
