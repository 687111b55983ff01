"""What can be read of a model without its weights: its tokenizer, its configuration, its files.

Of all this only an adapter that is merged needs torch, whose import takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from agentrl_cli.errors import ModelError
from agentrl_cli.models.chat_templates import REMEDY, read_chat_template
from agentrl_cli.scratch_folders import ScratchFolder

#: agentrl never runs code that a model brings, and unpickles nothing.
SAFE_LOADING: Any = {"trust_remote_code": False}
ADAPTER_CONFIG_NAME = "adapter_config.json"


def is_adapter_folder(path: str | Path) -> bool:
    """True for a folder with an adapter alone, such as a checkpoint of a LoRA run."""
    folder = Path(path)
    return (folder / ADAPTER_CONFIG_NAME).is_file() and not (folder / "config.json").is_file()


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
        tokenizer = AutoTokenizer.from_pretrained(path, **SAFE_LOADING)
    except Exception as error:
        raise ModelError(explain_unloadable(path, "tokenizer", error)) from error
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


def check_tokenizer(tokenizer: PreTrainedTokenizerFast, model_path: str) -> None:
    """Refuses a tokenizer that makes ids which the model has no embedding for.

    Added tokens that neither a text nor the template produces may lie beyond the vocabulary: some
    text-only models keep the image markers of larger models of their family.

    Raises:
        ModelError: naming the first id too many and the size of the vocabulary.
    """
    try:
        model_config = AutoConfig.from_pretrained(model_path, **SAFE_LOADING)
    except Exception as error:
        raise ModelError(explain_unloadable(model_path, "config.json", error)) from error
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
        AutoConfig.from_pretrained(path, **SAFE_LOADING)
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="numpy"):
                pass
    except Exception as error:
        raise ModelError(explain_unloadable(path, "model", error)) from error


@contextmanager
def open_whole_model(folder: str, dtype: str) -> Iterator[str]:
    """A folder that an engine server can load: ``folder``, or a merged adapter in a temporary one.

    Raises as :func:`~agentrl_cli.models.pretrained.load_merged_model`.
    """
    if not is_adapter_folder(folder):
        yield folder
        return
    import torch

    from agentrl_cli.models.pretrained import load_merged_model

    with ScratchFolder("merged") as merged:
        load_merged_model(folder, getattr(torch, dtype)).save_pretrained(merged.path)
        AutoTokenizer.from_pretrained(folder, **SAFE_LOADING).save_pretrained(merged.path)
        yield str(merged.path)


def explain_unloadable(path: str, what: str, error: Exception) -> str:
    """Why a model's part, called ``what``, cannot be loaded, and what to type."""
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
