"""The models of a run in this process: the learner's, the engine's, the reference."""

from __future__ import annotations

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.embedded import EmbeddedEngine
from agentrl_cli.models.pretrained import choose_device, load_model
from agentrl_cli.train.learner import Learner


def load_learner(config: ExperimentConfig, model_folder: str, tokenizer: object) -> Learner:
    """A learner on the model's exact weights, with the reference model that a KL term needs.

    Raises:
        ModelError: the model cannot be loaded or followed.
    """
    device = choose_device()
    needs_reference = config.train.algorithm.kl_coef > 0
    return Learner(
        load_model(model_folder, "float32", device),
        config,
        reference_model=load_model(model_folder, "float32", device) if needs_reference else None,
        tokenizer=tokenizer,
        device=device,
    )


def load_engine(config: ExperimentConfig, model_folder: str, tokenizer: object) -> EmbeddedEngine:
    """An engine in this process on its own copy of the model.

    Raises:
        ModelError: the model cannot be loaded.
    """
    return EmbeddedEngine(
        load_model(model_folder, config.model.dtype, choose_device()),
        tokenizer,
        config.engine,
        model_name=config.model.path,
    )
