"""``agentrl eval``."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.cli.train_command import ConfigOption, OverridesArgument
from agentrl_cli.errors import UserInputError

if TYPE_CHECKING:
    from agentrl_cli.evaluate.eval_report import EvalReport

CheckpointOption = Annotated[
    str | None,
    typer.Option(help="A checkpoint's folder (or URL), instead of model.path.", metavar="DIR"),
]
EndpointOption = Annotated[
    str | None,
    typer.Option(help="Run the agent on this OpenAI-compatible endpoint.", metavar="URL"),
]
NameOption = Annotated[
    str | None,
    typer.Option(help="What to call this evaluation (default: the model's).", metavar="NAME"),
]


SaveTasksOption = Annotated[
    Path | None,
    typer.Option(
        help="Write the tasks to this .jsonl file, each with its pass_rate, by which "
        "train_dataset.min_pass_rate and max_pass_rate choose.",
        metavar="FILE",
    ),
]


def evaluate_command(
    config: ConfigOption,
    overrides: OverridesArgument = None,
    checkpoint: CheckpointOption = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Evaluate the first N tasks only.", metavar="N")
    ] = None,
    base_url: EndpointOption = None,
    name: NameOption = None,
    model: Annotated[str | None, typer.Option(help="The endpoint's model.", metavar="NAME")] = None,
    save_tasks: SaveTasksOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The report as JSON; all else goes to stderr.")
    ] = False,
) -> None:
    """Measure an agent on the validation dataset (the training one where there is none): mean
    reward, pass@k, lengths, failures."""
    check_endpoint(checkpoint, base_url, model)
    _check_name(name)
    _check_task_file(save_tasks)
    check_checkpoint(checkpoint)
    from agentrl_cli.config.config_file import load_config
    from agentrl_cli.launch.run_resolution import resolve_run_here

    experiment = load_config(config, overrides or [])
    run = resolve_run_here(experiment, "eval") if base_url is None else None

    from agentrl_cli.cli.command_exit import crashes_logged
    from agentrl_cli.cli.display.progress_display import build_observer
    from agentrl_cli.launch.completion_sources import EndpointSource, EngineSource
    from agentrl_cli.launch.local_run import run_evaluation
    from agentrl_cli.store.layout import run_dir_of
    from agentrl_cli.store.run_folder import RunFolder

    run_dir = run_dir_of(experiment)
    with (
        # What agents print, too, would stand in the JSON.
        redirect_stdout(sys.stderr) if as_json else nullcontext(),
        crashes_logged(lambda: RunFolder.open_log(run_dir, "eval")),
        build_observer() as observer,
        open_checkpoint(checkpoint) as folder,
    ):
        source = (
            EndpointSource(experiment, base_url or "", model or "")
            if run is None
            else EngineSource(experiment, run, observer, folder)
        )
        name, report = run_evaluation(experiment, source, limit=limit, observer=observer, name=name)
    described = {
        "model": checkpoint or model or experiment.model.path,
        "dataset": experiment.resolve_eval_dataset()[0],
        "run": run_dir,
        "name": name,
    }
    if as_json:
        typer.echo(json.dumps(described | report.to_dict(), indent=2))
    else:
        _print_report(report, described)
    if save_tasks is not None:
        _save_tasks(run_dir, name, save_tasks)


def _print_report(report: EvalReport, described: Mapping[str, str]) -> None:
    from agentrl_cli.cli.display.final_report import build_report_table
    from agentrl_cli.inspector.inspect_run import build_console

    typer.secho(f"{described['model']} on {described['dataset']}", bold=True)
    build_console().print(build_report_table(report))
    look = f"agentrl inspect-trajectories {shlex.quote(described['run'])}"
    typer.echo(f"look at its trajectories:  {look} --evals {described['name']}")


def _save_tasks(run_dir: str, name: str, path: Path) -> None:
    from agentrl_cli.evaluate.eval_run import save_pass_rates
    from agentrl_cli.store.run_folder import RunFolder

    num_saved = save_pass_rates(RunFolder.open(run_dir), name, path)
    choose = f"train_dataset.path={shlex.quote(str(path))} train_dataset.min_pass_rate=0.1"
    # With --json, stdout is the report's alone.
    typer.echo(
        f"{num_saved} tasks with pass rates:  {choose} train_dataset.max_pass_rate=0.9", err=True
    )


def _check_task_file(path: Path | None) -> None:
    if path is not None and (path.suffix != ".jsonl" or path.is_dir()):
        raise UserInputError(
            f"--save-tasks {path}: it writes a file of JSON lines, whose name ends in .jsonl. "
            f"Type --save-tasks {path.with_name('tasks.jsonl')}"
        )


def _check_name(name: str | None) -> None:
    from agentrl_cli.inspector.trajectory_query import TRAINING_EVALS

    if name in ("all", TRAINING_EVALS):
        raise UserInputError(
            f"--name {name}: agentrl inspect-trajectories --evals {name} shows others too. "
            f"Type another name, as --name {name}-1"
        )


def check_endpoint(checkpoint: str | None, base_url: str | None, model: str | None) -> None:
    """Refuses an endpoint without its model's name, and what contradicts it.

    Raises:
        UserInputError: saying what to add or to leave out.
    """
    if base_url is not None and model is None:
        raise UserInputError("--base-url needs the model's name there. Add --model NAME")
    if model is not None and base_url is None:
        raise UserInputError(
            "--model is the name of a model at an endpoint. Add --base-url URL, "
            "or type model.path=NAME for a model that agentrl runs itself"
        )
    if base_url is not None and not base_url.startswith(("http://", "https://")):
        raise UserInputError(
            f"--base-url {base_url!r} is no URL. Type it like https://api.openai.com/v1"
        )
    if checkpoint is not None and base_url is not None:
        raise UserInputError("--checkpoint and --base-url name two different models: give one")


@contextmanager
def open_checkpoint(checkpoint: str | None) -> Iterator[Path | None]:
    """The folder of the checkpoint inside the block; from object storage, a copy of it."""
    from agentrl_cli.store.layout import is_url
    from agentrl_cli.store.run_folder import RunFolder

    if checkpoint is None or not is_url(checkpoint):
        yield None if checkpoint is None else Path(checkpoint)
        return
    with RunFolder.open(checkpoint) as run:
        folder = run.fetch(run.find_inside(checkpoint))
        _check_model_files(folder, checkpoint)
        yield folder


def check_checkpoint(checkpoint: str | None) -> None:
    """Refuses what is no checkpoint's folder on this machine.

    Raises:
        UserInputError: saying what is missing.
    """
    if checkpoint is not None and "://" not in checkpoint:
        _check_model_files(Path(checkpoint), checkpoint)


def _check_model_files(folder: Path, checkpoint: str) -> None:
    # The second is an adapter's, which names the model that it was trained on.
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        problem = (
            "has no config.json or adapter_config.json" if folder.is_dir() else "no such folder"
        )
        raise UserInputError(
            f"--checkpoint {checkpoint}: {problem}. Allowed: a folder such as "
            "runs/EXPERIMENT/TRIAL/checkpoints/step-000050"
        )
