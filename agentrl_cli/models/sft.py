"""The supervised warm start of ``agentrl sft``."""

from __future__ import annotations

from pathlib import Path

from agentrl_cli.config.sft import SftConfig
from agentrl_cli.errors import ModelError
from agentrl_cli.log import Observer
from agentrl_cli.models.loading import resolve_model_folder
from agentrl_cli.models.sft_training import train_and_save


def run_sft(config: SftConfig, observer: Observer) -> Path:
    """The folder ``config.output_path`` with the trained model, in Hugging Face format.

    The folder appears whole, when all is done, or not at all.

    Raises:
        UserInputError: the model, the dataset or the output folder cannot be used.
        RunError: the loss stopped being a number, or the folder cannot be written.
    """
    output = Path(config.output_path)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ModelError(
            f"output_path: {output} exists already, and nothing is ever written over. Type "
            "output_path=NEW_FOLDER, or delete it"
        )
    start = config.model.path
    return train_and_save(
        config, None if start is None else resolve_model_folder(start, observer), observer
    )
