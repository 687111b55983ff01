"""Logprobs and entropies of sampled tokens, the output head applied only where they are.

They are those of the distribution that was sampled from, after temperature and top_p, and
so comparable with the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from agentrl_cli.errors import ModelError
from agentrl_cli.train.attention import AttentionLayout
from agentrl_cli.train.fused_head import Head, is_linear, score_with_any, score_with_linear
from agentrl_cli.train.masks import TokenMasks
from agentrl_cli.train.packing import MicroBatch, Packing, pack_samples
from agentrl_cli.train.samples import Sample
from agentrl_cli.train.token_scores import build_choices

#: Most logits that stand in memory at once: 128 MiB in float32.
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


@torch.no_grad()
def score_samples(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    max_tokens: int,
    device: torch.device,
    *,
    packing: Packing = "prefix_tree",
    replaced: Mapping[str, Tensor] | None = None,
) -> dict[int, Tensor]:
    """Logprobs of each sample's targets, float32 [targets] on the CPU, by ``id(sample)``.

    ``max_tokens`` is the budget of a micro-batch, ``packing`` how it is filled. Parameters in
    ``replaced`` stand for the model's own of that name, and for those of that name alone where
    two are tied.
    """
    scoring = ScoringModule(model)
    substitutes = {f"model.{name}": tensor for name, tensor in (replaced or {}).items()}
    scored: dict[int, Tensor] = {}
    for batch in pack_samples(samples, max_tokens, device, packing):
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
