"""``agentrl sft``."""

from __future__ import annotations

from agentrl_cli.cli.train_command import ConfigOption, OverridesArgument


def sft_command(config: ConfigOption, overrides: OverridesArgument = None) -> None:
    """Train a model on conversations, as a warm start before reinforcement learning."""
    import typer

    from agentrl_cli.config.config_file import load_config_as
    from agentrl_cli.config.sft_config import SftConfig

    sft_config = load_config_as(SftConfig, config, overrides or [])

    from agentrl_cli.cli.display.progress_display import build_observer
    from agentrl_cli.models.builtin_models import resolve_model_folder
    from agentrl_cli.models.sft_training import train_and_save

    with build_observer() as observer:
        start = sft_config.model.path
        start = resolve_model_folder(start, observer) if start is not None else None
        folder = train_and_save(sft_config, start, observer)
    typer.echo(f"the model is in {folder}; train it with  model.path={folder}")
