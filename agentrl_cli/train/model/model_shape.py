"""The sizes of a model that memory depends on, without its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl_cli.errors import ModelError
from agentrl_cli.models.pretrained import freeze_weights, without_progress_bars
from agentrl_cli.train.model.layers import find_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Counts and widths of one model."""

    num_parameters: int
    """All weights; tied ones once."""
    num_trained: int
    """Those that ``model.frozen`` leaves to train."""
    num_layers: int
    layer_parameters: int
    """Of the largest layer."""
    hidden_size: int
    intermediate_size: int
    """Of the feed-forward part; with experts, of those that one token passes."""
    query_size: int
    """Heads times their width."""
    key_size: int
    """Heads of keys times their width; the values' is the same."""
    vocab_size: int
    linear_widths: Mapping[str, int]
    """Inputs plus outputs of all linear layers, by the layers' name (``q_proj``); the output head
    is not among them."""

    @property
    def root_parameters(self) -> int:
        """Those outside the layers: embeddings, output head, last norm."""
        return self.num_parameters - self.num_layers * self.layer_parameters

    def count_adapter_parameters(self, rank: int, targets: Collection[str] | None) -> int:
        """Weights of an adapter of ``rank`` on these layers; None: on all."""
        widths = self.linear_widths
        return rank * sum(w for name, w in widths.items() if targets is None or name in targets)


def load_shape(path: str, frozen: Collection[str] = ()) -> ModelShape:
    """The shape of a folder or hub id, from its config.json alone.

    Raises:
        ModelError: it cannot be had, is of no architecture that transformers knows, or ``frozen``
            names no weights.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        with without_progress_bars(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{path}: its config.json cannot be used: {reason}") from error
    freeze_weights(model, [*frozen])
    text = config.get_text_config()
    layers = [sum(p.numel() for p in layer.parameters()) for layer in find_layers(model)]
    head, widths = model.get_output_embeddings(), Counter[str]()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            widths[name.rpartition(".")[2]] += module.in_features + module.out_features
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    num_keys = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return ModelShape(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        num_layers=text.num_hidden_layers,
        layer_parameters=max(layers, default=0),
        hidden_size=text.hidden_size,
        intermediate_size=_find_intermediate_size(text),
        query_size=text.num_attention_heads * head_size,
        key_size=num_keys * head_size,
        vocab_size=text.vocab_size,
        linear_widths=widths,
    )


def _find_intermediate_size(text: object) -> int:
    of_expert = getattr(text, "moe_intermediate_size", None)
    if of_expert:
        return int(of_expert) * int(getattr(text, "num_experts_per_tok", 1))
    return int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)  # type: ignore[attr-defined]
