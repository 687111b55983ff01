"""Logprobs and entropies of sampled tokens, the output head applied only where they are.

They are those of the distribution that was sampled from, after temperature and top_p, and so
comparable with the engine's. The head and its scores are one operation, in tiles of the logits:
the logits of all targets are never in memory at once. What the backward pass needs of them is

* kept, as probabilities, when one tile holds all of them;
* not needed, when the head is not trained: the gradient of the hidden states is made in the
  forward pass, for a logprob's gradient is a factor of its row;
* else computed once more. Where it can be, the tiles of the backward pass are columns of the
  vocabulary: each gives the final gradient of its part of the head, which is therefore never added
  up in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    differentiate,
    score_logits,
    widen,
)

Head = Callable[[Tensor], Tensor]

#: Matrix units work on whole blocks.
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
    return TokenLogprobs(*score_targets(head, hidden_states, choices, max_logits))


def score_targets(
    head: Head, hidden_states: Tensor, choices: Choices, max_logits: int
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of targets, float32 [targets], both with gradient."""

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
    if is_linear(head):
        is_trained = any(p is not None and p.requires_grad for p in (head.weight, head.bias))
        keeps_unit = torch.is_grad_enabled() and not is_trained
        # Of another type where the model computes in float32 for once.
        weight, bias = (
            None if p is None else p.to(hidden_states.dtype) for p in (head.weight, head.bias)
        )
        scores: tuple[Tensor, Tensor] = _ScoresOfHead.apply(  # type: ignore[no-untyped-call]
            hidden_states, weight, bias, choices, max_logits, keeps_unit
        )
        return scores
    # Tiles of any other head are computed once more in the backward pass.
    parts = [
        checkpoint(score, hidden_states[rows], choices.take(rows), use_reentrant=False)
        for rows in _split(num_targets, max_logits // num_tokens)
    ]
    logprobs, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
    return logprobs, entropies


def is_linear(head: Head) -> TypeGuard[nn.Linear]:
    """True for a plain matrix, perhaps with a bias, and nothing more (such as an adapter)."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


class _ScoresOfLogits(torch.autograd.Function):
    """logits -> (logprobs, entropies)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, choices: Choices) -> tuple[Tensor, Tensor]:
        probabilities = logits.to(widen(logits.dtype), copy=True)
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
        gradients = ScoreGradients.of(scores, of_logprobs, of_entropies)
        differentiate(probabilities, "probabilities", ctx.choices, scores, gradients)
        return probabilities.to(ctx.dtype), None


class _ScoresOfHead(torch.autograd.Function):
    """(hidden states, weight, bias) -> (logprobs, entropies), in tiles of the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        choices: Choices,
        max_logits: int,
        keeps_unit: bool,
    ) -> tuple[Tensor, Tensor]:
        # The gradient of the hidden states where that of every logprob is 1.
        unit = torch.empty_like(states) if keeps_unit else None
        parts = []
        memory = _reserve(states, weight, max_logits)
        for rows in _split(len(states), max_logits // len(weight)):
            chosen = choices.take(rows)
            tile = _compute_logits(memory, states[rows], weight, bias)
            scores = score_logits(tile, chosen, keep_probabilities=keeps_unit)
            parts.append(scores)
            if unit is not None:
                ones = ScoreGradients(torch.ones_like(scores.logprobs), None)
                differentiate(tile, "probabilities", chosen, scores, ones)
                torch.mm(tile, weight, out=unit[rows])
        scores = Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))
        ctx.set_materialize_grads(False)
        ctx.choices, ctx.max_logits = choices, max_logits
        ctx.save_for_backward(states, weight, bias, unit, *scores)
        return scores.logprobs, scores.entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        states, weight, bias, unit, *own = ctx.saved_tensors
        scores = Scores(*own)
        gradients = ScoreGradients.of(scores, of_logprobs, of_entropies)
        if unit is not None and of_entropies is None:
            return (unit * gradients.logprobs.to(unit.dtype)[:, None], *(None,) * 5)
        by_columns = not ctx.choices.needs_whole_rows

        def start_sum(like: Tensor, *, is_final: bool) -> Tensor:
            """0; float32 or wider unless each tile gives final numbers of its own."""
            return torch.zeros_like(like, dtype=like.dtype if is_final else widen(like.dtype))

        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_states = start_sum(states, is_final=not by_columns) if needs_states else None
        of_weight = start_sum(weight, is_final=by_columns) if needs_weight else None
        of_bias = start_sum(bias, is_final=by_columns) if needs_bias else None
        memory = _reserve(states, weight, ctx.max_logits)
        for rows, columns in _cut_into_tiles(len(states), len(weight), ctx.max_logits, by_columns):
            chosen = ctx.choices.take(rows)
            own_bias = None if bias is None else bias[columns]
            tile = _compute_logits(memory, states[rows], weight[columns], own_bias)
            if by_columns:
                differentiate(tile, "logits", chosen, scores, gradients, columns.start)
            else:
                again = score_logits(tile, chosen, keep_probabilities=True)
                differentiate(tile, "probabilities", chosen, again, gradients.take(rows))
            if of_states is not None:
                _add_product(of_states[rows], tile, weight[columns])
            if of_weight is not None:
                _add_product(of_weight[columns], tile.t(), states[rows])
            if of_bias is not None:
                of_bias[columns] += tile.sum(0, dtype=widen(tile.dtype))
        return (
            None if of_states is None else of_states.to(states.dtype),
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            *(None,) * 3,
        )


def _cut_into_tiles(
    num_targets: int, num_tokens: int, max_logits: int, by_columns: bool
) -> Iterator[tuple[slice, slice]]:
    """The rows and columns of each tile of the logits [targets, tokens]."""
    if not by_columns:
        for rows in _split(num_targets, max_logits // num_tokens):
            yield rows, slice(0, num_tokens)
        return
    num_columns = max_logits // num_targets
    num_columns -= num_columns % _COLUMN_BLOCK if num_columns > _COLUMN_BLOCK else 0
    for columns in _split(num_tokens, num_columns):
        yield slice(0, num_targets), columns


def _reserve(states: Tensor, weight: Tensor, max_logits: int) -> Tensor:
    """Memory for the largest tile. All tiles share it: new memory costs a CPU about as much as
    filling it."""
    return states.new_empty(max(max_logits, len(states), len(weight)))


def _compute_logits(memory: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A tile of logits; those of the tile before are gone."""
    tile = memory[: len(states) * len(weight)].view(len(states), len(weight))
    if bias is None:
        return torch.mm(states, weight.t(), out=tile)
    return torch.addmm(bias, states, weight.t(), out=tile)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _split(total: int, size: int) -> Iterator[slice]:
    """Slices of at most ``size``, at least 1."""
    size = max(1, size)
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
