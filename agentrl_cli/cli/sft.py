"""``agentrl sft``."""

from __future__ import annotations

from agentrl_cli.cli.options import ConfigOption, OverridesArgument


def sft_command(config: ConfigOption, overrides: OverridesArgument = None) -> None:
    """Train a model on conversations, as a warm start before reinforcement learning."""
    import typer

    from agentrl_cli.config.loading import load_config_as
    from agentrl_cli.config.sft import SftConfig

    sft_config = load_config_as(SftConfig, config, overrides or [])

    from agentrl_cli.cli.display import build_observer
    from agentrl_cli.models.sft import run_sft

    with build_observer() as observer:
        folder = run_sft(sft_config, observer)
    typer.echo(f"the model is in {folder}; train it with  model.path={folder}")
