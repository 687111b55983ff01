"""The learner: holds the model and its optimizer, and turns trajectories into updates."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.end_tokens import find_end_ids
from agentrl_cli.engine.grammar import TokenGrammars
from agentrl_cli.errors import RunError, StoreError
from agentrl_cli.models.lora import add_adapter, load_adapter_weights
from agentrl_cli.models.pretrained import without_progress_bars
from agentrl_cli.records import Trajectory
from agentrl_cli.train.advantages import compute_advantages
from agentrl_cli.train.attention import use_packed_attention
from agentrl_cli.train.checkpoint import load_learner_state, load_weights, save_learner_state
from agentrl_cli.train.fixed_logprobs import FixedLogprobs
from agentrl_cli.train.logprobs import check_head, compute_micro_batch_logprobs, score_samples
from agentrl_cli.train.losses import LossInputs, compute_loss
from agentrl_cli.train.masks import MaskMaker
from agentrl_cli.train.minibatches import Minibatch, build_minibatches
from agentrl_cli.train.optimizer import MasterOptimizer, compute_learning_rate
from agentrl_cli.train.packing import MicroBatch, pack_samples
from agentrl_cli.train.published import choose_published
from agentrl_cli.train.samples import Sample, build_samples, build_scoring_sample
from agentrl_cli.train.update_metrics import UpdateMetrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Learner:
    """A model in training. Its methods block; call them from one thread at a time.

    ``step`` counts the updates made; a saved and loaded learner goes on bit for bit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: ExperimentConfig,
        *,
        reference_model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: torch.device | str = "cpu",
        published: Literal["whole", "adapter"] = "whole",
    ) -> None:
        """Takes ``model`` over: it is moved, cast and changed by every update.

        With ``config.model.lora`` an adapter is put on it, which alone is trained.

        Args:
            model: in float32 if it is to be trained from its exact weights; it computes in
                ``config.model.dtype``.
            config: the experiment's.
            reference_model: needed with ``kl_coef``; frozen. With an adapter, the model
                without it is the reference.
            tokenizer: saved beside the weights; trajectories with a structural tag need it.
            device: where both models are kept.
            published: what :meth:`weights` gives: all weights (an adapter added to them), or
                the adapter's, as ``engine.weight_transfer.kind`` lora sends them.

        Raises:
            MissingExtraError: an adapter is asked for and peft is not installed.
            ModelError: an architecture whose attention or output head agentrl cannot follow,
                or an adapter that does not fit.
            ValueError: ``kl_coef`` is set and ``reference_model`` is missing.
        """
        lora = config.model.lora
        self._has_kl = config.train.algorithm.kl_coef > 0
        if self._has_kl and lora is None and reference_model is None:
            raise ValueError("train.algorithm.kl_coef is set: the learner needs a reference_model")
        self.model = model
        self.step = 0
        self._config = config
        self._train = config.train
        self._tokenizer = tokenizer
        self._grammars: TokenGrammars | None = None
        self._device = torch.device(device)
        self._reference = reference_model if self._has_kl and lora is None else None
        for one in (model, self._reference):
            if one is not None:
                _prepare(one, self._device)
        if lora is not None:
            add_adapter(model, lora, seed=config.seed)
        self._published = choose_published(model, published, has_adapter=lora is not None)
        dtype = _DTYPES[config.model.dtype]
        self._optimizer = MasterOptimizer(model, config.train, dtype)
        if self._reference is not None:
            self._reference.to(dtype).eval().requires_grad_(False)
        # Layers recompute their activations in training mode only.
        model.train(config.train.gradient_checkpointing)
        if config.train.gradient_checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )

    def update(self, trajectories: Sequence[Trajectory], policy_version: int) -> dict[str, float]:
        """Improves the model on the trajectories of one step; metrics of the update.

        Args:
            trajectories: the whole batch, unscored ones included.
            policy_version: of the weights before the update; tokens of other versions count
                in ``off_policy_fraction``.

        Returns:
            ``loss``, ``grad_norm``, ``learning_rate``, ``approx_kl``, ``clipfrac``, ``kl``,
            ``entropy``, ``logprob_gap_mean``, ``logprob_gap_max``, ``off_policy_fraction``,
            ``num_samples``, ``num_micro_batches``, ``num_updates``, ``train_tokens`` (tokens
            passed forward and back), ``train_seconds``.

        Raises:
            RunError: a loss or gradient that is not finite; the weights are those from
                before that minibatch.
        """
        started = time.perf_counter()
        self._use_threads()
        self.step += 1
        learning_rate = compute_learning_rate(self._train, self.step)
        advantages = compute_advantages(trajectories)
        export_style = self._config.rollout.export_style
        samples = build_samples(trajectories, advantages, export_style, self._build_mask_maker())
        metrics = UpdateMetrics(samples, policy_version)
        fixed = self._score_fixed([s for s in samples if self._needs_forward(s)])
        for epoch in range(self._train.num_epochs):
            shuffle_key = f"{self.step}/{epoch}"
            for one in build_minibatches(trajectories, samples, self._config, shuffle_key):
                self._train_minibatch(one, learning_rate, metrics, fixed)
        if self._device.type == "cuda":
            # What is only cached here is missing to an engine on the same GPU.
            torch.cuda.empty_cache()
        seconds = time.perf_counter() - started
        return metrics.summarize() | {"learning_rate": learning_rate, "train_seconds": seconds}

    def compute_logprobs(
        self,
        token_id_lists: Sequence[Sequence[int]],
        *,
        starts: Sequence[int] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        replaced: Mapping[str, Tensor] | None = None,
    ) -> list[list[float]]:
        """Logprobs of the tokens of each list from position ``starts[i]`` (default 1) to its end.

        They are of the distribution that is sampled from at ``temperature`` and ``top_p``.
        Tensors in ``replaced`` stand for the published ones of that name; of two names of one
        tensor, for the one given alone.
        """
        self._use_threads()
        starts = [1] * len(token_id_lists) if starts is None else starts
        samples = [
            build_scoring_sample(ids, start, temperature=temperature, top_p=top_p)
            for ids, start in zip(token_id_lists, starts, strict=True)
        ]
        located: dict[str, Tensor] = {}
        for name, tensor in (replaced or {}).items():
            located |= self._published.locate(name, tensor)
        scored = self._score(self.model, [s for s in samples if s.num_targets], replaced=located)
        return [scored[id(sample)].tolist() if id(sample) in scored else [] for sample in samples]

    def weights(self) -> dict[str, Tensor]:
        """The published tensors by name, in the dtype the model computes in, mostly not copied.

        All weights have their Hugging Face names, tied ones once, under the first of theirs;
        an adapter's have those of peft's files.
        """
        return self._published.tensors()

    def published_names(self) -> Mapping[str, str]:
        """Every name of a published tensor -> the one it has in :meth:`weights`."""
        return self._published.names()

    def save(self, folder: str | Path) -> None:
        """Writes a folder that ``AutoModelForCausalLM.from_pretrained`` and :meth:`load` read.

        With an adapter it holds the adapter alone, in peft's format, and names its base model.

        Raises:
            StoreError: it cannot be written.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with without_progress_bars():
                self.model.save_pretrained(folder)
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(folder)
        except (OSError, SafetensorError) as error:
            raise StoreError(f"the checkpoint {folder} cannot be written: {error}") from error
        save_learner_state(
            folder,
            optimizer=self._optimizer.state_tensors(),
            masters=self._optimizer.master_weights() if self._optimizer.has_masters else None,
            step=self.step,
            facts=self._checkpoint_facts(),
        )

    def load(self, folder: str | Path) -> None:
        """Goes on from what :meth:`save` wrote: weights, optimizer, step, random states.

        Raises:
            RunFolderError: not a checkpoint of this kind of learner.
            StoreError: it is damaged.
        """
        folder = Path(folder)
        step, optimizer_state, masters = load_learner_state(folder, self._checkpoint_facts())
        weights = masters or self._load_saved_weights(folder)
        try:
            self._optimizer.load_master_weights(weights)
            self._optimizer.load_state_tensors(optimizer_state)
        except (KeyError, RuntimeError) as error:
            raise StoreError(f"the checkpoint {folder} is of another model: {error}") from error
        self.step = step

    def _load_saved_weights(self, folder: Path) -> dict[str, Tensor]:
        if self._config.model.lora is not None:
            return load_adapter_weights(folder)
        return load_weights(self.model, folder)

    def _build_mask_maker(self) -> MaskMaker | None:
        """What makes the masks of constrained tokens; its table is the step's own."""
        if self._tokenizer is None:
            return None
        if self._grammars is None:
            num_logits = self.model.get_output_embeddings().weight.shape[0]
            end_ids = find_end_ids(self.model, self._tokenizer)
            self._grammars = TokenGrammars(self._tokenizer, num_logits, end_ids)
        return MaskMaker(self._grammars)

    def _needs_forward(self, sample: Sample) -> bool:
        return sample.has_advantage or self._has_kl

    def _checkpoint_facts(self) -> dict[str, Any]:
        lora = self._config.model.lora
        return {
            "dtype": self._config.model.dtype,
            "model_class": type(self.model).__name__,
            "lora": None if lora is None else lora.model_dump(mode="json"),
        }

    def _use_threads(self) -> None:
        """Sets the CPU threads of the calling thread, which OpenMP keeps apart."""
        if self._train.num_threads is not None:
            torch.set_num_threads(self._train.num_threads)
        elif "OMP_NUM_THREADS" not in os.environ:
            has_affinity = hasattr(os, "sched_getaffinity")
            torch.set_num_threads(
                len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
            )

    def _score(
        self,
        model: PreTrainedModel,
        samples: Sequence[Sample],
        replaced: Mapping[str, Tensor] | None = None,
    ) -> dict[int, Tensor]:
        budget = self._train.micro_batch_tokens
        return score_samples(model, samples, budget, self._device, replaced=replaced)

    def _score_reference(self, samples: Sequence[Sample]) -> dict[int, Tensor]:
        """Logprobs of the model that the KL term holds on to."""
        if self._reference is not None:
            return self._score(self._reference, samples)
        self.model.disable_adapters()
        try:
            return self._score(self.model, samples)
        finally:
            self.model.enable_adapters()

    def _score_fixed(self, samples: Sequence[Sample]) -> FixedLogprobs:
        """What stays fixed during the step.

        Before the only update of a step the new policy is the proximal one by definition,
        however stale the tokens: another forward pass would compute the same numbers.
        """
        has_several_updates = self._train.num_minibatches * self._train.num_epochs > 1
        return FixedLogprobs(
            proximal=self._score(self.model, samples) if has_several_updates else None,
            reference=self._score_reference(samples) if self._has_kl else None,
        )

    def _train_minibatch(
        self,
        minibatch: Minibatch,
        learning_rate: float,
        metrics: UpdateMetrics,
        fixed: FixedLogprobs,
    ) -> None:
        """One optimizer update, its gradient added up over packed micro-batches.

        Without anything to learn from (every advantage 0, no KL term) the weights and the
        optimizer stay untouched.
        """
        needed = [s for s in minibatch.samples if self._needs_forward(s)]
        if not needed:
            return
        for batch in pack_samples(needed, self._train.micro_batch_tokens, self._device):
            loss = self._compute_part(batch, minibatch.token_weights, metrics, fixed)
            if not torch.isfinite(loss):
                self._stop(f"the loss is {loss.item()}", batch.samples)
            loss.backward()  # type: ignore[no-untyped-call]
        norm = self._optimizer.clip_gradients()
        if not math.isfinite(norm):
            self._stop(f"the gradient's norm is {norm}", needed)
        self._optimizer.step(learning_rate)
        metrics.add_update(norm)

    def _compute_part(
        self,
        batch: MicroBatch,
        token_weights: Mapping[int, float],
        metrics: UpdateMetrics,
        fixed: FixedLogprobs,
    ) -> Tensor:
        """The micro-batch's part in the minibatch's loss."""
        scored = compute_micro_batch_logprobs(self.model, batch)
        proximal, reference = fixed.join(batch)
        output = compute_loss(
            LossInputs(
                new_logprobs=scored.logprobs,
                proximal_logprobs=scored.logprobs.detach() if proximal is None else proximal,
                rollout_logprobs=batch.targets.rollout_logprobs,
                advantages=batch.targets.advantages,
                token_weights=batch.spread(
                    [token_weights[s.trajectory_index] for s in batch.samples]
                ),
                ref_logprobs=reference,
            ),
            self._train.algorithm,
        )
        metrics.add_micro_batch(batch, output, scored.entropies)
        return output.loss

    def _stop(self, what: str, samples: Sequence[Sample]) -> None:
        self._optimizer.zero_gradients()
        trajectory_ids = dict.fromkeys(sample.trajectory_id for sample in samples)
        raise RunError(
            f"step {self.step}: {what}. The weights were not changed by it. Trajectories: "
            f"{', '.join(trajectory_ids)}. Look at them with: agentrl inspect-trajectories RUN. "
            "A lower train.learning_rate or model.dtype=float32 often helps"
        )


def _prepare(model: PreTrainedModel, device: torch.device) -> None:
    check_head(model)
    use_packed_attention(model)
    model.to(device)
    _remove_dropout(model)


def _remove_dropout(model: nn.Module) -> None:
    """The engine samples without dropout; with it the trainer's logprobs would be of another
    policy. (Dropout of the attention is never applied, see ``attention.py``.)"""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
