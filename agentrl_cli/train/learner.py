"""The learner: holds the model and its optimizer, and turns trajectories into updates."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl_cli.config.experiment import ExperimentConfig, count_usable_cores
from agentrl_cli.records import Trajectory
from agentrl_cli.train.checkpoint import load_learner_state, save_learner_state
from agentrl_cli.train.data.samples import build_candidate_sample, build_scoring_sample
from agentrl_cli.train.model.critic import Critic
from agentrl_cli.train.model.optimizer import compute_learning_rate
from agentrl_cli.train.model.policy import Policy
from agentrl_cli.train.monitor.update_metrics import UpdateMetrics
from agentrl_cli.train.publish import visibly_changed
from agentrl_cli.train.ranks import SINGLE, Ranks
from agentrl_cli.train.step_updates import StepUpdates, build_step_batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    # It reads files with libraries that a learner alone does without.
    from agentrl_cli.store.trajectory_file import ProximalLogprobs


class Learner:
    """A model in training. Its methods block; call them from one thread at a time.

    ``step`` counts the updates made; a learner that is saved and loaded continues bit for bit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: ExperimentConfig,
        *,
        reference_model: PreTrainedModel | None = None,
        critic_model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: torch.device | str = "cpu",
        published: Literal["whole", "adapter"] = "whole",
        ranks: Ranks = SINGLE,
    ) -> None:
        """Takes ``model`` over: it is moved, cast and changed by every update.

        With ``config.model.lora`` an adapter is put on it, which alone is trained.

        Args:
            model: in float32 if it is to be trained from its exact weights; it computes in
                ``config.model.dtype``.
            config: the experiment's.
            reference_model: needed with ``kl``; frozen. An adapter's is the model without it.
            critic_model: needed with ``config.train.critic``; taken over too, its output head
                replaced by one that gives a value.
            tokenizer: saved beside the weights; trajectories with a structural tag need it.
            device: where the models are kept.
            published: what :meth:`weights` gives: all weights (an adapter added to them), or
                the adapter's, as ``engine.weight_transfer.kind`` lora sends them.
            ranks: the processes that train the model together, which call the same methods in
                the same order. Whole weights are given and written on rank 0 alone.

        Raises:
            MissingExtraError: an adapter is asked for and peft is not installed.
            ModelError: an architecture whose attention or output head agentrl does not support,
                or an adapter that does not fit.
            ValueError: ``kl`` is set and ``reference_model`` is missing, or a critic is to be
                trained and ``critic_model`` is.
        """
        uses_reference = config.train.algorithm.uses_reference
        if uses_reference and config.model.lora is None and reference_model is None:
            raise ValueError("train.algorithm.kl is set: the learner needs a reference_model")
        if config.train.critic is not None and critic_model is None:
            raise ValueError("train.critic is set: the learner needs a critic_model")
        self.step = 0
        self.proximal_logprobs: ProximalLogprobs = {}
        """Of the tokens of the last update."""
        self._config = config
        self._train = config.train
        self._ranks = ranks
        self._policy = Policy(
            model,
            config,
            reference_model=reference_model if uses_reference else None,
            tokenizer=tokenizer,
            device=torch.device(device),
            published=published,
            ranks=ranks,
        )
        self._critic: Critic | None = None
        if config.train.critic is not None and critic_model is not None:
            self._critic = Critic(critic_model, config, torch.device(device), ranks)

    @property
    def model(self) -> PreTrainedModel:
        """The model in training."""
        return self._policy.model

    def update(
        self,
        trajectories: Sequence[Trajectory],
        policy_version: int,
    ) -> dict[str, float]:
        """Improves the model on the trajectories of one step; metrics of the update.

        Args:
            trajectories: the whole batch, unscored ones included; those of groups that others
                took the place of are left out.
            policy_version: of the weights before the update; tokens of other versions are off
                policy.

        Returns:
            ``loss``, ``grad_norm``, ``learning_rate``, ``approx_kl``, ``clipfrac``, ``kl``,
            ``entropy``, ``logprob_gap_mean``, ``logprob_gap_max``, ``off_policy_fraction``,
            ``token_age_mean``, ``token_age_max``, ``importance_weight_mean``,
            ``importance_weight_max`` (before bounds), ``importance_weight_clipfrac``,
            ``effective_sample_size``, ``overlong_penalty_mean`` and
            ``kl_penalty_mean`` where they are set, ``num_samples``, ``num_micro_batches``,
            ``num_updates``, ``num_skipped_updates``, ``train_tokens`` (tokens passed forward and
            back), ``train_seconds``, of which ``logprob_seconds`` until the first update (making
            samples, and the logprobs and values that it needs); with a critic also ``value_loss``,
            ``value_clipfrac``, ``explained_variance`` (missing where returns are equal),
            ``value_mean``, ``return_mean``, ``critic_grad_norm``, ``critic_learning_rate``.

        Raises:
            NotFiniteError: a loss or gradient is not, and the update may not be left out; the
                weights are those from before that update.
        """
        started = time.perf_counter()
        use_threads(self._train.num_threads, self._ranks.count)
        self.step += 1
        batch = build_step_batch(trajectories, self._config, self._policy, self._critic)
        metrics = UpdateMetrics(batch.samples, policy_version)
        updates = StepUpdates(
            policy=self._policy,
            critic=self._critic,
            config=self._config,
            ranks=self._ranks,
            step=self.step,
            policy_version=policy_version,
            metrics=metrics,
        )
        order = updates.prepare(batch)
        logprob_seconds = time.perf_counter() - started
        updates.make(batch, order)
        if self._policy.device.type == "cuda":
            # What is only cached here is missing to an engine on the same GPU.
            torch.cuda.empty_cache()
        metrics.add_ranks(self._ranks)
        self.proximal_logprobs = updates.join_proximal_logprobs(batch)
        return {
            **metrics.summarize(),
            **batch.metrics,
            "learning_rate": compute_learning_rate(self._train, self.step),
            "logprob_seconds": logprob_seconds,
            "train_seconds": time.perf_counter() - started,
        }

    def compute_logprobs(
        self,
        token_id_lists: Sequence[Sequence[int]],
        *,
        starts: Sequence[int] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> list[list[float]]:
        """Logprobs of the tokens of each list from position ``starts[i]`` (default 1) to its end.

        They are of the distribution that is sampled from at ``temperature`` and ``top_p``. Of
        several ranks rank 0 says which: its arguments are broadcast, those of others do not matter.
        """
        use_threads(self._train.num_threads, self._ranks.count)
        lists = [[int(token) for token in ids] for ids in token_id_lists]
        first = [1] * len(lists) if starts is None else [int(start) for start in starts]
        lists, first, temperature, top_p = self._ranks.broadcast([lists, first, temperature, top_p])
        samples = [
            build_scoring_sample(ids, start, temperature=temperature, top_p=top_p)
            for ids, start in zip(lists, first, strict=True)
        ]
        scored = self._policy.score([s for s in samples if s.num_targets])
        return [scored[id(sample)].tolist() if id(sample) in scored else [] for sample in samples]

    def score_probes(
        self, prompts: Sequence[Sequence[int]], candidates: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[list[list[list[float]]], list[list[float]]]:
        """Logprobs of the tokens that each replica holds likely after each prompt.

        Of several ranks rank 0 says which, as in :meth:`compute_logprobs`.

        Args:
            prompts: token ids.
            candidates: by replica and prompt, token ids.

        Returns:
            Those of all replicas, in the type that the model computes in; and those of the first
            replica once more, in float32: how far these are apart is the trainer's own rounding.
        """
        use_threads(self._train.num_threads, self._ranks.count)
        prompts, candidates = self._ranks.broadcast([prompts, candidates])
        samples = [
            [build_candidate_sample(*pair) for pair in zip(prompts, of_replica, strict=True)]
            for of_replica in candidates
        ]
        everything = [sample for of_replica in samples for sample in of_replica]
        scored = self._policy.score(everything)
        wide = scored
        if samples and self._config.model.dtype != "float32":
            wide = self._policy.score_in_float32(samples[0])
        return (
            [[scored[id(s)].tolist() for s in of_replica] for of_replica in samples],
            [wide[id(s)].tolist() for s in (samples[0] if samples else ())],
        )

    def visibly_changed(self) -> AbstractContextManager[None]:
        """A block in which every trained weight is another one; see :func:`visibly_changed`."""
        return visibly_changed(self._policy.model)

    def weights(self) -> dict[str, Tensor]:
        """The published tensors by name, in the dtype the model computes in, mostly not copied.

        All weights have their Hugging Face names, tied ones once, under the first of theirs;
        an adapter's have those of peft's files.
        """
        return self._policy.weights()

    def save(self, folder: str | Path) -> None:
        """Writes a folder that ``AutoModelForCausalLM.from_pretrained`` and :meth:`load` read.

        With an adapter it holds the adapter alone, in peft's format, and names its base model.
        Of several ranks rank 0 writes; the folder that the others name does not matter.

        Raises:
            StoreError: it cannot be written.
        """
        self._policy.save(Path(folder))
        if self._critic is not None:
            self._critic.save(Path(folder))
        if self._ranks.index == 0:
            save_learner_state(Path(folder), step=self.step, facts=self._describe())
        self._ranks.barrier()

    def load(self, folder: str | Path) -> None:
        """Resumes from what :meth:`save` wrote: weights, optimizer, step, random states.

        Raises:
            RunFolderError: not a checkpoint of this kind of learner.
            StoreError: it is damaged.
        """
        step = load_learner_state(Path(folder), self._describe())
        self._ranks.in_turn(lambda: self._policy.load(Path(folder)))
        critic = self._critic
        if critic is not None:
            self._ranks.in_turn(lambda: critic.load(Path(folder)))
        self.step = step

    def _describe(self) -> dict[str, Any]:
        """What must be equal where a checkpoint is loaded."""
        critic = None if self._critic is None else self._critic.describe()
        return self._policy.describe() | {"critic": critic}


def use_threads(num_threads: int | None, num_processes: int) -> None:
    """Sets the CPU threads of the calling thread, which OpenMP keeps apart.

    Without ``num_threads`` and OMP_NUM_THREADS, this process's part of the usable cores.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, count_usable_cores() // num_processes))
