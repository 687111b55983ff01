"""Tokenizers and models from folders or the hub, and what of a model is frozen."""

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
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from agentrl_cli.errors import MissingExtraError, ModelError, format_nearest
from agentrl_cli.models.chat_templates import REMEDY, read_chat_template
from agentrl_cli.models.lora import ADAPTER_CONFIG_NAME, import_peft, is_adapter_folder
from agentrl_cli.scratch_folders import ScratchFolder

#: agentrl never runs code that a model brings, and unpickles nothing.
_SAFE_LOADING: Any = {"trust_remote_code": False}
_SAFE_WEIGHTS: Any = {**_SAFE_LOADING, "use_safetensors": True}
#: Of tensors in a message.
_MAX_NAMES = 8


def load_tokenizer(path: str, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder or hub id; it has a chat template.

    Args:
        path: the folder or hub id.
        chat_template: name or file of a template to use instead of its own.

    Raises:
        ModelError: there is no tokenizer, or it has no chat template.
    """
    folder = Path(path)
    if folder.is_dir() and not any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")
    ):
        raise ModelError(
            f"{path}: found a folder without tokenizer.json. Type "
            "tokenizer_path=FOLDER_OR_HUB_ID to name the tokenizer of the model it was made from, "
            "or copy tokenizer.json and tokenizer_config.json into the folder"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **_SAFE_LOADING)
    except Exception as error:
        raise ModelError(_explain(path, "tokenizer", error)) from error
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
    problem = None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        problem = f"is a {type(tokenizer).__name__}, which has no fast version (tokenizer.json)"
    elif not tokenizer.chat_template:
        problem = (
            "has no chat template (chat_template.jinja), so messages cannot become tokens: it may "
            f"be that of a base model. {REMEDY}"
        )
    elif tokenizer.eos_token_id is None:
        problem = (
            "names no end token (eos_token in tokenizer_config.json), so no turn would ever end"
        )
    if problem:
        raise ModelError(
            f"{path}: its tokenizer {problem}. Type tokenizer_path=FOLDER_OR_HUB_ID to name "
            "another, such as that of the instruct version, or model.path= with another model"
        )
    return tokenizer


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
                raise ModelError(_explain(path, "model", error)) from error
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


def check_model_files(path: str) -> None:
    """Returns if what a folder has of a model can be read, without its weights: a second at most.

    Raises:
        ModelError: naming what is missing or damaged.
    """
    folder = Path(path)
    if not folder.is_dir() or is_adapter_folder(path):
        return
    missing = [name for name in ("config.json", "*.safetensors") if not any(folder.glob(name))]
    if missing:
        pickled = " (pickled weights are never loaded)" if any(folder.glob("*.bin")) else ""
        raise ModelError(
            f"{path}: found a folder without {' and '.join(missing)}{pickled}. Type model.path= "
            "with a folder that holds config.json, tokenizer.json and *.safetensors"
        )
    try:
        AutoConfig.from_pretrained(path, **_SAFE_LOADING)
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt"):
                pass
    except Exception as error:
        raise ModelError(_explain(path, "model", error)) from error


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
        raise ModelError(_explain(path, "model", error)) from error
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
def open_whole_model(folder: str, dtype: str) -> Iterator[str]:
    """A folder that an engine server can load: ``folder``, or a merged adapter in a temporary one.

    Raises as :func:`load_merged_model`.
    """
    if not is_adapter_folder(folder):
        yield folder
        return
    with ScratchFolder("merged") as merged:
        load_merged_model(folder, getattr(torch, dtype)).save_pretrained(merged.path)
        AutoTokenizer.from_pretrained(folder, **_SAFE_LOADING).save_pretrained(merged.path)
        yield str(merged.path)


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


def _explain(path: str, what: str, error: Exception) -> str:
    first_lines = " ".join(str(error).split())[:300].rstrip(".")
    if "trust_remote_code" in str(error):
        return (
            f"{path}: its {what} brings its own code (auto_map), which agentrl never runs. Type "
            "model.path= with a model whose architecture transformers has itself"
        )
    if Path(path).is_dir():
        return (
            f"{path}: its {what} cannot be loaded: {type(error).__name__}: {first_lines}. Type "
            "model.path= with a folder that holds config.json, tokenizer.json and *.safetensors"
        )
    found = "a file, not a folder" if Path(path).exists() else "no folder of that name"
    return (
        f"{path}: {found}, and no {what} came from the hub: "
        f"{type(error).__name__}: {first_lines}. Allowed: a folder, a hub id such as "
        "Qwen/Qwen2.5-1.5B-Instruct (with a connection or in the cache; gated ones need `hf auth "
        "login`), or builtin:calculator"
    )


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


def load_tokenizer_of(
    model_path: str, tokenizer_path: str | None = None, chat_template: str | None = None
) -> Any:
    """The tokenizer of a model, its own unless another is named, and one that fits it.

    ``chat_template``: as :func:`load_tokenizer` has it.

    Raises:
        ModelError: there is none, it cannot be used, or it belongs to another model.
    """
    tokenizer = load_tokenizer(tokenizer_path or model_path, chat_template)
    # Loading the model refuses a folder without one, with a better message.
    if not Path(model_path).is_dir() or (Path(model_path) / "config.json").is_file():
        check_tokenizer(tokenizer, model_path)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerFast, model_path: str) -> None:
    """Refuses a tokenizer that makes ids which the model has no embedding for.

    Added tokens that neither a text nor the template produces may lie beyond the vocabulary: some
    text-only models keep the image markers of larger models of their family.

    Raises:
        ModelError: naming the first id too many and the size of the vocabulary.
    """
    try:
        model_config = AutoConfig.from_pretrained(model_path, **_SAFE_LOADING)
    except Exception as error:
        raise ModelError(_explain(model_path, "config.json", error)) from error
    vocab_size = model_config.get_text_config().vocab_size
    largest = _find_largest_id(tokenizer)
    if vocab_size is not None and largest >= vocab_size:
        raise ModelError(
            f"{tokenizer.name_or_path}: its tokenizer makes ids up to {largest}, and the model "
            f"{model_path} has a vocabulary of {vocab_size} (largest id {vocab_size - 1}): they do "
            "not belong together. Type tokenizer_path=null for the model's own tokenizer, or "
            "model.path= with the model that this tokenizer was made for"
        )


def _find_largest_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """The largest id that text, a turn of the chat template, or its end is made of."""
    added = set(tokenizer.get_added_vocab().values())
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    try:
        turn = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:
        raise ModelError(
            f"{tokenizer.name_or_path}: its chat template does not render one question with its "
            f"answer: {type(error).__name__}: {' '.join(str(error).split())[:300]}. {REMEDY}, or "
            "correct the template"
        ) from error
    made = {*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id}
    return max(made | (set(tokenizer.get_vocab().values()) - added))


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
