"""From ``model.path`` to a folder, a tokenizer and a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agentrl_cli.errors import ModelError, format_nearest
from agentrl_cli.log import Observer
from agentrl_cli.models.calculator import make_calculator_model
from agentrl_cli.models.pretrained import load_model, load_tokenizer
from agentrl_cli.models.stopping import CheckStop, go_on

__all__ = ["load_model", "load_tokenizer", "resolve_model_folder"]

_BUILTIN = "builtin:"
_BUILTIN_MODELS: dict[str, Callable[[Observer, CheckStop], Path]] = {
    "builtin:calculator": make_calculator_model
}


def resolve_model_folder(path: str, observer: Observer, check_stop: CheckStop = go_on) -> str:
    """A folder or hub id for ``path``; a ``builtin:`` model is made on its first use.

    What ``check_stop`` raises ends the making, and nothing of it is kept.

    Raises:
        ModelError: there is no such built-in model, or no such folder.
    """
    if path.startswith(_BUILTIN):
        if path not in _BUILTIN_MODELS:
            raise ModelError(
                f"model.path: {path!r} is not a built-in model; "
                f"{format_nearest(path, _BUILTIN_MODELS)}"
            )
        return str(_BUILTIN_MODELS[path](observer, check_stop))
    if not Path(path).exists() and _must_be_folder(path):
        raise ModelError(
            f"model.path: there is no folder {path!r} (from the current folder, "
            f"{Path.cwd().name}/). Allowed: a folder with a model in Hugging Face format, a hub id "
            "such as Qwen/Qwen2.5-1.5B-Instruct, or builtin:calculator. "
            "Type model.path=builtin:calculator to try without a download"
        )
    return path


def _must_be_folder(path: str) -> bool:
    """True: ``path`` cannot be a hub id, which is ``name`` or ``owner/name``."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or "\\" in path
