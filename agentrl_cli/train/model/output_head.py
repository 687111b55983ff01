"""Logprobs and entropies of sampled tokens, the output head applied only where they are.

They are those of the distribution that was sampled from, after temperature and top_p, and so
comparable with the engine's. The head and its scores are one operation, in tiles of the logits:
the logits of all targets are never in memory at once. What the backward pass needs of them is

* kept, as probabilities, when one tile holds all of them;
* not needed, when the head is not trained: the gradient of the hidden states is made in the
  forward pass, for a logprob's gradient is a factor of its row;
* else computed once more. The tiles of the backward pass are columns of the vocabulary: each
  gives the final gradient of its part of the head, which is therefore written once and not
  added up tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentrl_cli.errors import ModelError
from agentrl_cli.train.data.packing import MicroBatch
from agentrl_cli.train.masks import TokenMasks
from agentrl_cli.train.model.packed_attention import AttentionLayout
from agentrl_cli.train.model.token_scores import (
    Choices,
    ScoreGradients,
    Scores,
    build_choices,
    differentiate_logits,
    differentiate_probabilities,
    score_logits,
)

Head = Callable[[Tensor], Tensor]

_ALL = slice(None)
_COLUMN_BLOCK = 64

#: Maximum number of logits in memory at once: 128 MiB in float32.
MAX_LOGITS = 2**25

#: Settings of architectures whose logits are more than the output head of the hidden states.
_LOGIT_SETTINGS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier",
)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs and entropies of targets: float32 nats, shape [targets], both with gradient."""

    logprobs: Tensor
    entropies: Tensor


def check_head(model: PreTrainedModel) -> None:
    """Refuses architectures that change the logits after the output head.

    Raises:
        ModelError: names the setting.
    """
    for name in _LOGIT_SETTINGS:
        value = getattr(model.config, name, None)
        if value not in (None, 1.0):
            raise ModelError(
                f"model.path: {type(model).__name__} has {name}={value} in its config.json, which "
                "agentrl does not compute. Allowed: models without it, such as Qwen2, Qwen3, "
                "Llama and Mistral"
            )


def compute_micro_batch_logprobs(model: PreTrainedModel, batch: MicroBatch) -> TokenLogprobs:
    """Logprobs and entropies of the micro-batch's targets, from one forward pass."""
    targets = batch.targets
    return compute_logprobs(
        compute_target_states(model, batch),
        model.get_output_embeddings(),
        targets.ids,
        targets.temperatures,
        targets.top_ps,
        masks=targets.masks,
    )


def compute_target_states(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """The last hidden state that predicts each of the micro-batch's targets: [targets, width].

    ``model`` may have an output head, which is not applied.
    """
    hidden_states: Tensor = model.base_model(
        input_ids=batch.input_ids[None],
        position_ids=batch.position_ids[None],
        use_cache=False,
        layout=AttentionLayout(batch.segments),
    ).last_hidden_state[0]
    # Several targets may have one source; the gradient of an index_select is far cheaper here.
    return hidden_states.index_select(0, batch.targets.sources)


def compute_logprobs(
    hidden_states: Tensor,
    head: Head,
    target_ids: Tensor,
    temperatures: Tensor,
    top_ps: Tensor,
    *,
    masks: TokenMasks | None = None,
    max_logits: int = MAX_LOGITS,
) -> TokenLogprobs:
    """Logprobs and entropies of ``target_ids``, from ``max_logits`` logits at a time.

    Args:
        hidden_states: [targets, width], each predicting the target of its row.
        head: the output head, [targets, width] to [targets, vocabulary].
        target_ids: int64 [targets].
        temperatures: float32 [targets], above 0.
        top_ps: float32 [targets]; below 1, the distribution is renormalized within the
            nucleus of these logits, in which the target is always kept.
        masks: what constrained targets were among; put on before temperature and nucleus.
        max_logits: bounds what stands in memory at once, forward and backward.
    """
    if target_ids.numel() == 0:
        # Connected to the hidden states, so that a backward pass has a path.
        nothing = hidden_states.float().sum(-1)
        return TokenLogprobs(nothing, nothing)
    choices = build_choices(target_ids, temperatures, top_ps, masks)
    if is_linear(head):
        return TokenLogprobs(*score_with_linear(head, hidden_states, choices, max_logits))
    return TokenLogprobs(*score_with_any(head, hidden_states, choices, max_logits))


def is_linear(head: Head) -> TypeGuard[nn.Linear]:
    """True for a plain matrix, perhaps with a bias, and nothing more (such as an adapter)."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


def score_with_linear(
    head: nn.Linear, hidden_states: Tensor, choices: Choices, max_logits: int
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of targets, float32 [targets], both with gradient.

    The head is called once and as a module, so that its hooks see all of it.
    """

    def forward(states: Tensor) -> tuple[Tensor, Tensor]:
        needs_gradient = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad
            for tensor in (states, head.weight, head.bias)
        )
        result: tuple[Tensor, Tensor] = _ScoresOfHead.apply(  # type: ignore[no-untyped-call]
            states, head.weight, head.bias, choices, max_logits, needs_gradient
        )
        return result

    own = vars(head)
    before = own.get("forward")
    own["forward"] = forward
    try:
        scores: tuple[Tensor, Tensor] = head(hidden_states)
    finally:
        del own["forward"]
        if before is not None:
            own["forward"] = before
    return scores


def score_with_any(
    head: Head, hidden_states: Tensor, choices: Choices, max_logits: int
) -> tuple[Tensor, Tensor]:
    """The same for every other head; tiles are computed once more in the backward pass."""

    def score(states: Tensor, chosen: Choices) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = _ScoresOfLogits.apply(  # type: ignore[no-untyped-call]
            head(states), chosen
        )
        return result

    num_targets = hidden_states.shape[0]
    with torch.no_grad():
        num_tokens = head(hidden_states[:1]).shape[-1]
    if num_targets * num_tokens <= max_logits:
        return score(hidden_states, choices)
    parts = [
        checkpoint(score, hidden_states[rows], choices.take(rows), use_reentrant=False)
        for rows in _split(num_targets, max_logits // num_tokens)
    ]
    logprobs, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
    return logprobs, entropies


class _ScoresOfLogits(torch.autograd.Function):
    """logits -> (logprobs, entropies)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, choices: Choices) -> tuple[Tensor, Tensor]:
        probabilities = logits.to(_widen(logits.dtype), copy=True)
        scores = score_logits(probabilities, choices, keep_probabilities=True)
        ctx.choices, ctx.dtype = choices, logits.dtype
        ctx.save_for_backward(probabilities, *scores)
        ctx.set_materialize_grads(False)
        return scores.logprobs, scores.entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None
    ) -> tuple[Tensor | None, None]:
        probabilities, *own = ctx.saved_tensors
        scores = Scores(*own)
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(scores.logprobs)
        differentiate_probabilities(
            probabilities, ctx.choices, scores, ScoreGradients(of_logprobs, of_entropies)
        )
        return probabilities.to(ctx.dtype), None


class _ScoresOfHead(torch.autograd.Function):
    """(hidden states, weight, bias) -> (logprobs, entropies)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        choices: Choices,
        max_logits: int,
        needs_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        num_targets, num_tokens = hidden_states.shape[0], weight.shape[0]
        is_whole = num_targets * num_tokens <= max_logits
        is_frozen = not (weight.requires_grad or (bias is not None and bias.requires_grad))
        makes_unit = needs_gradient and is_frozen and not is_whole
        keeps = needs_gradient and (is_whole or is_frozen)
        # The gradient of the hidden states where that of every logprob is 1.
        unit = torch.empty_like(hidden_states) if makes_unit else None
        parts, tile = [], None
        logits = _Logits(hidden_states, weight, bias)
        for rows in _split(num_targets, num_targets if is_whole else max_logits // num_tokens):
            chosen = choices.take(rows)
            tile = logits.compute(rows, _ALL)
            scores = score_logits(tile, chosen, keep_probabilities=keeps)
            parts.append(scores)
            if unit is not None:
                ones = ScoreGradients(torch.ones_like(scores.logprobs), None)
                differentiate_probabilities(tile, chosen, scores, ones)
                torch.mm(tile, weight, out=unit[rows])
        scores = Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))
        ctx.set_materialize_grads(False)
        ctx.choices, ctx.max_logits = choices, max_logits
        kept = tile if is_whole and needs_gradient else None
        ctx.save_for_backward(hidden_states, weight, bias, *scores, kept, unit)
        return scores.logprobs, scores.entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_states, weight, bias, *own, probabilities, unit = ctx.saved_tensors
        if of_logprobs is None and of_entropies is None:
            return (None,) * 6
        scores = Scores(*own)
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(scores.logprobs)
        if unit is not None and of_entropies is None:
            return (unit * of_logprobs.to(unit.dtype)[:, None], *(None,) * 5)
        gradients = ScoreGradients(of_logprobs, of_entropies)
        logits = _Logits(hidden_states, weight, bias)
        sums = _GradientSums(hidden_states, weight, bias, ctx.needs_input_grad)
        if probabilities is not None:
            differentiate_probabilities(probabilities, ctx.choices, scores, gradients)
            sums.add(probabilities, _ALL, _ALL)
        else:
            _add_tiles(sums, logits, ctx.choices, scores, gradients, ctx.max_logits)
        return (*sums.results(), None, None, None)


def _add_tiles(
    sums: _GradientSums,
    logits: _Logits,
    choices: Choices,
    scores: Scores,
    gradients: ScoreGradients,
    max_logits: int,
) -> None:
    """Adds the gradients of all tiles, their logits computed once more."""
    num_targets, num_tokens = scores.logprobs.shape[0], logits.num_tokens
    if not choices.needs_whole_rows:
        num_columns = max_logits // num_targets
        # Matrix units work on whole blocks.
        num_columns -= num_columns % _COLUMN_BLOCK if num_columns > _COLUMN_BLOCK else 0
        for columns in _split(num_tokens, num_columns):
            tile = logits.compute(_ALL, columns)
            differentiate_logits(tile, choices, scores, gradients, columns.start or 0)
            sums.add(tile, _ALL, columns)
        return
    for rows in _split(num_targets, max_logits // num_tokens):
        chosen = choices.take(rows)
        tile = logits.compute(rows, _ALL)
        own = score_logits(tile, chosen, keep_probabilities=True)
        differentiate_probabilities(tile, chosen, own, gradients.take(rows))
        sums.add(tile, rows, _ALL)


class _Logits:
    """Makes tiles of logits, one after the other in the same memory: new memory costs a CPU about
    as much as filling it."""

    def __init__(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.num_tokens = weight.shape[0]
        self._states = states
        self._weight = weight
        self._bias = bias
        self._memory: Tensor | None = None

    def compute(self, rows: slice, columns: slice) -> Tensor:
        """The logits of some targets and tokens; those of the tile before are gone."""
        states, weight = self._states[rows], self._weight[columns]
        size = states.shape[0] * weight.shape[0]
        if self._memory is None or len(self._memory) < size:
            self._memory = states.new_empty(size)
        tile = self._memory[:size].view(states.shape[0], weight.shape[0])
        if self._bias is None:
            return torch.mm(states, weight.t(), out=tile)
        return torch.addmm(self._bias[columns], states, weight.t(), out=tile)


class _GradientSums:
    """The gradients of hidden states and head, to which those of tiles of logits are added.

    What several tiles are added to is float32 (or wider) until all are there.
    """

    def __init__(
        self, states: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> None:
        self._weight = weight
        self._states = states
        self._bias = bias
        self._sums: list[Tensor | None] = [None, None, None]
        self._needs_states, self._needs_weight, self._needs_bias = needed[:3]

    def add(self, tile: Tensor, rows: slice, columns: slice) -> None:
        """Adds what the gradients of a tile's logits give."""
        has_all_rows, has_all_columns = rows == _ALL, columns == _ALL
        if self._needs_states:
            self._sums[0] = _add_product(
                self._sums[0], self._states, rows, tile, self._weight[columns], once=has_all_columns
            )
        if self._needs_weight:
            self._sums[1] = _add_product(
                self._sums[1],
                self._weight,
                columns,
                tile.t(),
                self._states[rows],
                once=has_all_rows,
            )
        if self._needs_bias and self._bias is not None:
            ones = tile.new_ones(tile.shape[0], 1)
            self._sums[2] = _add_product(
                self._sums[2], self._bias[:, None], columns, tile.t(), ones, once=has_all_rows
            )

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of hidden states, weight and bias; None where not needed."""
        states, weight, bias = self._sums
        return (
            None if states is None else states.to(self._states.dtype),
            None if weight is None else weight.to(self._weight.dtype),
            None if bias is None else bias[:, 0].to(self._weight.dtype),
        )


def _add_product(
    total: Tensor | None, like: Tensor, place: slice, left: Tensor, right: Tensor, *, once: bool
) -> Tensor:
    """``left`` times ``right`` at ``place`` of a tensor like ``like``; it is added unless it is
    the only one there."""
    if once:
        total = torch.empty_like(like) if total is None else total
        torch.mm(left, right, out=total[place])
        return total
    total = torch.zeros_like(like, dtype=_widen(like.dtype)) if total is None else total
    if total.dtype == left.dtype:
        total[place].addmm_(left, right)
    else:
        total[place].add_(left @ right)
    return total


def _widen(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _split(total: int, size: int) -> Iterator[slice]:
    """Slices of at most ``size``, at least 1; all of it as one is ``_ALL``."""
    if total <= size:
        yield _ALL
        return
    for start in range(0, total, max(1, size)):
        yield slice(start, start + max(1, size))
