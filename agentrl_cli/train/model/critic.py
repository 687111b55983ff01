"""The critic: a second model, which says what return to expect of each action's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl_cli.config.algorithm_config import CriticConfig
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import ModelError, StoreError
from agentrl_cli.models.lora import add_adapter
from agentrl_cli.models.pretrained import freeze_weights
from agentrl_cli.train.checkpoint import describe_damage, load_optimizer_state
from agentrl_cli.train.data.packing import MicroBatch
from agentrl_cli.train.data.samples import Sample
from agentrl_cli.train.loss.gae import ValueTargets, compute_value_loss
from agentrl_cli.train.model.layers import prepare_layers, set_checkpointing
from agentrl_cli.train.model.optimizer import MasterOptimizer, compute_learning_rate
from agentrl_cli.train.model.output_head import compute_target_states
from agentrl_cli.train.model.trained_model import TrainedModel
from agentrl_cli.train.monitor.update_metrics import UpdateMetrics
from agentrl_cli.train.ranks import SINGLE, Ranks

#: The critic's folder in a checkpoint.
CRITIC_DIR = "critic"


class ValueHead(nn.Module):
    """A linear map to one number, in float32: in bfloat16 a value near 1 would be off by up to
    0.004, and small updates of so few weights would be lost."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float32))

    def forward(self, states: Tensor) -> Tensor:
        # Not a column of a matrix: FSDP warns of modules that give a view.
        return states.float() @ self.weight[0] + self.bias


class ValueModel(nn.Module):
    """A language model's layers, and a linear head that gives one number instead of logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Takes over the layers of ``model``; its output head is dropped. The new head is 0, so
        that a new critic expects nothing."""
        super().__init__()
        layers = model.base_model
        if not isinstance(layers, PreTrainedModel):
            raise ModelError(
                f"train.critic.path: {type(model).__name__} cannot be used without its output "
                "head. Allowed: architectures such as Qwen2, Qwen3, Llama and Mistral"
            )
        self.model = layers
        self.head = ValueHead(layers.config.get_text_config().hidden_size)

    def forward(self, batch: MicroBatch) -> Tensor:
        """The value of the state in which each target was sampled: float32 [targets]."""
        values: Tensor = self.head(compute_target_states(self.model, batch))
        return values


class Critic(TrainedModel[Tensor]):
    """A value model in training, on one device or sharded; its values are float32 [targets]."""

    role = "critic"

    def __init__(
        self,
        model: PreTrainedModel,
        config: ExperimentConfig,
        device: torch.device,
        ranks: Ranks = SINGLE,
    ) -> None:
        """Takes ``model`` over.

        With ``config.model.lora`` an adapter and the head alone are trained; what
        ``config.model.frozen`` names stays as it is, as in the policy.

        Raises:
            MissingExtraError: an adapter is asked for and peft is not installed.
            ModelError: an architecture that agentrl does not support.
            ValueError: ``config`` has no critic.
        """
        if config.train.critic is None:
            raise ValueError("the configuration has no train.critic")
        self._config: CriticConfig = config.train.critic
        train = config.train.model_copy(update={"learning_rate": self._config.learning_rate})
        # While it has the names that a user knows.
        freeze_weights(model, config.model.frozen)
        self.value_model = ValueModel(model)
        layers = self.value_model.model
        prepare_layers(layers, device, train)
        self.value_model.to(device)
        if config.model.lora is not None:
            add_adapter(layers, config.model.lora, seed=config.seed)
        dtype = getattr(torch, config.model.dtype)
        super().__init__(
            self.value_model,
            layers,
            train=train,
            dtype=dtype,
            ranks=ranks,
            device=device,
            take_values=lambda values: values,
        )
        self.optimizer = MasterOptimizer(
            self.value_model, train, dtype, ranks, kept=[*self.value_model.head.parameters()]
        )
        set_checkpointing(layers, enabled=train.gradient_checkpointing)

    def compute_learning_rate(self, step: int) -> float:
        """The critic's learning rate of ``step``, from 1."""
        return compute_learning_rate(self._train, step)

    def learns_alone(self, step: int) -> bool:
        """True for the first steps, in which the policy stays as it is."""
        return step <= self._config.warmup_steps

    def build_loss(
        self, samples: Sequence[Sample], targets: ValueTargets, metrics: UpdateMetrics
    ) -> Callable[[MicroBatch], Tensor]:
        """What gives each micro-batch's part in the value loss of the minibatch ``samples``, every
        target of which counts alike, and reports it to ``metrics``."""
        num_targets = sum(sample.num_targets for sample in samples)

        def compute_part(batch: MicroBatch) -> Tensor:
            old_values, returns = batch.join(targets.values), batch.join(targets.returns)
            values = self.forward(batch)
            output = compute_value_loss(
                values,
                old_values,
                returns,
                clip_range=self._config.clip_range,
                num_targets=num_targets,
            )
            metrics.add_critic_micro_batch(batch, output)
            return output.loss

        return compute_part

    def save(self, folder: Path) -> None:
        """Writes what is trained and the optimizer into ``critic/`` of a checkpoint.

        Raises:
            StoreError: it cannot be written.
        """
        self.save_state(folder / CRITIC_DIR, with_masters=True)

    def load(self, folder: Path) -> None:
        """Takes over what :meth:`save` wrote.

        Raises:
            StoreError: it is damaged, or of another model.
        """
        state, weights = load_optimizer_state(folder / CRITIC_DIR)
        if weights is None:
            missing = FileNotFoundError(f"{CRITIC_DIR}/ has no weights")
            raise StoreError(describe_damage(folder, missing))
        self.load_state(folder, lambda: weights, state)

    def describe(self) -> str:
        """What must be equal where a checkpoint is loaded."""
        return type(self.value_model.model).__name__
