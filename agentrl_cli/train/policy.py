"""The policy in training: its model, its optimizer, and the model that a KL term holds on to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.end_tokens import find_end_ids
from agentrl_cli.engine.grammar import TokenGrammars
from agentrl_cli.errors import StoreError
from agentrl_cli.models.frozen import freeze_weights
from agentrl_cli.models.lora import add_adapter
from agentrl_cli.models.pretrained import without_progress_bars
from agentrl_cli.store.files import store_errors
from agentrl_cli.train.checkpoint import (
    STATE_DIR,
    load_optimizer_state,
    load_weights,
    save_optimizer_state,
)
from agentrl_cli.train.layers import prepare_layers, set_checkpointing
from agentrl_cli.train.logprobs import (
    TokenLogprobs,
    check_head,
    compute_micro_batch_logprobs,
    score_samples,
)
from agentrl_cli.train.masks import MaskMaker
from agentrl_cli.train.optimizer import MasterOptimizer, cast_weights
from agentrl_cli.train.packing import MicroBatch, pack_samples
from agentrl_cli.train.published import choose_published
from agentrl_cli.train.ranks import Ranks
from agentrl_cli.train.samples import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Trained(Protocol):
    """A model that is trained, with its optimizer: the policy, or its critic."""

    @property
    def role(self) -> Literal["policy", "critic"]:
        """Which of the two it is."""
        ...

    @property
    def optimizer(self) -> MasterOptimizer:
        """Of its weights."""
        ...

    def pack(self, samples: Sequence[Sample]) -> Sequence[MicroBatch]:
        """The micro-batches of ``samples`` that this process passes through the model."""
        ...

    def catch_up(self) -> None:
        """Called after the last backward pass of a minibatch: other ranks may have made more."""
        ...


class Policy:
    """A model whose logprobs are trained, on one device."""

    role: Literal["policy", "critic"] = "policy"

    def __init__(
        self,
        model: PreTrainedModel,
        config: ExperimentConfig,
        *,
        reference_model: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase | None,
        device: torch.device,
        published: Literal["whole", "adapter"],
    ) -> None:
        """Takes ``model`` over; the arguments are those of :class:`Learner`."""
        lora = config.model.lora
        self.model = model
        self.device = device
        self._config = config
        self._tokenizer = tokenizer
        self._grammars: TokenGrammars | None = None
        self._reference = reference_model if lora is None else None
        for one in (model, self._reference):
            if one is not None:
                check_head(one)
                prepare_layers(one, device, config.train)
        if lora is not None:
            add_adapter(model, lora, seed=config.seed)
        freeze_weights(model, config.model.frozen)
        self._published = choose_published(model, published, has_adapter=lora is not None)
        dtype = _DTYPES[config.model.dtype]
        if self._reference is not None:
            cast_weights(self._reference, dtype)
            self._reference.eval().requires_grad_(False)
        self.optimizer = self._build_optimizer(dtype)
        set_checkpointing(model, enabled=config.train.gradient_checkpointing)

    def _build_optimizer(self, dtype: torch.dtype) -> MasterOptimizer:
        """The optimizer; models compute in ``dtype`` from now on."""
        return MasterOptimizer(self.model, self._config.train, dtype)

    def pack(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """The micro-batches of ``samples``."""
        train = self._config.train
        return pack_samples(samples, train.micro_batch_tokens, self.device, train.packing)

    def catch_up(self) -> None:
        """Nothing: this process trains alone."""

    def forward(self, batch: MicroBatch) -> TokenLogprobs:
        """Logprobs of the micro-batch's targets, with gradient."""
        return compute_micro_batch_logprobs(self.model, batch)

    def score(
        self, samples: Sequence[Sample], replaced: Mapping[str, Tensor] | None = None
    ) -> dict[int, Tensor]:
        """Logprobs of each sample's targets, float32 [targets] on the CPU, by ``id(sample)``.

        Tensors in ``replaced`` stand for the published ones of that name; of two names of one
        tensor, for the one given alone.
        """
        located: dict[str, Tensor] = {}
        for name, tensor in (replaced or {}).items():
            located |= self._published.locate(name, tensor)
        return self._score(self.model, samples, located)

    def score_reference(self, samples: Sequence[Sample]) -> dict[int, Tensor]:
        """The same by the reference model; with an adapter, by the model without it."""
        if self._reference is not None:
            return self._score(self._reference, samples)
        self.model.disable_adapters()
        try:
            return self._score(self.model, samples)
        finally:
            self.model.enable_adapters()

    def build_mask_maker(self) -> MaskMaker | None:
        """What makes the masks of constrained tokens; its table is the step's own."""
        if self._tokenizer is None:
            return None
        if self._grammars is None:
            num_logits = self.model.get_output_embeddings().weight.shape[0]
            end_ids = find_end_ids(self.model, self._tokenizer)
            self._grammars = TokenGrammars(self._tokenizer, num_logits, end_ids)
        return MaskMaker(self._grammars)

    def weights(self) -> dict[str, Tensor]:
        """The published tensors; see :meth:`Learner.weights`."""
        return self._published.tensors()

    def published_names(self) -> Mapping[str, str]:
        """Every name of a published tensor -> the one it has in :meth:`weights`."""
        return self._published.names()

    def save(self, folder: Path) -> None:
        """Writes weights, tokenizer and optimizer; see :meth:`Learner.save`."""
        self._write_weights(folder, self.model)
        optimizer = self.optimizer
        masters = optimizer.master_weights() if optimizer.has_masters else None
        save_optimizer_state(folder / STATE_DIR, optimizer.state_tensors(), masters)

    def _write_weights(self, folder: Path, model: PreTrainedModel) -> None:
        """Writes the weights of ``model``, or its adapter's, and the tokenizer."""
        with store_errors(folder), without_progress_bars():
            folder.mkdir(parents=True, exist_ok=True)
            model.save_pretrained(folder)
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Takes over what :meth:`save` wrote."""
        optimizer_state, masters = load_optimizer_state(folder / STATE_DIR)
        try:
            weights = masters or load_weights(self.model, folder)
            self.optimizer.load_master_weights(weights)
            self.optimizer.load_state_tensors(optimizer_state)
        except (KeyError, RuntimeError) as error:
            raise StoreError(f"the checkpoint {folder} is of another model: {error}") from error

    def describe(self) -> dict[str, Any]:
        """What must be equal where a checkpoint is loaded."""
        lora = self._config.model.lora
        return {
            "dtype": self._config.model.dtype,
            "model_class": type(self.model).__name__,
            "lora": None if lora is None else lora.model_dump(mode="json"),
            "frozen": sorted(self._config.model.frozen) or None,
        }

    def _score(
        self,
        model: PreTrainedModel,
        samples: Sequence[Sample],
        replaced: Mapping[str, Tensor] | None = None,
    ) -> dict[int, Tensor]:
        train = self._config.train
        return score_samples(
            model,
            samples,
            train.micro_batch_tokens,
            self.device,
            packing=train.packing,
            replaced=replaced,
        )


def open_policy(
    model: PreTrainedModel, config: ExperimentConfig, ranks: Ranks, **arguments: Any
) -> Policy:
    """A policy of this process alone, or one whose weights lie in shards over the ranks."""
    if ranks.count == 1:
        return Policy(model, config, **arguments)
    # Seconds to import, and no use to a process that trains alone.
    from agentrl_cli.train.process_ranks import ProcessRanks
    from agentrl_cli.train.sharded_policy import ShardedPolicy

    assert isinstance(ranks, ProcessRanks)
    return ShardedPolicy(model, config, ranks=ranks, **arguments)
