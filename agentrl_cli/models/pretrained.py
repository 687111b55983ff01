"""Models from folders or the hub, and what of a model is frozen."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from agentrl_cli.errors import MissingExtraError, ModelError, format_nearest
from agentrl_cli.models.lora import import_peft
from agentrl_cli.models.model_files import (
    ADAPTER_CONFIG_NAME,
    SAFE_LOADING,
    explain_unloadable,
    is_adapter_folder,
)

_SAFE_WEIGHTS: Any = {**SAFE_LOADING, "use_safetensors": True}
#: Of tensors in a message.
_MAX_NAMES = 8


def load_model(
    path: str, dtype: str, device: str | torch.device, *, needs_head: bool = True
) -> PreTrainedModel:
    """The causal language model of a folder or hub id, in evaluation mode.

    A folder with an adapter alone gives the model that it was trained on, merged with it.

    Args:
        path: the folder or hub id.
        dtype: number type of its weights.
        device: where they go.
        needs_head: False: the checkpoint may lack the output head, as that of a reward model.

    Raises:
        ModelError: there are no weights, not all that the model is made of, or some that are no
            numbers; or transformers cannot load them.
    """
    number_type = getattr(torch, dtype)
    with without_progress_bars():
        if is_adapter_folder(path):
            model = load_merged_model(path, number_type)
        else:
            try:
                model = make_savable(_load_complete(path, number_type, needs_head=needs_head))
            except ModelError:
                raise
            except Exception as error:
                raise ModelError(explain_unloadable(path, "model", error)) from error
    model = model.to(device).eval()
    _check_finite(model, path)
    return model


def _load_complete(path: str, dtype: torch.dtype, *, needs_head: bool = True) -> PreTrainedModel:
    """The model of a folder or hub id; transformers draws weights that it lacks at random.

    Raises:
        ModelError: naming them.
    """
    # Tensors of another shape are reported like missing ones, and so refused like them.
    model, report = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **_SAFE_WEIGHTS
    )
    misshapen = {name for name, *_ in report["mismatched_keys"]}
    missing = {*report["missing_keys"], *misshapen}
    if not needs_head and (head := model.get_output_embeddings()) is not None:
        heads = [name for name, module in model.named_modules() if module is head]
        missing = {name for name in missing if name.rpartition(".")[0] not in heads}
    if missing:
        unused = report["unexpected_keys"]
        lies = f" {len(misshapen)} of them are there in another shape." if misshapen else ""
        lies += (
            f" It holds {_list_names(unused)}, which that model does not have." if unused else ""
        )
        raise ModelError(
            f"{path}: its *.safetensors lack weights of the {type(model).__name__} that its "
            f"config.json describes: {_list_names(missing)}.{lies} They would be random numbers. "
            "Type model.path= with a complete checkpoint of a causal language model: the files of "
            "this one may be incomplete, its config.json another model's, or it has no output head"
        )
    # Of this kind's own accord: any configuration may hold the key.
    if getattr(type(model.config)(), "is_decoder", None) is False and not model.config.is_decoder:
        raise ModelError(
            f"{path}: {type(model).__name__} is an encoder, whose tokens see those after them, so "
            "it cannot write text. Type model.path= with a causal language model"
        )
    return cast("PreTrainedModel", model)


def check_weight_files(path: str) -> None:
    """As :func:`load_model` does, without loading the model: for servers that would sample of it.

    Raises:
        ModelError: naming the tensors that hold no numbers; or a file cannot be read.
    """
    damaged, num_tensors = [], 0
    try:
        for file in sorted(Path(path).glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    tensor = tensors.get_tensor(name)
                    num_tensors += 1
                    # What is quantized to 8 bits has no such numbers, or no test for them.
                    if tensor.itemsize > 1 and not torch.isfinite(tensor).all():
                        damaged.append(name)
    except Exception as error:
        raise ModelError(explain_unloadable(path, "model", error)) from error
    _refuse(damaged, num_tensors, path)


def _check_finite(model: PreTrainedModel, path: str) -> None:
    damaged = [name for name, w in model.named_parameters() if not torch.isfinite(w).all()]
    _refuse(damaged, len(list(model.parameters())), path)


def _refuse(damaged: Collection[str], num_tensors: int, path: str) -> None:
    if damaged:
        raise ModelError(
            f"{path}: NaN or infinite numbers in {_list_names(damaged)} of its {num_tensors} "
            "tensors. Type model.path= with a sound checkpoint: this one was damaged, or saved "
            "after its training had diverged"
        )


def _list_names(names: Collection[str]) -> str:
    """``3 tensors (a, b, c)``; of many, the first."""
    first = sorted(names)[:_MAX_NAMES]
    more = ", ..." if len(names) > len(first) else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(first)}{more})"


def load_merged_model(folder: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model that an adapter was trained on, with the adapter in its weights; it can be saved.

    Raises:
        MissingExtraError: peft is not installed.
        ModelError: the base model is not where it was, or the adapter is not one of it.
    """
    peft = import_peft()
    path = Path(folder) / ADAPTER_CONFIG_NAME
    try:
        base = json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is not peft's configuration of an adapter: {error!r}") from error
    try:
        with warnings.catch_warnings():
            # Its tensors would be zero, and the adapter change nothing there.
            warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
            merged: PreTrainedModel = peft.PeftModel.from_pretrained(
                _load_complete(base, dtype), str(folder)
            ).merge_and_unload()
    except MissingExtraError:
        raise
    except Exception as error:
        raise ModelError(
            f"{folder}: this adapter was trained on {base!r} (base_model_name_or_path in "
            f"{ADAPTER_CONFIG_NAME}), with which it cannot be loaded: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}. Put the base model there, or correct the name "
            "in the file"
        ) from error
    return make_savable(merged)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hides transformers' own bars and reports: agentrl shows, and says, what matters of them."""
    shown = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()


def make_savable(model: PreTrainedModel) -> PreTrainedModel:
    """``model``, whose generation flags no longer contradict each other.

    Some on the hub do (a temperature, and no sampling). transformers loads them with a warning
    and refuses to save them, which would end a run at its first checkpoint. agentrl samples by
    ``gconfig``, so the flags only matter to those who use the trained model elsewhere.
    """
    flags = model.generation_config
    if flags is None or _is_valid(flags):
        return model
    flags.do_sample = True
    if not _is_valid(flags):
        end_ids = {"eos_token_id": flags.eos_token_id, "bos_token_id": flags.bos_token_id}
        model.generation_config = GenerationConfig(**end_ids)
    return model


def _is_valid(flags: GenerationConfig) -> bool:
    try:
        flags.validate(strict=True)
    except ValueError:
        return False
    return True


def freeze_weights(model: PreTrainedModel, frozen: Sequence[str]) -> None:
    """Leaves some weights out of the training: they get no gradient and no optimizer state.

    Args:
        model: in training; nothing of it is frozen yet.
        frozen: ``embeddings``, ``head`` (one of them is both where a model has them tied), or
            patterns of parameter names such as ``model.layers.0.*``.

    Raises:
        ModelError: a name matches no weight, or none is left to train.
    """
    # Of two names of one tensor either will do.
    named = dict(model.named_parameters(remove_duplicate=False))
    # What is elsewhere in every architecture.
    parts = {"embeddings": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    for name in frozen:
        chosen = (
            list(parts[name].parameters())
            if name in parts
            else [one for full_name, one in named.items() if fnmatchcase(full_name, name)]
        )
        if not chosen:
            patterns = sorted(f"{part}.*" for part, _ in model.named_modules() if part)
            raise ModelError(
                f"model.frozen: {name!r} matches no weight of {type(model).__name__}; "
                f"{format_nearest(name, [*parts, *patterns])}. A pattern is matched with the whole "
                f"name of a weight, such as {next(iter(named))}"
            )
        for parameter in chosen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"model.frozen: {', '.join(frozen)} leaves nothing of {type(model).__name__} to "
            "train. Remove something from it, or type model.frozen=[]"
        )
