"""What a learner writes into a checkpoint's folder and reads back, besides the weights.

The weights are a Hugging Face model folder that ``from_pretrained`` loads. In ``learner/`` lie
what the checkpoint is of (``state.json``), the states of the generators, and the optimizer's
state; each further model in training (a critic) has a folder of its own, its optimizer's state
written by the same functions. All of it is safetensors and JSON: nothing is unpickled.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from agentrl_cli.errors import RunFolderError, StoreError
from agentrl_cli.models.lora import load_adapter_weights
from agentrl_cli.models.model_files import is_adapter_folder
from agentrl_cli.models.pretrained import without_progress_bars
from agentrl_cli.store.atomic_files import store_errors
from agentrl_cli.store.layout import describe

#: Counts changes of the layout below.
FORMAT_VERSION = 1

STATE_DIR = "learner"
_STATE = "state.json"
_RANDOM_STATES = "random_states.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_MASTERS = "master_weights.safetensors"


def save_learner_state(folder: Path, *, step: int, facts: Mapping[str, Any]) -> None:
    """Writes what a checkpoint is of, and the states of the generators.

    Args:
        folder: the checkpoint.
        step: updates made.
        facts: what must be equal when the checkpoint is loaded (see :func:`load_learner_state`).

    Raises:
        StoreError: the folder cannot be written.
    """
    state = folder / STATE_DIR
    with store_errors(folder):
        state.mkdir(parents=True, exist_ok=True)
        _save(collect_random_states(), state / _RANDOM_STATES)
        text = json.dumps({"format_version": FORMAT_VERSION, "step": step, **facts}, indent=2)
        (state / _STATE).write_text(text + "\n", encoding="utf-8")


def load_learner_state(folder: Path, facts: Mapping[str, Any]) -> int:
    """The step of a checkpoint that this learner can resume from; sets the generators.

    Raises:
        RunFolderError: not a checkpoint, of another version, or made with other ``facts``.
        StoreError: it is damaged.
    """
    state = folder / STATE_DIR
    saved = _read_state(folder)
    for name, value in facts.items():
        if saved.get(name) != value:
            raise RunFolderError(
                f"{describe(folder)} was saved with {name} {saved.get(name)!r}, this run has "
                f"{value!r}. Set it back, or begin a new run with trial_name=NAME model.path=FOLDER"
            )
    try:
        restore_random_states(load_file(state / _RANDOM_STATES))
        return int(saved["step"])
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise StoreError(describe_damage(folder, error)) from error


def save_optimizer_state(
    folder: Path, optimizer: Mapping[str, Tensor], masters: Mapping[str, Tensor] | None
) -> None:
    """Writes an optimizer's state into ``folder``, which is made where there is none.

    Args:
        folder: ``learner/`` of a checkpoint, or the folder of a further model in it.
        optimizer: its state by name.
        masters: float32 weights by name; None: the model's own weights are float32.

    Raises:
        StoreError: the folder cannot be written.
    """
    with store_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _save(optimizer, folder / _OPTIMIZER)
        if masters is not None:
            _save(masters, folder / _MASTERS)


def load_optimizer_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Optimizer state and master weights (None: none were saved) that ``folder`` holds.

    Raises:
        StoreError: they are damaged.
    """
    masters = folder / _MASTERS
    try:
        return load_file(folder / _OPTIMIZER), load_file(masters) if masters.exists() else None
    except (OSError, SafetensorError) as error:
        raise StoreError(describe_damage(folder.parent, error)) from error


def load_weights(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The weights in ``folder`` by the parameter names of ``model``, float32, on the CPU.

    Of a model with an adapter, the adapter's.

    Raises:
        KeyError, RuntimeError: they are of another model.
        StoreError: they are damaged.
    """
    try:
        if is_adapter_folder(folder):
            return load_adapter_weights(folder)
        with without_progress_bars():
            loaded, report = type(model).from_pretrained(
                folder,
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
                use_safetensors=True,
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise StoreError(describe_damage(folder, error)) from error
    # transformers warns of them, and draws them at random.
    if report["missing_keys"]:
        raise KeyError(", ".join(sorted(report["missing_keys"])))
    return {name: weight.detach() for name, weight in loaded.named_parameters()}


def describe_damage(folder: Path, error: Exception) -> str:
    """The message of a checkpoint that cannot be read, and the way out."""
    return (
        f"the checkpoint {describe(folder)} is damaged: {error}. Delete that folder and type the "
        "same command again: the run resumes from the checkpoint before it, or from the start, and "
        "learns from the stored trajectories, which are not sampled again"
    )


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE_DIR / _STATE
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(
            f"{describe(folder)} is not a checkpoint of a learner: learner/state.json is "
            "missing. A folder of weights alone is loaded with model.path=FOLDER"
        ) from None
    except (OSError, ValueError) as error:
        raise StoreError(describe_damage(folder, error)) from error
    version = saved.get("format_version") if isinstance(saved, dict) else None
    if version != FORMAT_VERSION:
        raise RunFolderError(
            f"{describe(folder)} is written in format {version!r}, and this version of agentrl "
            "reads format "
            f"{FORMAT_VERSION}. Continue with the version that wrote it (manifest.json of the run "
            "names it), or begin a new run from its weights: trial_name=NAME "
            f"model.path={describe(folder)}"
        )
    return saved


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: t.detach().contiguous().cpu() for name, t in tensors.items()}, path)


def seed_generators(seed: int) -> None:
    """Seeds the global generators of Python, numpy and torch.

    Nothing of agentrl draws from them: samples and orders have seeds of their own. Agents, tools
    and rewards that run in the trainer's process may.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def collect_random_states() -> dict[str, Tensor]:
    """The states of all generators, as tensors by name."""
    _, words, gauss = random.getstate()
    states = {"cpu": torch.get_rng_state(), "python": torch.tensor(words, dtype=torch.int64)}
    if gauss is not None:
        states["python_gauss"] = torch.tensor([gauss], dtype=torch.float64)
    numpy_state: Any = np.random.get_state(legacy=False)
    if numpy_state["bit_generator"] == "MT19937":
        key = numpy_state["state"]["key"].astype(np.int64).tolist()
        words = [*key, numpy_state["state"]["pos"], numpy_state["has_gauss"]]
        states["numpy"] = torch.tensor(words, dtype=torch.int64)
        states["numpy_gauss"] = torch.tensor([numpy_state["gauss"]], dtype=torch.float64)
    if torch.cuda.is_available():
        states |= {f"cuda:{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_random_states(states: Mapping[str, Tensor]) -> None:
    """Puts back what :func:`collect_random_states` gave; a generator that is not in it stays."""
    torch.set_rng_state(states["cpu"])
    if "python" in states:
        gauss = states.get("python_gauss")
        words = tuple(states["python"].tolist())
        random.setstate((3, words, None if gauss is None else gauss.item()))
    if "numpy" in states:
        *key, position, has_gauss = states["numpy"].tolist()
        cached = float(states["numpy_gauss"].item())
        np.random.set_state(
            ("MT19937", np.array(key, dtype=np.uint32), position, has_gauss, cached)
        )
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{index}"], index)
