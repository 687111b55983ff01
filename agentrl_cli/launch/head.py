"""Whether servers must keep an output head of their own, apart from the input embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import ModelError
from agentrl_cli.launch.devices import Purpose, resolve_device
from agentrl_cli.launch.plan import resolve_engine_kind


def needs_untied_head(
    config: ExperimentConfig, model_folder: str, *, purpose: Purpose, num_gpus: int
) -> bool:
    """True where a server would keep an old output head when it gets new weights.

    On CPU vLLM packs a tied head once and never again: a reload answers 200 and leaves the head
    as it was. Such models are served with a head of their own, which every publication fills.

    Args:
        config: the experiment.
        model_folder: folder or hub id of the model.
        purpose: an evaluation's servers get no weights.
        num_gpus: of this machine.

    Raises:
        ModelError: the model's configuration cannot be read.
    """
    return (
        purpose == "train"
        and resolve_engine_kind(config, num_gpus) == "vllm"
        and config.model.lora is None
        and resolve_device(config.engine, num_gpus) == "cpu"
        and has_tied_embeddings(model_folder)
    )


def has_tied_embeddings(model_folder: str) -> bool:
    """True where output head and input embeddings of a model are one.

    Raises:
        ModelError: the model's configuration cannot be read.
    """
    path = Path(model_folder) / "config.json"
    if path.is_file():
        try:
            found = _find_tie(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        if found is not None:
            return found
    # Not said: the architecture's default counts, which transformers knows.
    from transformers import AutoConfig

    try:
        model_config = AutoConfig.from_pretrained(model_folder)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{model_folder}: its config.json cannot be loaded: {reason}") from error
    return bool(model_config.get_text_config().tie_word_embeddings)


def _find_tie(description: Any) -> bool | None:
    """What a config.json says, of the text model first; None where it says nothing."""
    if not isinstance(description, dict):
        return None
    for part in (description.get("text_config"), description):
        if isinstance(part, dict) and isinstance(part.get("tie_word_embeddings"), bool):
            return bool(part["tie_word_embeddings"])
    return None
