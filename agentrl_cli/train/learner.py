"""The learner: holds the model and its optimizer, and turns trajectories into updates."""

from __future__ import annotations

import math
import os
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunError, StoreError
from agentrl_cli.records import Trajectory
from agentrl_cli.train.advantages import compute_advantages, compute_score
from agentrl_cli.train.attention import use_packed_attention
from agentrl_cli.train.checkpoint import load_learner_state, load_weights, save_learner_state
from agentrl_cli.train.logprobs import check_head, compute_micro_batch_logprobs
from agentrl_cli.train.losses import LossInputs, compute_loss, compute_token_weights
from agentrl_cli.train.optimizer import MasterOptimizer, compute_learning_rate
from agentrl_cli.train.packing import MicroBatch, build_micro_batch, pack_lengths
from agentrl_cli.train.samples import Sample, build_samples, count_trained_tokens
from agentrl_cli.train.statistics import UpdateStatistics

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
    ) -> None:
        """Takes ``model`` over: it is moved, cast and changed by every update.

        Args:
            model: in float32 if it is to be trained from its exact weights; it computes in
                ``config.model.dtype``.
            config: the experiment's.
            reference_model: needed with ``kl_coef``; frozen.
            tokenizer: saved beside the weights.
            device: where both models are kept.

        Raises:
            ModelError: an architecture whose attention or output head agentrl cannot follow.
            ValueError: ``kl_coef`` is set and ``reference_model`` is missing.
        """
        if config.train.algorithm.kl_coef > 0 and reference_model is None:
            raise ValueError("train.algorithm.kl_coef is set: the learner needs a reference_model")
        self.model = model
        self.step = 0
        self._config = config
        self._train = config.train
        self._tokenizer = tokenizer
        self._device = torch.device(device)
        self._reference = reference_model if config.train.algorithm.kl_coef > 0 else None
        dtype = _DTYPES[config.model.dtype]
        for one in (model, self._reference):
            if one is not None:
                check_head(one)
                use_packed_attention(one)
                one.to(self._device)
                _remove_dropout(one)
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
        samples = build_samples(trajectories, advantages, self._config.rollout.export_style)
        statistics = UpdateStatistics(samples, policy_version)
        needed = [s for s in samples if self._needs_forward(s)]
        proximal = self._score_once(self.model, needed) if self._has_several_updates else {}
        reference = self._score_once(self._reference, needed) if self._reference else {}
        scored = [i for i, t in enumerate(trajectories) if compute_score(t) is not None]
        for epoch in range(self._train.num_epochs):
            for indices in self._split_groups(trajectories, scored, epoch):
                minibatch = [s for s in samples if s.trajectory_index in indices]
                self._train_minibatch(
                    minibatch, indices, learning_rate, statistics, proximal, reference
                )
        seconds = time.perf_counter() - started
        return statistics.summarize() | {"learning_rate": learning_rate, "train_seconds": seconds}

    def compute_logprobs(
        self,
        token_id_lists: Sequence[Sequence[int]],
        *,
        starts: Sequence[int] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> list[list[float]]:
        """Logprobs of the tokens of each list from position ``starts[i]`` (default 1) to its end.

        They are of the distribution that is sampled from at ``temperature`` and ``top_p``.
        """
        self._use_threads()
        starts = [1] * len(token_id_lists) if starts is None else starts
        samples = [
            _build_probe_sample(ids, start, index, temperature, top_p)
            for index, (ids, start) in enumerate(zip(token_id_lists, starts, strict=True))
        ]
        scored = self._score_once(self.model, [s for s in samples if s.num_trained_tokens])
        return [
            scored[id(sample)][sample.loss_mask].tolist() if sample.num_trained_tokens else []
            for sample in samples
        ]

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors by Hugging Face name, in the dtype it computes in, not copied.

        Tied tensors come once, under the first of their names.
        """
        seen: set[int] = set()
        unique = {}
        for name, tensor in self.model.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                unique[name] = tensor.detach()
        return unique

    def save(self, folder: str | Path) -> None:
        """Writes a folder that ``AutoModelForCausalLM.from_pretrained`` and :meth:`load` read.

        Raises:
            StoreError: it cannot be written.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
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
        weights = load_weights(self.model, folder) if masters is None else masters
        try:
            self._optimizer.load_master_weights(weights)
            self._optimizer.load_state_tensors(optimizer_state)
        except (KeyError, RuntimeError) as error:
            raise StoreError(f"the checkpoint {folder} is of another model: {error}") from error
        self.step = step

    @property
    def _has_several_updates(self) -> bool:
        """Before the only update of a step, the new policy is the proximal one by definition,
        however stale the tokens: a second forward pass would compute the same numbers."""
        return self._train.num_minibatches * self._train.num_epochs > 1

    def _needs_forward(self, sample: Sample) -> bool:
        return sample.has_advantage or self._reference is not None

    def _checkpoint_facts(self) -> dict[str, str]:
        return {"dtype": self._config.model.dtype, "model_class": type(self.model).__name__}

    def _use_threads(self) -> None:
        """Sets the CPU threads of the calling thread, which OpenMP keeps apart."""
        if self._train.num_threads is not None:
            torch.set_num_threads(self._train.num_threads)
        elif "OMP_NUM_THREADS" not in os.environ:
            has_affinity = hasattr(os, "sched_getaffinity")
            torch.set_num_threads(
                len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
            )

    def _split_groups(
        self, trajectories: Sequence[Trajectory], scored: Sequence[int], epoch: int
    ) -> list[set[int]]:
        """Scored trajectory indices of each minibatch: whole groups, shuffled from the seed."""
        groups: defaultdict[str, set[int]] = defaultdict(set)
        for index in scored:
            groups[trajectories[index].group_id].add(index)
        order = list(groups.values())
        random.Random(f"{self._config.seed}/{self.step}/{epoch}").shuffle(order)
        num_minibatches = min(self._train.num_minibatches, len(order))
        return [set().union(*order[first::num_minibatches]) for first in range(num_minibatches)]

    def _pack(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        bins = pack_lengths([s.num_tokens for s in samples], self._train.micro_batch_tokens)
        return [build_micro_batch([samples[i] for i in one], self._device) for one in bins]

    @torch.no_grad()
    def _score_once(
        self, model: PreTrainedModel | None, samples: Sequence[Sample]
    ) -> dict[int, Tensor]:
        """Logprobs [tokens] on the CPU of each sample, by ``id(sample)``, without gradient."""
        scored: dict[int, Tensor] = {}
        if model is None:
            return scored
        for batch in self._pack(samples):
            logprobs = compute_micro_batch_logprobs(model, batch).logprobs.cpu()
            for sample, values in zip(
                batch.samples, torch.split(logprobs, list(batch.lengths)), strict=True
            ):
                scored[id(sample)] = values
        return scored

    def _train_minibatch(
        self,
        samples: Sequence[Sample],
        indices: set[int],
        learning_rate: float,
        statistics: UpdateStatistics,
        proximal: Mapping[int, Tensor],
        reference: Mapping[int, Tensor],
    ) -> None:
        """One optimizer update, its gradient added up over packed micro-batches.

        Without anything to learn from (every advantage 0, no KL term) the weights and the
        optimizer stay untouched.
        """
        token_weights = self._weigh_trajectories(samples, indices)
        needed = [s for s in samples if self._needs_forward(s)]
        if not needed:
            return
        ids: list[str] = []
        for batch in self._pack(needed):
            ids += batch.trajectory_ids
            loss = self._compute_micro_batch_loss(
                batch, token_weights, statistics, proximal, reference
            )
            if not torch.isfinite(loss):
                self._stop(f"the loss is {loss.item()}", batch.trajectory_ids)
            loss.backward()  # type: ignore[no-untyped-call]
        norm = self._optimizer.clip_gradients()
        if not math.isfinite(norm):
            self._stop(f"the gradient's norm is {norm}", ids)
        self._optimizer.step(learning_rate)
        statistics.add_update(norm)

    def _weigh_trajectories(self, samples: Sequence[Sample], indices: set[int]) -> dict[int, float]:
        """The weight of a token's loss in the minibatch's, by trajectory index."""
        order = sorted(indices)
        counts = count_trained_tokens(samples, order[-1] + 1)
        algorithm = self._train.algorithm
        weights = compute_token_weights(
            algorithm.aggregation,
            [counts[index] for index in order],
            algorithm.constant_denominator or self._config.gconfig.max_tokens,
        )
        return dict(zip(order, weights, strict=True))

    def _compute_micro_batch_loss(
        self,
        batch: MicroBatch,
        token_weights: Mapping[int, float],
        statistics: UpdateStatistics,
        proximal: Mapping[int, Tensor],
        reference: Mapping[int, Tensor],
    ) -> Tensor:
        scored = compute_micro_batch_logprobs(self.model, batch)
        new_logprobs = scored.logprobs
        output = compute_loss(
            LossInputs(
                new_logprobs=new_logprobs,
                proximal_logprobs=self._gather(proximal, batch)
                if proximal
                else new_logprobs.detach(),
                rollout_logprobs=batch.rollout_logprobs,
                advantages=batch.advantages,
                loss_mask=batch.loss_mask,
                token_weights=batch.spread(
                    [token_weights[s.trajectory_index] for s in batch.samples]
                ),
                ref_logprobs=self._gather(reference, batch) if reference else None,
            ),
            self._train.algorithm,
        )
        statistics.add_micro_batch(batch, output, scored.entropies)
        return output.loss

    def _gather(self, scored: Mapping[int, Tensor], batch: MicroBatch) -> Tensor:
        return torch.cat([scored[id(s)] for s in batch.samples]).to(self._device)

    def _stop(self, what: str, trajectory_ids: Sequence[str]) -> None:
        self._optimizer.zero_gradients()
        raise RunError(
            f"step {self.step}: {what}. The weights were not changed by it. Trajectories: "
            f"{', '.join(dict.fromkeys(trajectory_ids))}. Look at them with: agentrl "
            "inspect-trajectories RUN; a lower train.learning_rate or model.dtype=float32 often "
            "helps"
        )


def _remove_dropout(model: nn.Module) -> None:
    """The engine samples without dropout; with it the trainer's logprobs would be of another
    policy. (Dropout of the attention is never applied, see ``attention.py``.)"""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def _build_probe_sample(
    ids: Sequence[int], start: int, index: int, temperature: float, top_p: float
) -> Sample:
    num_tokens = len(ids)
    loss_mask = torch.arange(num_tokens) >= max(start, 1)
    return Sample(
        input_ids=torch.tensor(ids, dtype=torch.long),
        loss_mask=loss_mask,
        rollout_logprobs=torch.zeros(num_tokens),
        versions=torch.full((num_tokens,), -1),
        advantages=torch.zeros(num_tokens),
        temperatures=torch.full((num_tokens,), temperature),
        top_ps=torch.full((num_tokens,), top_p),
        trajectory_index=index,
        trajectory_id=f"probe {index}",
    )
