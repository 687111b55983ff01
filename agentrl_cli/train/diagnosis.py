"""Which weights an engine kept, found out by computing with those of the version before."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentrl_cli.log import get_logger

_log = get_logger(__name__)

#: The part of a name up to a layer's part: ``model.layers.3.self_attn``.
_PART_OF_LAYER = re.compile(r"^(.*?\.\d+)\.([^.]+)\.")
#: A large model on CPU needs about a second for each group.
_MAX_SECONDS = 120.0


class DiagnosedLearner(Protocol):
    """What finding out needs of a :class:`~agentrl_cli.train.learner.Learner`."""

    def compute_logprobs(
        self,
        token_id_lists: Sequence[Sequence[int]],
        *,
        starts: Sequence[int] | None = None,
        replaced: Mapping[str, Tensor] | None = None,
    ) -> list[list[float]]:
        """Logprobs of each list's tokens from its start on, some published tensors replaced."""
        ...

    def published_names(self) -> Mapping[str, str]:
        """Every name of a published tensor -> the name that it is published under."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSequence:
    """A probe and what both sides say of its tokens from ``start`` on, in nats."""

    token_ids: Sequence[int]
    start: int
    engine_logprobs: Sequence[float]
    trainer_logprobs: Sequence[float]

    def compute_gaps(self, logprobs: Sequence[float]) -> list[float]:
        """|engine - ``logprobs``| of each token."""
        return [abs(a - b) for a, b in zip(self.engine_logprobs, logprobs, strict=True)]


def explain_mismatch(
    learner: DiagnosedLearner,
    previous: Path | None,
    sequences: Sequence[ScoredSequence],
    tolerance: float,
) -> str:
    """A sentence on which parameters the engine seems to have kept; never raises.

    Each group of parameters (the head, the embeddings, the parts of each layer, whole layers,
    the same part of all layers, everything, single tensors) is given the values of ``previous``,
    the version before, and the group with which the trainer computes what the engine said is the
    suspect.
    """
    try:
        return _explain(learner, previous, sequences, tolerance)
    except Exception as error:
        # The mismatch itself must be reported, whatever goes wrong here.
        _log.warning("the cause of a weight mismatch was not found", exc_info=error)
        return f"Which parameters differ was not found out: {type(error).__name__}: {error}"


def _explain(
    learner: DiagnosedLearner,
    previous: Path | None,
    sequences: Sequence[ScoredSequence],
    tolerance: float,
) -> str:
    if previous is None:
        return "Which parameters differ cannot be told: the version before is not kept"
    old = _OldTensors(previous)
    names = {
        name: source
        for name, source in learner.published_names().items()
        if old.find(name, source) is not None
    }
    if not names:
        return f"Which parameters differ cannot be told: {previous} has none of their names"
    deadline = time.monotonic() + _MAX_SECONDS
    for num_tried, (label, group) in enumerate(_build_groups(list(names))):
        if time.monotonic() > deadline:
            return (
                f"Which parameters differ was not found out within {_MAX_SECONDS:.0f} s: it is "
                f"none of {num_tried} groups of parameters, from the version before, alone"
            )
        replaced = {name: old.load(name, names[name]) for name in group}
        if _agrees(learner, replaced, sequences, tolerance):
            what = label if len(group) > 1 else group[0]
            return f"They agree when {what} is that of the version before: the engine kept it"
    return (
        "No group of parameters from the version before explains it, nor do all of them: the "
        "engine holds weights that are neither the new nor the old ones, or computes otherwise"
    )


def _agrees(
    learner: DiagnosedLearner,
    replaced: Mapping[str, Tensor],
    sequences: Sequence[ScoredSequence],
    tolerance: float,
) -> bool:
    computed = learner.compute_logprobs(
        [one.token_ids for one in sequences],
        starts=[one.start for one in sequences],
        replaced=replaced,
    )
    return all(
        math.isfinite(gap) and gap <= tolerance
        for one, logprobs in zip(sequences, computed, strict=True)
        for gap in one.compute_gaps(logprobs)
    )


def _build_groups(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Groups to suspect, with what they are called, the likeliest and smallest first."""
    outside: list[str] = []
    parts: dict[str, list[str]] = {}
    layers: dict[str, list[str]] = {}
    kinds: dict[str, list[str]] = {}
    for name in names:
        found = _PART_OF_LAYER.match(name)
        if found is None:
            outside.append(name)
            continue
        layer, part = found.groups()
        parts.setdefault(f"{layer}.{part}", []).append(name)
        layers.setdefault(layer, []).append(name)
        kinds.setdefault(part, []).append(name)
    for name in sorted(outside, key=lambda name: "head" not in name):
        yield name, [name]
    yield "everything (the update changed nothing)", list(names)
    yield from parts.items()
    yield from layers.items()
    for part, group in kinds.items():
        yield f"{part} of every layer", group
    if len(outside) > 1:
        yield " and ".join(outside), outside
    for name in outside:
        yield f"everything but {name}", [other for other in names if other != name]
    for group in parts.values():
        yield from ((name, [name]) for name in group if len(group) > 1)


class _OldTensors:
    """The tensors in a folder of safetensors, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    self._files |= dict.fromkeys(file.keys(), path)
            except SafetensorError as error:
                raise OSError(f"{path} cannot be read: {error}") from error

    def find(self, name: str, source: str) -> str | None:
        """The name in the files of the tensor ``name``, which may be stored as ``source``."""
        return next((n for n in (name, source) if n in self._files), None)

    def load(self, name: str, source: str) -> Tensor:
        found = self.find(name, source)
        if found is None:
            raise KeyError(name)
        with safe_open(self._files[found], framework="pt") as file:
            return file.get_tensor(found)
