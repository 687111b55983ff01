"""What a learner writes into a checkpoint's folder and reads back: weights, optimizer, states.

The weights are a Hugging Face model folder that ``from_pretrained`` loads. The rest lies in
``learner/`` as safetensors and JSON: nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from agentrl_cli.errors import RunFolderError, StoreError

#: Counts changes of the layout below.
FORMAT_VERSION = 1


def save_learner_state(
    folder: Path,
    *,
    optimizer: Mapping[str, Tensor],
    masters: Mapping[str, Tensor] | None,
    step: int,
    facts: Mapping[str, Any],
) -> None:
    """Writes ``folder/learner/``.

    Args:
        folder: the checkpoint.
        optimizer: its state by name.
        masters: float32 weights by name; None: the model's own weights are float32.
        step: updates made.
        facts: what must be equal when the checkpoint is loaded (see :func:`load_learner_state`).

    Raises:
        StoreError: the folder cannot be written.
    """
    state = folder / "learner"
    try:
        state.mkdir(parents=True, exist_ok=True)
        _save(optimizer, state / "optimizer.safetensors")
        _save(_random_states(), state / "random_states.safetensors")
        if masters is not None:
            _save(masters, state / "master_weights.safetensors")
        text = json.dumps({"format_version": FORMAT_VERSION, "step": step, **facts}, indent=2)
        (state / "state.json").write_text(text + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise StoreError(f"the checkpoint {folder} cannot be written: {error}") from error


def load_learner_state(
    folder: Path, facts: Mapping[str, Any]
) -> tuple[int, dict[str, Tensor], dict[str, Tensor] | None]:
    """Step, optimizer state and master weights (None: none were saved); sets random states.

    Raises:
        RunFolderError: not a checkpoint, or made with other ``facts``.
        StoreError: it is damaged.
    """
    state = folder / "learner"
    try:
        saved = json.loads((state / "state.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(
            f"{folder} is not a checkpoint of a learner: learner/state.json is missing. A folder "
            "of weights alone is loaded with model.path=FOLDER"
        ) from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{state / 'state.json'} cannot be read: {error}") from error
    for name, value in {"format_version": FORMAT_VERSION, **facts}.items():
        if saved.get(name) != value:
            raise RunFolderError(
                f"{folder} was saved with {name} {saved.get(name)!r}, this run has {value!r}. "
                "Set it back, or begin a new run with trial_name=NAME model.path=FOLDER"
            )
    try:
        _restore_random_states(load_file(state / "random_states.safetensors"))
        masters_path = state / "master_weights.safetensors"
        masters = load_file(masters_path) if masters_path.exists() else None
        return int(saved["step"]), load_file(state / "optimizer.safetensors"), masters
    except (OSError, SafetensorError) as error:
        raise StoreError(f"the checkpoint {folder} is damaged: {error}") from error


def load_weights(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The weights in ``folder`` by the parameter names of ``model``, float32, on the CPU.

    Raises:
        StoreError: the folder cannot be loaded as this architecture.
    """
    try:
        loaded = type(model).from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise StoreError(f"the weights in {folder} cannot be loaded: {error}") from error
    return {name: weight.detach() for name, weight in loaded.named_parameters()}


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: t.detach().contiguous().cpu() for name, t in tensors.items()}, path)


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _restore_random_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{index}"], index)
