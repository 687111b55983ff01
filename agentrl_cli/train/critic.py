"""The critic: a second model, which says what return to expect of each action's state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl_cli.config.critic import CriticConfig
from agentrl_cli.config.experiment import ExperimentConfig, TrainConfig
from agentrl_cli.errors import ModelError, StoreError
from agentrl_cli.models.frozen import freeze_weights
from agentrl_cli.models.lora import add_adapter
from agentrl_cli.train.checkpoint import (
    describe_damage,
    load_optimizer_state,
    save_optimizer_state,
)
from agentrl_cli.train.faults import ComputePart, Part
from agentrl_cli.train.layers import prepare_layers, set_checkpointing
from agentrl_cli.train.logprobs import compute_target_states
from agentrl_cli.train.optimizer import MasterOptimizer, compute_learning_rate
from agentrl_cli.train.packing import MicroBatch, pack_samples
from agentrl_cli.train.ranks import Ranks
from agentrl_cli.train.samples import Sample
from agentrl_cli.train.update_metrics import UpdateMetrics
from agentrl_cli.train.value_loss import compute_value_loss
from agentrl_cli.train.value_targets import ValueTargets

#: The critic's folder in a checkpoint.
CRITIC_DIR = "critic"


class ValueModel(nn.Module):
    """A language model's layers, and a linear head that gives one number instead of logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Takes over the layers of ``model``; its output head is let go of. The new head is 0, so
        that a new critic expects nothing."""
        super().__init__()
        layers = model.base_model
        if not isinstance(layers, PreTrainedModel):
            raise ModelError(
                f"train.critic.path: {type(model).__name__} cannot be used without its output "
                "head. Allowed: architectures such as Qwen2, Qwen3, Llama and Mistral"
            )
        self.model = layers
        # On "meta" nothing is drawn from the generator, which belongs to the run.
        width = layers.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, device="meta").to_empty(device="cpu")
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch) -> Tensor:
        """The value of the state in which each target was sampled: float32 [targets]."""
        states = compute_target_states(self.model, batch)
        # In bfloat16 a value near 1 would be off by up to 0.004.
        # Not a column of a matrix: FSDP warns of modules that give a view.
        return states.float() @ self.head.weight[0].float() + self.head.bias.float()


class Critic:
    """A value model in training, on one device."""

    role: Literal["policy", "critic"] = "critic"

    def __init__(
        self, model: PreTrainedModel, config: ExperimentConfig, device: torch.device
    ) -> None:
        """Takes ``model`` over.

        With ``config.model.lora`` an adapter and the head alone are trained; what
        ``config.model.frozen`` names stays as it is, as in the policy.

        Raises:
            MissingExtraError: an adapter is asked for and peft is not installed.
            ModelError: an architecture that agentrl cannot follow.
            ValueError: ``config`` has no critic.
        """
        if config.train.critic is None:
            raise ValueError("the configuration has no train.critic")
        self._config: CriticConfig = config.train.critic
        self.device = device
        self._train: TrainConfig = config.train.model_copy(
            update={"learning_rate": self._config.learning_rate}
        )
        # While it has the names that a user knows.
        freeze_weights(model, config.model.frozen)
        self.value_model = ValueModel(model)
        layers = self.value_model.model
        prepare_layers(layers, device, self._train)
        self.value_model.to(device)
        if config.model.lora is not None:
            add_adapter(layers, config.model.lora, seed=config.seed)
        self.optimizer = self._build_optimizer(getattr(torch, config.model.dtype))
        set_checkpointing(layers, enabled=self._train.gradient_checkpointing)

    def _build_optimizer(self, dtype: torch.dtype) -> MasterOptimizer:
        """The optimizer; the model computes in ``dtype`` from now on."""
        return MasterOptimizer(self.value_model, self._train, dtype)

    def compute_learning_rate(self, step: int) -> float:
        """The critic's learning rate of ``step``, from 1."""
        return compute_learning_rate(self._train, step)

    def learns_alone(self, step: int) -> bool:
        """True for the first steps, in which the policy stays as it is."""
        return step <= self._config.warmup_steps

    def pack(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """The micro-batches of ``samples``."""
        return pack_samples(
            samples, self._train.micro_batch_tokens, self.device, self._train.packing
        )

    def catch_up(self) -> None:
        """Nothing: this process trains alone."""

    def forward(self, batch: MicroBatch) -> Tensor:
        """The values of the micro-batch's targets, float32 [targets], with gradient."""
        values: Tensor = self.value_model(batch)
        return values

    def build_loss(
        self, samples: Sequence[Sample], targets: ValueTargets, metrics: UpdateMetrics
    ) -> ComputePart:
        """What gives each micro-batch's part in the value loss of the minibatch ``samples``, every
        target of which counts alike, and reports it to ``metrics``."""
        num_targets = sum(sample.num_targets for sample in samples)

        def compute_part(batch: MicroBatch) -> Part:
            old_values, returns = targets.join(batch)
            values = self.forward(batch)
            output = compute_value_loss(
                values,
                old_values,
                returns,
                clip_range=self._config.clip_range,
                num_targets=num_targets,
            )
            metrics.add_critic_micro_batch(batch, output)
            made_of = {"values": values, "old_values": old_values, "returns": returns}
            return Part(output.loss, made_of)

        return compute_part

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> dict[int, Tensor]:
        """The values of each sample's targets, float32 [targets] on the CPU, by ``id(sample)``."""
        scored: dict[int, Tensor] = {}
        for batch in self.pack(samples):
            parts = torch.split(self.forward(batch).cpu(), [s.num_targets for s in batch.samples])
            scored |= {id(sample): part for sample, part in zip(batch.samples, parts, strict=True)}
        return scored

    def save(self, folder: Path) -> None:
        """Writes what is trained and the optimizer into ``critic/`` of a checkpoint.

        Raises:
            StoreError: it cannot be written.
        """
        save_optimizer_state(
            folder / CRITIC_DIR, self.optimizer.state_tensors(), self.optimizer.master_weights()
        )

    def load(self, folder: Path) -> None:
        """Takes over what :meth:`save` wrote.

        Raises:
            StoreError: it is damaged, or of another model.
        """
        optimizer_state, weights = load_optimizer_state(folder / CRITIC_DIR)
        if weights is None:
            missing = FileNotFoundError(f"{CRITIC_DIR}/ has no weights")
            raise StoreError(describe_damage(folder, missing))
        try:
            self.optimizer.load_master_weights(weights)
            self.optimizer.load_state_tensors(optimizer_state)
        except (KeyError, RuntimeError) as error:
            raise StoreError(
                f"the critic in the checkpoint {folder} is of another model: {error}"
            ) from error

    def describe(self) -> str:
        """What must be equal where a checkpoint is loaded."""
        return type(self.value_model.model).__name__


def open_critic(
    model: PreTrainedModel, config: ExperimentConfig, ranks: Ranks, device: torch.device
) -> Critic:
    """A critic of this process alone, or one whose weights lie in shards over the ranks."""
    if ranks.count == 1:
        return Critic(model, config, device)
    # Seconds to import, and no use to a process that trains alone.
    from agentrl_cli.train.process_ranks import ProcessRanks
    from agentrl_cli.train.sharded_critic import ShardedCritic

    assert isinstance(ranks, ProcessRanks)
    return ShardedCritic(model, config, device, ranks)


def describe_critic(critic: Critic | None) -> dict[str, Any]:
    """The fact of a checkpoint that says what its critic is, if it has one."""
    return {"critic": None if critic is None else critic.describe()}
