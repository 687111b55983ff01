"""Logits to logprobs and entropies of targets and back to gradients, in place and by blocks.

Whatever is as large as the logits is the logits' own memory; beside it stands only what some
rows need at a time. Everything is float32, or wider if the logits are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from agentrl_cli.train.masks import TokenMasks

#: Logits that are worked on at a time: on a CPU what its cache holds, on a GPU what keeps it busy.
_BLOCK_LOGITS = {"cpu": 2**17, "cuda": 2**23}

#: Stands for -inf where 0 x -inf must be 0: its exponential is 0 too.
_IMPOSSIBLE = -1e4


@dataclass(frozen=True, slots=True)
class Choices:
    """The targets, and what each was chosen from."""

    ids: Tensor
    """int64 [targets]."""
    temperatures: Tensor | None
    """float32 [targets], above 0; None: all are 1."""
    top_ps: Tensor | None
    """float32 [targets]; None: all are 1."""
    masks: TokenMasks | None

    @property
    def needs_whole_rows(self) -> bool:
        """True where a token's probability depends on more of its row than the row's normalizer."""
        return self.top_ps is not None or self.masks is not None

    def take(self, rows: slice) -> Choices:
        """Those of some targets."""
        masks = self.masks
        if masks is not None:
            numbers = masks.numbers[rows]
            masks = TokenMasks(numbers, masks.table) if bool(numbers.any()) else None
        return Choices(
            self.ids[rows],
            None if self.temperatures is None else self.temperatures[rows],
            None if self.top_ps is None else self.top_ps[rows],
            masks,
        )


class Scores(NamedTuple):
    """Of some targets; each [targets], float32 nats."""

    logprobs: Tensor
    entropies: Tensor
    normalizers: Tensor
    """The logarithm of the sum of exponentials of the row's logits, over what is possible."""


def build_choices(
    ids: Tensor, temperatures: Tensor, top_ps: Tensor, masks: TokenMasks | None
) -> Choices:
    """The choices, without what no target needs."""
    return Choices(
        ids,
        temperatures if bool((temperatures != 1).any()) else None,
        top_ps if bool((top_ps < 1).any()) else None,
        masks,
    )


def score_logits(logits: Tensor, choices: Choices, *, keep_probabilities: bool) -> Scores:
    """The scores of targets; ``logits`` [targets, vocabulary] are overwritten.

    With ``keep_probabilities``, the logits become probabilities.
    """
    parts = []
    widened, weights = _Scratch(logits), _Scratch(logits)
    for rows in _split_rows(logits):
        block = logits[rows]
        own = weights.take(block)
        scores, totals = _score_block(widened.widen(block), choices.take(rows), own)
        if keep_probabilities:
            torch.div(own, totals[:, None], out=block)
        parts.append(scores)
    return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _score_block(logits: Tensor, choices: Choices, weights: Tensor) -> tuple[Scores, Tensor]:
    """Scores, and the totals of ``weights``, which become probabilities but for those; the logits
    are used up."""
    if choices.masks is not None:
        allowed = choices.masks.table.unpack(choices.masks.numbers, logits.shape[-1])
        logits.masked_fill_(~allowed, -torch.inf)
    if choices.temperatures is not None:
        logits.div_(choices.temperatures[:, None])
    highest = logits.amax(-1)
    logits.sub_(highest[:, None])
    chosen = logits.gather(1, choices.ids[:, None])[:, 0]
    torch.exp(logits, out=weights)
    if choices.top_ps is not None:
        removed = find_outside_nucleus(
            weights / weights.sum(-1, keepdim=True), choices.top_ps, choices.ids
        )
        logits.masked_fill_(removed, -torch.inf)
        weights.masked_fill_(removed, 0.0)
    if choices.needs_whole_rows:
        logits.clamp_(min=_IMPOSSIBLE)
    totals = weights.sum(-1)
    normalizers = totals.log()
    # The entropy is the normalizer less the mean logit.
    entropies = normalizers - logits.mul_(weights).sum(-1) / totals
    scores = Scores(chosen - normalizers, entropies, highest + normalizers)
    return scores, totals


class ScoreGradients(NamedTuple):
    """The gradients of a loss by the scores of some targets; each [targets]."""

    logprobs: Tensor
    entropies: Tensor | None

    @classmethod
    def of(
        cls, scores: Scores, logprobs: Tensor | None, entropies: Tensor | None
    ) -> ScoreGradients:
        """From what autograd gives: None where the loss does not depend on a score."""
        return cls(torch.zeros_like(scores.logprobs) if logprobs is None else logprobs, entropies)

    def take(self, rows: slice) -> ScoreGradients:
        """Those of some targets."""
        entropies = None if self.entropies is None else self.entropies[rows]
        return ScoreGradients(self.logprobs[rows], entropies)


def differentiate(
    tile: Tensor,
    holds: Literal["logits", "probabilities"],
    choices: Choices,
    scores: Scores,
    gradients: ScoreGradients,
    first_id: int = 0,
) -> None:
    """Overwrites logits, or the probabilities made of them, by the gradients of the logits.

    ``tile`` is [targets, tokens]. Logits are of the tokens from ``first_id`` on, which need not be
    the whole vocabulary, and of choices that do not need whole rows.
    """
    widened, scratch = _Scratch(tile), _Scratch(tile)
    for rows in _split_rows(tile):
        block, chosen = tile[rows], choices.take(rows)
        own, outer = Scores(*(one[rows] for one in scores)), gradients.take(rows)
        wide = widened.widen(block)
        logprobs = None if outer.entropies is None else scratch.take(block)
        if holds == "logits":
            if chosen.temperatures is not None:
                wide.div_(chosen.temperatures[:, None])
            wide.sub_(own.normalizers[:, None])
            if logprobs is not None:
                logprobs.copy_(wide)
            wide.exp_()
        elif logprobs is not None:
            # The limit of p log p is 0.
            torch.clamp(wide, min=torch.finfo(wide.dtype).tiny, out=logprobs).log_()
        _differentiate_block(wide, logprobs, chosen, own, outer, first_id)
        if wide is not block:
            block.copy_(wide)


def _differentiate_block(
    probabilities: Tensor,
    logprobs: Tensor | None,
    choices: Choices,
    scores: Scores,
    gradients: ScoreGradients,
    first_id: int,
) -> None:
    """Probabilities to gradients of the logits before the temperature, in place; ``logprobs``,
    needed for the gradient of entropies, are used up.

    With a = d loss / d logprob of target t, b = d loss / d entropy H, it is for every token v
    a (1[v = t] - p_v) - b p_v (log p_v + H), over the temperature.
    """
    outer, of_entropy = gradients.logprobs, gradients.entropies
    if choices.temperatures is not None:
        outer = outer / choices.temperatures
        of_entropy = None if of_entropy is None else of_entropy / choices.temperatures
    # Of the target, 1 - p by itself: where p is near 1 a difference would be mostly rounding.
    at_target = outer * -torch.expm1(scores.logprobs)
    if of_entropy is None or logprobs is None:
        probabilities.mul_(-outer[:, None])
    else:
        at_target -= of_entropy * scores.logprobs.exp() * (scores.logprobs + scores.entropies)
        logprobs.add_(scores.entropies[:, None]).mul_(of_entropy[:, None]).add_(outer[:, None])
        probabilities.mul_(logprobs.neg_())
    ids = choices.ids - first_id
    num_tokens = probabilities.shape[-1]
    # Without a choice of rows: that would make a GPU wait.
    is_here = (ids >= 0) & (ids < num_tokens)
    places = ids.clamp(0, num_tokens - 1)[:, None]
    there = probabilities.gather(1, places)[:, 0]
    probabilities.scatter_(1, places, torch.where(is_here, at_target, there)[:, None])


class _Scratch:
    """Memory for one block at a time, of float32 or wider.

    Allocated for every block, it would lie between the few numbers that are kept of each, and a
    process would grow by nearly all of it.
    """

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._memory: Tensor | None = None

    def take(self, block: Tensor) -> Tensor:
        """Memory as large as ``block``, with anything in it."""
        if self._memory is None:
            dtype = widen(block.dtype)
            shape = (_count_rows(self._logits), self._logits.shape[-1])
            self._memory = self._logits.new_empty(shape, dtype=dtype)
        return self._memory[: len(block)]

    def widen(self, block: Tensor) -> Tensor:
        """The block itself where it is precise enough, else a copy."""
        return block if widen(block.dtype) == block.dtype else self.take(block).copy_(block)


def widen(dtype: torch.dtype) -> torch.dtype:
    """float32, or what is wider."""
    return torch.promote_types(dtype, torch.float32)


def _count_rows(logits: Tensor) -> int:
    """Of a block."""
    num_rows = _BLOCK_LOGITS.get(logits.device.type, _BLOCK_LOGITS["cuda"]) // logits.shape[-1]
    return max(1, min(num_rows, len(logits)))


def _split_rows(logits: Tensor) -> Iterator[slice]:
    num_rows = _count_rows(logits)
    for start in range(0, len(logits), num_rows):
        yield slice(start, start + num_rows)


#: Most nuclei are smaller: so many are sorted first, and a whole row only where that is too few.
_NUM_LIKELIEST = 512


def find_outside_nucleus(probabilities: Tensor, top_ps: Tensor, target_ids: Tensor) -> Tensor:
    """True for the tokens that top_p sampling removes: bool [tokens, vocabulary].

    The nucleus is the smallest set of the most probable tokens whose probabilities reach
    top_p (arXiv 1904.09751, equation 2), the first of equal ones going before; the target is
    always in it. Where ``top_ps`` is 1, nothing is removed.

    Args:
        probabilities: float [tokens, vocabulary].
        top_ps: [tokens].
        target_ids: int64 [tokens].
    """
    num_likeliest = min(_NUM_LIKELIEST, probabilities.shape[-1])
    ordered = probabilities.topk(num_likeliest, dim=-1).values
    sizes = _count_nucleus(ordered, top_ps)
    lowest = _take(ordered, sizes - 1)
    if num_likeliest < probabilities.shape[-1]:
        is_larger = (sizes >= num_likeliest) & (top_ps < 1)
        if is_larger.any():
            whole = probabilities[is_larger].sort(dim=-1, descending=True).values
            larger_sizes = _count_nucleus(whole, top_ps[is_larger])
            sizes[is_larger] = larger_sizes
            lowest[is_larger] = _take(whole, larger_sizes - 1)
    removed = probabilities < lowest[:, None]
    _remove_last_of_equals(removed, probabilities, lowest, sizes)
    removed &= (top_ps < 1)[:, None]
    return removed.scatter_(1, target_ids[:, None], False)


def _count_nucleus(ordered: Tensor, top_ps: Tensor) -> Tensor:
    """Tokens of each nucleus, of probabilities in falling order; at least 1."""
    mass_before = ordered.cumsum(-1) - ordered
    return (mass_before < top_ps[:, None]).sum(-1).clamp_(min=1)


def _take(ordered: Tensor, places: Tensor) -> Tensor:
    return ordered.gather(1, places[:, None])[:, 0]


def _remove_last_of_equals(
    removed: Tensor, probabilities: Tensor, lowest: Tensor, sizes: Tensor
) -> None:
    """Where more tokens are as probable as the nucleus's last than it has room for."""
    num_too_many = removed.shape[-1] - removed.sum(-1) - sizes
    rows = (num_too_many > 0).nonzero()[:, 0]
    if not len(rows):
        return
    is_equal = probabilities[rows] == lowest[rows, None]
    num_kept = is_equal.sum(-1) - num_too_many[rows]
    removed[rows] |= is_equal & (is_equal.cumsum(-1) > num_kept[:, None])
