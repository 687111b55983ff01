"""The policy in training: its model, its optimizer, and the reference model of a KL term."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.grammar import TokenGrammars, find_end_ids
from agentrl_cli.models.lora import add_adapter
from agentrl_cli.models.pretrained import freeze_weights, without_progress_bars
from agentrl_cli.store.atomic_files import store_errors
from agentrl_cli.train.checkpoint import STATE_DIR, load_optimizer_state, load_weights
from agentrl_cli.train.data.packing import MicroBatch
from agentrl_cli.train.data.samples import Sample
from agentrl_cli.train.masks import MaskMaker
from agentrl_cli.train.model.float32_pass import computing_in_float32
from agentrl_cli.train.model.layers import prepare_layers, set_checkpointing
from agentrl_cli.train.model.optimizer import MasterOptimizer, cast_weights
from agentrl_cli.train.model.output_head import (
    TokenLogprobs,
    check_head,
    compute_micro_batch_logprobs,
)
from agentrl_cli.train.model.sharding import WholeCopies
from agentrl_cli.train.model.trained_model import ModelPasses, PackedSamples, TrainedModel
from agentrl_cli.train.publish import collect_published
from agentrl_cli.train.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CPU = torch.device("cpu")


class ScoringModule(nn.Module):
    """:func:`compute_micro_batch_logprobs` as a module, which can be sharded."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch) -> TokenLogprobs:
        return compute_micro_batch_logprobs(self.model, batch)


class Policy(TrainedModel[TokenLogprobs]):
    """A model whose logprobs are trained, on one device or sharded over several ranks.

    All ranks call the same methods in the same order. Whole weights are returned and written on
    rank 0 alone.
    """

    role = "policy"

    def __init__(
        self,
        model: PreTrainedModel,
        config: ExperimentConfig,
        *,
        reference_model: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase | None,
        device: torch.device,
        published: Literal["whole", "adapter"],
        ranks: Ranks,
    ) -> None:
        """Takes ``model`` over; the arguments are those of :class:`Learner`. Sends nothing, so
        that ranks may load their models one after the other."""
        self.model = model
        self._config = config
        self._tokenizer = tokenizer
        self._grammars: TokenGrammars | None = None
        self._published: Literal["whole", "adapter"] = published
        self._has_adapter = config.model.lora is not None
        reference = None if self._has_adapter else reference_model
        for one in (model, reference):
            if one is not None:
                check_head(one)
                prepare_layers(one, device, config.train)
        if config.model.lora is not None:
            add_adapter(model, config.model.lora, seed=config.seed)
        freeze_weights(model, config.model.frozen)
        dtype = getattr(torch, config.model.dtype)
        arguments: dict[str, Any] = {
            "train": config.train,
            "dtype": dtype,
            "ranks": ranks,
            "device": device,
            "take_values": lambda output: output.logprobs,
        }
        self._reference: ModelPasses[TokenLogprobs] | None = None
        if reference is not None:
            cast_weights(reference, dtype)
            reference.eval().requires_grad_(False)
            self._reference = ModelPasses(ScoringModule(reference), reference, **arguments)
        self._copies = WholeCopies(model, dtype, ranks)
        super().__init__(ScoringModule(model), model, **arguments)
        self.optimizer = MasterOptimizer(model, config.train, dtype, ranks)
        set_checkpointing(model, enabled=config.train.gradient_checkpointing)

    def score_reference(self, samples: Sequence[Sample]) -> dict[int, Tensor]:
        """As :meth:`score`, by the reference model; with an adapter, by the model without it."""
        with self._use_reference() as passes:
            return passes.score(samples)

    def score_packed_reference(self, packed: PackedSamples) -> dict[int, Tensor]:
        """As :meth:`score_packed`, by the reference model."""
        with self._use_reference() as passes:
            return passes.score_packed(packed)

    @contextmanager
    def _use_reference(self) -> Iterator[ModelPasses[TokenLogprobs]]:
        if self._reference is not None:
            yield self._reference
            return
        self.model.disable_adapters()
        try:
            yield self
        finally:
            self.model.enable_adapters()

    def score_in_float32(self, samples: Sequence[Sample]) -> dict[int, Tensor]:
        """As :meth:`score`, computed in float32 from the weights as they are."""
        with computing_in_float32(self.model):
            return self.score(samples)

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
        """The published tensors on rank 0, nothing on the others; see :meth:`Learner.weights`.

        Copies of shards lie where the model is, as a transfer by NCCL needs them, and on the CPU
        where files are asked for: a large model has no room for a whole copy on one GPU.
        """
        to_files = self._config.engine.weight_transfer.kind == "disk"
        whole = self._copies.gather(
            _CPU if to_files else self.device,
            _is_of_adapter if self._published == "adapter" else None,
        )
        if whole is None:
            return {}
        return collect_published(whole, self._published)

    def save(self, folder: Path) -> None:
        """Writes weights, tokenizer and optimizer; see :meth:`Learner.save`."""
        whole = self._copies.gather(_CPU, _is_of_adapter if self._has_adapter else None)
        if whole is not None:
            with store_errors(folder), without_progress_bars():
                folder.mkdir(parents=True, exist_ok=True)
                whole.save_pretrained(folder)
                if self._tokenizer is not None:
                    self._tokenizer.save_pretrained(folder)
        # One whole thing is in memory at a time: this copy, or one of those below.
        del whole
        self.save_state(folder / STATE_DIR, with_masters=self.optimizer.has_masters)

    def load(self, folder: Path) -> None:
        """Takes over what :meth:`save` wrote, with any number of ranks."""
        state, masters = load_optimizer_state(folder / STATE_DIR)
        self.load_state(folder, lambda: masters or load_weights(self.model, folder), state)

    def describe(self) -> dict[str, Any]:
        """What must be equal where a checkpoint is loaded."""
        lora = self._config.model.lora
        return {
            "dtype": self._config.model.dtype,
            "model_class": type(self.model).__name__,
            "lora": None if lora is None else lora.model_dump(mode="json"),
            "frozen": sorted(self._config.model.frozen) or None,
        }


def _is_of_adapter(name: str) -> bool:
    return ".lora_" in name
