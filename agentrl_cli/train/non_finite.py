"""Losses and gradients that are NaN or infinite: found before the optimizer has touched the
weights, and said in words."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import NotFiniteError
from agentrl_cli.store.run_folder import run_dir_of
from agentrl_cli.train.data.packing import MicroBatch
from agentrl_cli.train.data.samples import Sample
from agentrl_cli.train.loss.policy_loss import LossInputs
from agentrl_cli.train.model.sharding import own_part
from agentrl_cli.train.model.trained_model import TrainedModel
from agentrl_cli.train.ranks import Ranks

#: Names in a message.
_MAX_LISTED = 5


class Part(NamedTuple):
    """What a micro-batch gives to the loss of its minibatch."""

    loss: Tensor
    """Scalar with gradient."""
    values: Mapping[str, Tensor]
    """What it was made of, [targets] each, by name."""


ComputePart = Callable[[MicroBatch], Part]


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """A loss or gradient that is not finite, and where it comes from."""

    what: str
    """``the loss is nan``."""
    is_local: bool
    """True: it was seen in this process's own samples."""
    trajectory_ids: tuple[str, ...]
    quantities: tuple[str, ...] = ()
    """Names of the loss's inputs that are not finite; empty: it overflows only in between."""


def list_values(inputs: LossInputs) -> dict[str, Tensor]:
    """The tensors of ``inputs`` by name."""
    named = {item.name: getattr(inputs, item.name) for item in fields(inputs)}
    return {name: value for name, value in named.items() if value is not None}


def add_up_gradient(
    trained: TrainedModel[Any], samples: Sequence[Sample], compute_part: ComputePart
) -> tuple[float, NonFinite | None]:
    """The norm of the gradient of all parts (which stays in the optimizer, clipped), and the first
    thing in it that is not finite."""
    found: NonFinite | None = None
    for batch in trained.pack(samples):
        part = compute_part(batch)
        if found is None and not torch.isfinite(part.loss):
            found = _locate(f"the loss is {part.loss.item()}", batch, part)
        # Even if the loss is not finite: the other ranks wait for this pass.
        part.loss.backward()  # type: ignore[no-untyped-call]
    trained.catch_up()
    norm = trained.optimizer.clip_gradients()
    if found is None and not math.isfinite(norm):
        ids = tuple(dict.fromkeys(sample.trajectory_id for sample in samples))
        found = NonFinite(what=f"the gradient's norm is {norm}", is_local=False, trajectory_ids=ids)
    return norm, found


class NonFiniteReport:
    """Turns what is not finite in one step into an error or a warning.

    Args:
        config: the experiment's.
        step: the step.
        ranks: train together; each calls :meth:`refuse` for every update.
    """

    def __init__(self, config: ExperimentConfig, step: int, ranks: Ranks) -> None:
        self._config = config
        self._step = step
        self._ranks = ranks

    def find_worst(self, found: NonFinite | None) -> int | None:
        """The rank whose finding is the most precise, the same on every rank; None: all is
        finite."""
        local = self._ranks.gather_objects(None if found is None else found.is_local)
        affected = [rank for rank, is_local in enumerate(local) if is_local is not None]
        return min(affected, key=lambda rank: (not local[rank], rank), default=None)

    def trace(
        self,
        trained: TrainedModel[Any],
        samples: Sequence[Sample],
        compute_part: ComputePart,
        found: NonFinite | None,
    ) -> NonFinite | None:
        """The first micro-batch whose own gradient is not finite, where ``found`` says only that
        their sum is not; else ``found``. Gradients are changed.

        For a process that trains alone: where the weights are sharded, every gradient is of all
        ranks.
        """
        if found is None or found.is_local or self._ranks.count > 1:
            return found
        for batch in trained.pack(samples):
            trained.optimizer.zero_gradients()
            part = compute_part(batch)
            part.loss.backward()  # type: ignore[no-untyped-call]
            norm = trained.optimizer.clip_gradients()
            if not math.isfinite(norm):
                return _locate(f"the gradient's norm is {norm}", batch, part)
        return found

    def refuse(self, trained: TrainedModel[Any], found: NonFinite | None, worst: int) -> str:
        """The finding of rank ``worst`` in words, where the run continues without the update.

        Raises:
            NotFiniteError: the run is to end, or cannot continue.
        """
        bad = sorted({n for names in self._ranks.gather_objects(_find_bad(trained)) for n in names})
        text = None
        if found is not None and self._ranks.index == worst:
            text = self._describe(trained, found, bad)
        text = str(self._ranks.gather_objects(text)[worst])
        if bad or self._config.train.alarms.not_finite.action == "stop":
            raise NotFiniteError(text + self._advise(trained, bad))
        return text

    def _describe(self, trained: TrainedModel[Any], found: NonFinite, bad: Sequence[str]) -> str:
        text = f"step {self._step}: {'' if trained.role == 'policy' else 'in the critic, '}"
        text += f"{found.what} (trajectories {_list(found.trajectory_ids)}"
        if found.quantities:
            text += f"; not finite there: {_list(found.quantities)}"
        text += "). The weights are as they were before it"
        if bad:
            text += f", but are not finite themselves: {_list(bad)}"
        run = shlex.quote(str(run_dir_of(self._config)))
        first = shlex.quote(found.trajectory_ids[0])
        return f"{text}\n  look: agentrl inspect-trajectories {run} {first} --tokens"

    def _advise(self, trained: TrainedModel[Any], bad: Sequence[str]) -> str:
        if bad:
            return (
                "\n  the model or checkpoint that the run started from is damaged: no trajectory "
                "can give a finite loss. Take another one, with model.path=FOLDER trial_name=NAME"
            )
        train = self._config.train
        suggestion = f"train.learning_rate={train.learning_rate / 2:g}"
        if trained.role == "critic" and train.critic is not None:
            suggestion = f"train.critic.learning_rate={train.critic.learning_rate / 2:g}"
        if self._config.model.dtype != "float32":
            suggestion += " or model.dtype=float32"
        return (
            "\n  to continue without such updates, add train.alarms.not_finite.action=warn; the "
            "same command alone would learn from the same trajectories, and end here again"
            f"\n  in a new run (trial_name=NAME), {suggestion} often helps"
        )


def _locate(what: str, batch: MicroBatch, part: Part) -> NonFinite:
    """The trajectories of ``batch`` whose values are not finite; all of it where every value is."""
    is_bad = {name: ~torch.isfinite(value) for name, value in part.values.items()}
    bad_targets = sum(is_bad.values(), torch.zeros_like(batch.sequence_numbers, dtype=torch.bool))
    numbers = sorted(set(batch.sequence_numbers[bad_targets].tolist()))
    return NonFinite(
        what=what,
        is_local=True,
        trajectory_ids=tuple(
            dict.fromkeys(
                batch.samples[n].trajectory_id for n in numbers or range(len(batch.samples))
            )
        ),
        quantities=tuple(name for name, targets in is_bad.items() if targets.any()),
    )


def _find_bad(trained: TrainedModel[Any]) -> list[str]:
    """Names of weights that are not finite, in this process's part of them."""
    weights = trained.optimizer.master_weights().items()
    return [name for name, weight in weights if not torch.isfinite(own_part(weight)).all()]


def _list(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
