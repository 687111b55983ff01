"""Tokenizers and models from folders or the hub, with messages that say what to type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from agentrl_cli.errors import ModelError
from agentrl_cli.models.generation_flags import make_savable
from agentrl_cli.models.lora import is_adapter_folder, load_merged_model

_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device() -> torch.device:
    """The first GPU, else the CPU."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder or hub id; it has a chat template.

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
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(_explain(path, "tokenizer", error)) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(
            f"{path}: its tokenizer is a {type(tokenizer).__name__}, which has no fast version "
            "(tokenizer.json). Type tokenizer_path=FOLDER_OR_HUB_ID to name one that has"
        )
    if not tokenizer.chat_template:
        raise ModelError(
            f"{path}: its tokenizer has no chat template, so messages cannot become tokens (a "
            "base model, perhaps?). Type model.path= with the id of the instruct version, or "
            "tokenizer_path= with a tokenizer that has one (chat_template.jinja beside "
            "tokenizer.json)"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"{path}: its tokenizer names no end token (eos_token), so no turn would ever end. "
            "Set eos_token in tokenizer_config.json, or type tokenizer_path=FOLDER_OR_HUB_ID"
        )
    return tokenizer


def load_model(path: str, dtype: str | torch.dtype, device: str | torch.device) -> PreTrainedModel:
    """The causal language model of a folder or hub id, in evaluation mode.

    A folder with an adapter alone gives the model that it was trained on, merged with it.

    Raises:
        ModelError: there are no weights, or transformers cannot load them.
    """
    folder = Path(path)
    number_type = _DTYPES[dtype] if isinstance(dtype, str) else dtype
    if is_adapter_folder(folder):
        with without_progress_bars():
            return load_merged_model(folder, number_type).to(device).eval()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"{path}: found a folder without config.json, so it holds no model in Hugging Face "
                "format. Type model.path= with a folder that holds config.json, tokenizer.json and "
                "*.safetensors"
            )
        if not any(any(folder.glob(pattern)) for pattern in _WEIGHT_FILES):
            raise ModelError(
                f"{path}: found config.json and no weights. Copy the *.safetensors files into the "
                "folder, or type model.path= with the folder that holds them"
            )
    try:
        with without_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=number_type)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(_explain(path, "model", error)) from error
    return make_savable(model).to(device).eval()


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keeps transformers' own bars off the terminal, where agentrl shows one of its own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _explain(path: str, what: str, error: Exception) -> str:
    first_lines = " ".join(str(error).split())[:300]
    if Path(path).is_dir():
        return (
            f"{path}: its {what} cannot be loaded: {type(error).__name__}: {first_lines}. Type "
            "model.path= with a folder that transformers can load"
        )
    return (
        f"{path}: no folder of that name, and no {what} came from the hub: "
        f"{type(error).__name__}: {first_lines}. Allowed: a folder, a hub id such as "
        "Qwen/Qwen2.5-1.5B-Instruct (with a connection or in the cache; gated ones need `hf auth "
        "login`), or builtin:calculator"
    )
