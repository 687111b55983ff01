"""Losses and gradients that are not finite: found, kept to be looked at, and said in words."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import NotFiniteError, StoreError
from agentrl_cli.train.losses import LossInputs
from agentrl_cli.train.packing import MicroBatch
from agentrl_cli.train.policy import Trained
from agentrl_cli.train.ranks import Ranks
from agentrl_cli.train.samples import Sample
from agentrl_cli.train.sharding import own_part

#: Names in a message.
_MAX_LISTED = 5

Arrays = Mapping[str, np.ndarray[Any, Any]]


class SaveFault(Protocol):
    """Keeps a micro-batch in the run folder."""

    def __call__(self, step: int, facts: Mapping[str, Any], tensors: Arrays) -> Path:
        """Where it was written."""
        ...


class Part(NamedTuple):
    """What a micro-batch gives to the loss of its minibatch."""

    loss: Tensor
    """Scalar with gradient."""
    values: Mapping[str, Tensor]
    """What it was made of, [targets] each, by name: kept where it is not finite."""


#: What :func:`_collect` takes from the samples' targets.
_OF_TARGETS = (
    "sources",
    "ids",
    "rollout_logprobs",
    "versions",
    "advantages",
    "temperatures",
    "top_ps",
)

ComputePart = Callable[[MicroBatch], Part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that is not finite, and the samples that it comes from."""

    what: str
    """``the loss is nan``."""
    is_local: bool
    """True: it was seen in this process's own samples."""
    samples: tuple[Sample, ...]
    values: Mapping[str, Tensor] = field(default_factory=dict)
    """Of the samples' targets, in order."""


def list_values(inputs: LossInputs) -> dict[str, Tensor]:
    """The tensors of ``inputs`` by name, without those that the targets have."""
    named = {item.name: getattr(inputs, item.name) for item in fields(inputs)}
    return {
        name: value
        for name, value in named.items()
        if value is not None and name not in (*_OF_TARGETS, "sequence_numbers")
    }


def add_up_gradient(
    trained: Trained, samples: Sequence[Sample], compute_part: ComputePart
) -> tuple[float, Fault | None]:
    """The norm of the gradient of all parts (which stays in the optimizer, clipped), and the first
    that is wrong with it."""
    fault: Fault | None = None
    for batch in trained.pack(samples):
        part = compute_part(batch)
        if fault is None and not torch.isfinite(part.loss):
            fault = Fault(
                what=f"the loss is {part.loss.item()}",
                is_local=True,
                samples=batch.samples,
                values=part.values,
            )
        # Also of a loss that is not finite: other ranks wait for this pass.
        part.loss.backward()  # type: ignore[no-untyped-call]
    trained.catch_up()
    norm = trained.optimizer.clip_gradients()
    if fault is None and not math.isfinite(norm):
        fault = Fault(what=f"the gradient's norm is {norm}", is_local=False, samples=tuple(samples))
    return norm, fault


class FaultReport:
    """What becomes of faults in one step: kept, and then an error or a warning.

    Args:
        config: the experiment's.
        step: the step.
        ranks: train together; each calls :meth:`refuse` for every update.
        save: keeps a micro-batch; None: it is only spoken of.
    """

    def __init__(
        self, config: ExperimentConfig, step: int, ranks: Ranks, save: SaveFault | None
    ) -> None:
        self._config = config
        self._step = step
        self._ranks = ranks
        self._save = save
        self._has_saved = False

    def find_worst(self, fault: Fault | None) -> int | None:
        """The rank whose fault says most, the same on every rank; None: there is none."""
        local = self._ranks.gather_objects(None if fault is None else fault.is_local)
        faulty = [rank for rank, is_local in enumerate(local) if is_local is not None]
        return min(faulty, key=lambda rank: (not local[rank], rank), default=None)

    def trace(
        self,
        trained: Trained,
        samples: Sequence[Sample],
        compute_part: ComputePart,
        fault: Fault | None,
    ) -> Fault | None:
        """The fault of the first micro-batch whose own gradient is not finite, where ``fault`` says
        that all of them together are not; else ``fault``. Gradients are changed.

        For a process that trains alone: where weights lie in shards, every gradient is of all
        ranks.
        """
        if fault is None or fault.is_local or self._ranks.count > 1:
            return fault
        for batch in trained.pack(samples):
            trained.optimizer.zero_gradients()
            part = compute_part(batch)
            part.loss.backward()  # type: ignore[no-untyped-call]
            norm = trained.optimizer.clip_gradients()
            if not math.isfinite(norm):
                return Fault(
                    what=f"the gradient's norm is {norm}",
                    is_local=True,
                    samples=batch.samples,
                    values=part.values,
                )
        return fault

    def refuse(self, trained: Trained, fault: Fault | None, worst: int) -> str:
        """Keeps the fault of rank ``worst``; what to say where the run goes on without the update.

        Raises:
            NotFiniteError: the run shall end, or cannot go on.
        """
        bad = sorted({n for names in self._ranks.gather_objects(_find_bad(trained)) for n in names})
        text = None
        if fault is not None and self._ranks.index == worst:
            text = self._describe_fault(trained, fault, bad) + self._keep(fault, bad)
        said = str(self._ranks.gather_objects(text)[worst])
        if bad or self._config.train.alarms.not_finite.action == "stop":
            raise NotFiniteError(said + self._advise(trained, bad))
        return said

    def _keep(self, fault: Fault, bad: Sequence[str]) -> str:
        """Saves the first fault of the step; a line that says where."""
        if self._save is None or self._has_saved:
            return ""
        self._has_saved = True
        facts = _describe(fault, self._config, self._step, bad)
        try:
            path = self._save(self._step, facts, _collect(fault))
        except StoreError as error:
            # The fault itself must be said all the same.
            return f"\n  its micro-batch could not be saved: {error}"
        return f"\n  look at it: agentrl inspect-micro-batch {shlex.quote(str(path))}"

    def _describe_fault(self, trained: Trained, fault: Fault, bad: Sequence[str]) -> str:
        ids = list(dict.fromkeys(sample.trajectory_id for sample in fault.samples))
        more = f" and {len(ids) - _MAX_LISTED} more" if len(ids) > _MAX_LISTED else ""
        text = (
            f"step {self._step}: {'' if trained.role == 'policy' else 'in the critic, '}"
            f"{fault.what}, of {len(fault.samples)} samples "
            f"(trajectories {', '.join(ids[:_MAX_LISTED])}{more}). The weights are as they were "
            "before it"
        )
        if bad:
            text += (
                f", but hold values that are not finite themselves: {', '.join(bad[:_MAX_LISTED])}"
                + (f" and {len(bad) - _MAX_LISTED} more" if len(bad) > _MAX_LISTED else "")
            )
        return text

    def _advise(self, trained: Trained, bad: Sequence[str]) -> str:
        if bad:
            return (
                "\n  the model or checkpoint that the run began with is damaged: no trajectory "
                "can give a finite loss. Take another one, with model.path=FOLDER trial_name=NAME"
            )
        train = self._config.train
        attempts = f"train.learning_rate={train.learning_rate / 2:g}"
        if trained.role == "critic" and train.critic is not None:
            attempts = f"train.critic.learning_rate={train.critic.learning_rate / 2:g}"
        if self._config.model.dtype != "float32":
            attempts += " or model.dtype=float32"
        return (
            "\n  to go on without such updates, add train.alarms.not_finite.action=warn; the "
            "same command alone would learn from the same trajectories, and end here again"
            f"\n  in a new run (trial_name=NAME), {attempts} often helps"
        )


def _find_bad(trained: Trained) -> list[str]:
    """Names of weights with values that are not finite, in this process's part of them."""
    weights = trained.optimizer.master_weights().items()
    return [name for name, weight in weights if not torch.isfinite(own_part(weight)).all()]


def _collect(fault: Fault) -> dict[str, np.ndarray[Any, Any]]:
    """The samples' tensors end to end, in the order of the samples."""
    targets = [sample.targets for sample in fault.samples]
    tensors = {"input_ids": torch.cat([sample.input_ids for sample in fault.samples])}
    for name in _OF_TARGETS:
        tensors[name] = torch.cat([getattr(one, name) for one in targets])
    for name, value in fault.values.items():
        tensors[name] = value.detach().float()
    return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}


def _describe(
    fault: Fault, config: ExperimentConfig, step: int, bad: Sequence[str]
) -> dict[str, Any]:
    return {
        "step": step,
        "what": fault.what,
        "model": config.model.model_dump(mode="json"),
        "algorithm": config.train.algorithm.model_dump(mode="json"),
        "weights_not_finite": list(bad),
        "samples": [
            {
                "trajectory_id": sample.trajectory_id,
                "num_tokens": sample.num_tokens,
                "num_targets": sample.num_targets,
                "has_masks": sample.targets.masks is not None,
                "turns": [
                    {"interaction_id": t.interaction_id, "start": t.start, "end": t.end}
                    for t in sample.turns
                ],
            }
            for sample in fault.samples
        ],
    }
