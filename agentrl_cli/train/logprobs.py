"""Logprobs and entropies of sampled tokens, the output head applied only where they are.

They are those of the distribution that was sampled from, after temperature and top_p, and
so comparable with the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import log_softmax, nll_loss
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentrl_cli.errors import ModelError
from agentrl_cli.train.attention import packing_arguments
from agentrl_cli.train.masks import TokenMasks
from agentrl_cli.train.packing import MicroBatch, pack_samples
from agentrl_cli.train.samples import Sample

Head = Callable[[Tensor], Tensor]

#: Most logits that stand in memory at once: 128 MiB in float32.
MAX_LOGITS = 2**25

#: Settings of architectures whose logits are more than the output head of the hidden states.
_LOGIT_SETTINGS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs and entropies of targets: float32 nats, shape [targets]."""

    logprobs: Tensor
    entropies: Tensor
    """Without gradient."""


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
        **packing_arguments(batch.lengths, batch.input_ids.device),
    ).last_hidden_state[0]
    return hidden_states[batch.targets.sources]


@torch.no_grad()
def score_samples(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    max_tokens: int,
    device: torch.device,
    *,
    replaced: Mapping[str, Tensor] | None = None,
) -> dict[int, Tensor]:
    """Logprobs of each sample's targets, float32 [targets] on the CPU, by ``id(sample)``.

    ``max_tokens`` is the budget of a micro-batch. Parameters in ``replaced`` stand for the
    model's own of that name, and for those of that name alone where two are tied.
    """
    scoring = ScoringModule(model)
    substitutes = {f"model.{name}": tensor for name, tensor in (replaced or {}).items()}
    scored: dict[int, Tensor] = {}
    for batch in pack_samples(samples, max_tokens, device):
        output = functional_call(scoring, substitutes, (batch,), tie_weights=False)
        parts = torch.split(output.logprobs.cpu(), [s.num_targets for s in batch.samples])
        scored |= {id(sample): part for sample, part in zip(batch.samples, parts, strict=True)}
    return scored


class ScoringModule(nn.Module):
    """:func:`compute_micro_batch_logprobs` as a module, whose parameters can be replaced."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch) -> TokenLogprobs:
        return compute_micro_batch_logprobs(self.model, batch)


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
    """Logprobs and entropies of ``target_ids``, in chunks that hold ``max_logits`` at most.

    Args:
        hidden_states: [tokens, width], each predicting the target of its row.
        head: the output head, [tokens, width] to [tokens, vocabulary].
        target_ids: int64 [tokens].
        temperatures: float32 [tokens], above 0.
        top_ps: float32 [tokens]; below 1, the distribution is renormalized within the
            nucleus of these logits, in which the target is always kept.
        masks: what constrained targets were among; put on before temperature and nucleus.
        max_logits: bounds the rows of a chunk. With several chunks, each is computed again
            in the backward pass, so that the logits of one chunk alone stand at a time.
    """
    if target_ids.numel() == 0:
        # Connected to the hidden states, so that a backward pass has a path.
        nothing = hidden_states.float().sum(-1)
        return TokenLogprobs(nothing, nothing.detach())
    with torch.no_grad():
        vocabulary_size = head(hidden_states[:1]).shape[-1]
        # Most batches have neither, and both cost a pass over the logits.
        has_temperature, has_nucleus = bool((temperatures != 1).any()), bool((top_ps < 1).any())
    rows = max(1, max_logits // vocabulary_size)
    if target_ids.numel() <= rows:
        return TokenLogprobs(
            *_compute_chunk(
                head,
                hidden_states,
                target_ids,
                temperatures,
                top_ps,
                masks,
                has_temperature,
                has_nucleus,
            )
        )
    chunks = [
        checkpoint(_compute_chunk, head, *chunk, has_temperature, has_nucleus, use_reentrant=False)
        for chunk in zip(
            torch.split(hidden_states, rows),
            torch.split(target_ids, rows),
            torch.split(temperatures, rows),
            torch.split(top_ps, rows),
            _split_masks(masks, target_ids.numel(), rows),
            strict=True,
        )
    ]
    return TokenLogprobs(
        torch.cat([logprobs for logprobs, _ in chunks]),
        torch.cat([entropies for _, entropies in chunks]),
    )


def _split_masks(
    masks: TokenMasks | None, num_tokens: int, rows: int
) -> Sequence[TokenMasks | None]:
    """The masks of each chunk; None: none of its tokens was constrained."""
    if masks is None:
        return [None] * -(-num_tokens // rows)
    parts = torch.split(masks.numbers, rows)
    return [TokenMasks(part, masks.table) if part.any() else None for part in parts]


def _compute_chunk(
    head: Head,
    hidden_states: Tensor,
    target_ids: Tensor,
    temperatures: Tensor,
    top_ps: Tensor,
    masks: TokenMasks | None,
    has_temperature: bool,
    has_nucleus: bool,
) -> tuple[Tensor, Tensor]:
    logits = head(hidden_states).float()
    if masks is not None:
        allowed = masks.table.unpack(masks.numbers, logits.shape[-1])
        logits = logits.masked_fill(~allowed, -torch.inf)
    if has_temperature:
        logits = logits / temperatures[:, None]
    if has_nucleus:
        removed = find_outside_nucleus(logits.detach(), top_ps, target_ids)
        logits = logits.masked_fill(removed, -torch.inf)
    logprobs = log_softmax(logits, dim=-1)
    entropies = _compute_entropies(logprobs.detach(), has_nucleus or masks is not None)
    return -nll_loss(logprobs, target_ids, reduction="none"), entropies


def find_outside_nucleus(logits: Tensor, top_ps: Tensor, target_ids: Tensor) -> Tensor:
    """True for the tokens that top_p sampling removes: bool [tokens, vocabulary].

    The nucleus is the smallest set of the most probable tokens whose probabilities reach
    top_p (arXiv 1904.09751, equation 2), the first of equal ones going before; the target is
    always in it.
    """
    ordered, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(-1) - ordered
    removed = (mass_before >= top_ps[:, None]) & (top_ps[:, None] < 1.0)
    removed[:, 0] = False
    return removed.scatter(1, order, removed).scatter(1, target_ids[:, None], False)


@torch.no_grad()
def _compute_entropies(logprobs: Tensor, has_impossible: bool) -> Tensor:
    weighted = logprobs.exp().mul_(logprobs)
    if has_impossible:
        # 0 x -inf of what cannot be sampled is NaN; its limit is 0.
        weighted.masked_fill_(logprobs == -torch.inf, 0.0)
    return -weighted.sum(-1)
