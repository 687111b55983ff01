"""``builtin:calculator``: a model of under a million parameters, made on first use.

It is made by supervised training on generated demonstrations, by the code that
``agentrl sft`` runs, and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path

import tokenizers
import torch
import transformers

from agentrl_cli.config.sft import (
    NewModelConfig,
    SftConfig,
    SftDatasetConfig,
    SftModelConfig,
    SftTrainConfig,
)
from agentrl_cli.log import Observer
from agentrl_cli.models.cache import make_once
from agentrl_cli.models.sft_training import train_and_save
from agentrl_cli.models.stopping import CheckStop, go_on

#: The files of this room that decide what the model becomes.
_SOURCES = (
    "calculator_demos.py",
    "calculator_prompt.py",
    "calculator_tasks.py",
    "chatml.jinja",
    "sft_rows.py",
    "sft_training.py",
    "tokenizer.py",
)


def build_calculator_config(output_path: str) -> SftConfig:
    """The warm start of the built-in model; ``configs/sft-calculator.yaml`` says the same."""
    return SftConfig(
        output_path=output_path,
        seed=1,
        model=SftModelConfig(
            new=NewModelConfig(
                vocab_size=1024,
                hidden_size=128,
                intermediate_size=384,
                num_layers=3,
                num_heads=4,
                initializer_range=0.06,
            ),
            dtype="float32",
        ),
        dataset=SftDatasetConfig(
            path="agentrl_cli.models.calculator_demos:build_demonstrations", shuffle=False
        ),
        train=SftTrainConfig(
            batch_tokens=1024,
            learning_rate=2.0e-3,
            min_learning_rate=1.0e-4,
            warmup_steps=20,
            device="cpu",
            num_threads=2,
        ),
    )


def make_calculator_model(observer: Observer, check_stop: CheckStop = go_on) -> Path:
    """The folder of the built-in model; made in about a minute if it is not in the cache.

    What ``check_stop`` raises ends the making, and nothing of it is kept.

    Raises:
        ModelError: the cache folder cannot be written.
    """
    name = f"calculator-{compute_digest()}"

    def make(folder: Path) -> None:
        train_and_save(build_calculator_config(str(folder)), None, observer, check_stop)

    return make_once(name, make, observer, check_stop)


def compute_digest() -> str:
    """Twelve hex digits of all that the model is made from: a change makes another model."""
    digest = hashlib.sha256()
    recipe = build_calculator_config("").model_dump(mode="json")
    digest.update(json.dumps(recipe, sort_keys=True).encode())
    for module in (torch, transformers, tokenizers):
        digest.update(f"{module.__name__} {module.__version__}\n".encode())
    room = resources.files("agentrl_cli.models")
    for source in _SOURCES:
        digest.update(source.encode() + room.joinpath(source).read_bytes())
    return digest.hexdigest()[:12]
