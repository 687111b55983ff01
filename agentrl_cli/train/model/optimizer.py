"""AdamW on float32 master weights, and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from agentrl_cli.config.train_config import TrainConfig
from agentrl_cli.train.model.sharding import own_part, place_like
from agentrl_cli.train.ranks import SINGLE, Ranks

#: As torch adds it to the norm of gradients that are clipped.
_CLIP_EPSILON = 1e-6
#: Matrices decay; norms and biases, which have one dimension, do not.
_MIN_DECAYED_DIMENSIONS = 2


def compute_learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of ``step`` (from 1): linear warm-up, then constant or a decay.

    The first step already moves by 1 / ``warmup_steps`` of the peak; a decay reaches
    ``min_learning_rate`` at ``total_steps`` and stays there.
    """
    peak, lowest = config.learning_rate, min(config.min_learning_rate, config.learning_rate)
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    if config.learning_rate_schedule == "constant":
        return peak
    num_decay_steps = max(config.total_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / num_decay_steps, 1.0)
    if config.learning_rate_schedule == "linear":
        return peak + (lowest - peak) * progress
    return lowest + (peak - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))


def cast_weights(model: nn.Module, dtype: torch.dtype, kept: Collection[nn.Parameter] = ()) -> None:
    """Casts the parameters of ``model`` but those ``kept``, and leaves its buffers as they are.

    Buffers hold the frequencies of rotary positions: rounded to bfloat16 they would turn two tokens
    that are 4,000 apart by half a radian against each other, and against the engine's.
    """
    kept_ids = {id(parameter) for parameter in kept}
    for parameter in (p for p in model.parameters() if id(p) not in kept_ids):
        parameter.data = parameter.data.to(dtype)


class MasterOptimizer:
    """AdamW whose weights, gradients and state are float32, whatever the model computes in.

    A model in float32 is updated directly. For one in bfloat16, each gradient is added to
    the float32 gradient of its master weight as soon as it is complete (and freed), and
    every update is rounded back into the model: sums over micro-batches and small updates
    are not lost to bfloat16's 8 bits. Of a sharded model the float32 shards are the
    masters, which FSDP rounds when it gathers them.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        compute_dtype: torch.dtype,
        ranks: Ranks = SINGLE,
        kept: Collection[nn.Parameter] = (),
    ) -> None:
        """Casts ``model``, unless it is in shards over several ``ranks``; the masters are of its
        weights before that. The parameters ``kept`` stay float32, and are updated directly."""
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        #: Whether the model computes with roundings of the masters.
        self.has_masters = compute_dtype != torch.float32
        self._ranks = ranks
        self._masters: dict[str, nn.Parameter] = dict(trained)
        self._model_weights: dict[str, nn.Parameter] = {}
        if not self.has_masters:
            model.to(torch.float32)
        elif ranks.count == 1:
            kept_ids = {id(parameter) for parameter in kept}
            cast = {name: p for name, p in trained.items() if id(p) not in kept_ids}
            self._masters |= {
                name: nn.Parameter(weight.detach().to(torch.float32, copy=True))
                for name, weight in cast.items()
            }
            cast_weights(model, compute_dtype, kept)
            self._model_weights = cast
            for name, weight in cast.items():
                weight.register_post_accumulate_grad_hook(partial(self._add_to_master, name))  # type: ignore[no-untyped-call]
        decayed = [p for p in self._masters.values() if p.ndim >= _MIN_DECAYED_DIMENSIONS]
        kept = [p for p in self._masters.values() if p.ndim < _MIN_DECAYED_DIMENSIONS]
        self._adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.weight_decay},
                {"params": kept, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=True,
        )
        self._max_grad_norm = config.max_grad_norm

    @torch.no_grad()
    def clip_gradients(self) -> float:
        """Scales the gradients down to ``max_grad_norm``; their global norm before that.

        Nothing is changed when the norm is not finite: the caller must check.
        """
        parts = [own_part(p.grad) for p in self._masters.values() if p.grad is not None]
        own = float(torch.nn.utils.get_total_norm(parts)) if parts else 0.0
        norm = math.sqrt(self._ranks.sum([own**2])[0])
        if math.isfinite(norm):
            scale = min(self._max_grad_norm / (norm + _CLIP_EPSILON), 1.0)
            for part in parts:
                part.mul_(scale)
        return norm

    def step(self, learning_rate: float) -> None:
        """One update, after which the gradients are gone."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.zero_gradients()
        self._copy_to_model()

    def zero_gradients(self) -> None:
        """Forgets the gradients."""
        self._adamw.zero_grad(set_to_none=True)
        for weight in self._model_weights.values():
            weight.grad = None

    def master_weights(self) -> dict[str, Tensor]:
        """The float32 weights by parameter name; this rank's shards of them."""
        return {name: weight.detach() for name, weight in self._masters.items()}

    @torch.no_grad()
    def load_master_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replaces the float32 weights, and the model's with them, by whole ``weights``.

        Raises:
            KeyError: a weight is missing.
        """
        for name, master in self._masters.items():
            master.copy_(place_like(weights[name], master))
        self._copy_to_model()

    def state_tensors(self) -> dict[str, Tensor]:
        """AdamW's state, as ``<parameter name>/<what>``; empty before the first update. Of
        shards, this rank's."""
        state = self._adamw.state
        return {
            f"{name}/{key}": value
            for name, master in self._masters.items()
            for key, value in state.get(master, {}).items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces AdamW's state by what :meth:`state_tensors` gave, whole."""
        masters = self._masters
        self._adamw.state.clear()
        for full_name, value in tensors.items():
            name, _, key = full_name.rpartition("/")
            self._adamw.state[masters[name]][key] = place_like(value, masters[name])

    def _add_to_master(self, name: str, weight: Tensor) -> None:
        gradient, weight.grad = weight.grad, None
        if gradient is None:
            return
        master = self._masters[name]
        if master.grad is None:
            master.grad = gradient.to(torch.float32)
        else:
            master.grad += gradient

    @torch.no_grad()
    def _copy_to_model(self) -> None:
        for name, weight in self._model_weights.items():
            weight.copy_(self._masters[name])
