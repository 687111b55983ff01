"""Low-rank adapters by peft: put on a model, written and read in peft's own format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from agentrl_cli.config.experiment import LoraConfig
from agentrl_cli.errors import MissingExtraError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_FILE_NAME = "adapter_model.safetensors"
#: peft's name of a model's only adapter, a part of its parameters' names.
ADAPTER_NAME = "default"
#: What peft puts before the names in its files.
SAVED_PREFIX = "base_model.model."


def add_adapter(model: PreTrainedModel, lora: LoraConfig, *, seed: int) -> None:
    """Puts an adapter on ``model`` that changes nothing yet, and freezes everything else.

    Raises:
        MissingExtraError: peft is not installed.
        ModelError: ``model.lora.target_modules`` names no layer of the model, or its embeddings.
    """
    peft = import_peft()
    path = model.name_or_path
    if path and Path(path).is_dir():
        # The checkpoint must be usable from any folder.
        model.name_or_path = str(Path(path).absolute())
    targets = lora.target_modules
    _refuse_embeddings(model, () if isinstance(targets, str) else targets)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model.add_adapter(config, ADAPTER_NAME)
    except ValueError as error:
        names = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        raise ModelError(
            f"model.lora.target_modules: {targets!r} cannot get an adapter in "
            f"{type(model).__name__}: {error}. Allowed: all-linear, or some of "
            f"{', '.join(sorted(names))}"
        ) from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def _refuse_embeddings(model: PreTrainedModel, targets: Sequence[str]) -> None:
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    # Merged into a tied head, an adapter would change the embeddings too.
    is_tied = head is not None and head.weight is embeddings.weight
    refused = (embeddings, head) if is_tied else (embeddings,)
    for name, module in model.named_modules():
        for target in targets:
            if module in refused and (name == target or name.endswith(f".{target}")):
                raise ModelError(
                    f"model.lora.target_modules: {target} is the embeddings of "
                    f"{type(model).__name__}{', which its output head shares' if is_tied else ''}: "
                    "they get no adapter. Leave it out, or type "
                    "model.lora.target_modules=all-linear"
                )


def load_adapter_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The adapter's tensors in ``folder``, on the CPU, by parameter names of the model.

    Raises:
        OSError, SafetensorError: the file cannot be read.
    """
    tensors = load_file(folder / ADAPTER_FILE_NAME)
    return {to_parameter_name(name): tensor for name, tensor in tensors.items()}


def to_parameter_name(saved_name: str) -> str:
    """The model's name of a parameter that has ``saved_name`` in peft's file."""
    layer, matrix, kind = saved_name.removeprefix(SAVED_PREFIX).rsplit(".", 2)
    return f"{layer}.{matrix}.{ADAPTER_NAME}.{kind}"


def to_saved_name(parameter_name: str) -> str:
    """peft's name in a file of the adapter's parameter ``parameter_name``."""
    return SAVED_PREFIX + parameter_name.replace(f".{ADAPTER_NAME}.", ".")


def import_peft() -> Any:
    """The module ``peft``, or MissingExtraError."""
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError(
            "model.lora needs peft, which is not installed. Type uv pip install 'agentrl-cli[lora]'"
        ) from error
    return peft
