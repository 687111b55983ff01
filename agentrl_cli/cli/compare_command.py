"""``agentrl compare``."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.errors import UserInputError
from agentrl_cli.log import format_count

if TYPE_CHECKING:
    from agentrl_cli.cli.display.comparison_report import ComparisonReport, RewardCurves

#: What is an override and no model: a path with ``=`` in its first part is typed as ./a=b.
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")

NamesArgument = Annotated[
    list[str],
    typer.Argument(
        help="Run folders or URLs (their newest checkpoints), checkpoints' folders, RUN/NAME "
        "(a stored evaluation), base (model.path), api:URL#MODEL (an OpenAI-compatible "
        "endpoint); and KEY=VALUE, as of agentrl eval.",
        metavar="A B [C...]",
    ),
]
SavedConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="The experiment's YAML file [default: what was saved with the first run].",
        metavar="FILE",
    ),
]


def compare_command(
    names: NamesArgument,
    config: SavedConfigOption = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Evaluate the first N tasks only.", metavar="N")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Of runs, the checkpoints with the best evaluation.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Evaluate once more what has been evaluated before.")
    ] = False,
    curves: Annotated[
        bool, typer.Option("--curves", help="Show the curves of runs; evaluate nothing.")
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(
            "--html",
            help="Also write a page: tasks and conversations side by side, curves of runs in one "
            "picture.",
            metavar="FILE",
        ),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(help="Also write a table to paste into a pull request.", metavar="FILE"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The comparison as JSON; all else goes to stderr.")
    ] = False,
) -> None:
    """Compare models on the same tasks with the same agent: each with the first."""
    models = [name for name in names if not _OVERRIDE.match(name)]
    overrides = [name for name in names if _OVERRIDE.match(name)]
    _check_names(models)
    _check_markdown(markdown)
    from agentrl_cli.cli.stored_runs.report_command import check_page
    from agentrl_cli.inspector.inspect_run import build_console

    check_page(page, "comparison.html")

    report: ComparisonReport | RewardCurves
    # What agents print, too, would stand in the JSON.
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        if curves:
            report = _read_curves(models)
        else:
            report = _compare(models, config, overrides, limit=limit, best=best, again=again)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        report.print(build_console())
    _write_files(report, markdown, page, err=as_json)


def _write_files(
    report: ComparisonReport | RewardCurves,
    markdown: Path | None,
    page: Path | None,
    *,
    err: bool,
) -> None:
    from agentrl_cli.cli.stored_runs.report_command import say_what_belongs_to
    from agentrl_cli.store.atomic_files import write_text

    if markdown is not None:
        write_text(markdown, report.format_markdown())
        typer.echo(f"written: {markdown}", err=err)
    if page is not None:
        written = report.write_page(page)
        typer.echo(f"written: {page}", err=err)
        say_what_belongs_to(written, err=err)


def _check_markdown(path: Path | None) -> None:
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        problem = "a folder" if path.is_dir() else "its folder does not exist"
        raise UserInputError(
            f"--markdown {path}: {problem}. Name a file, as in --markdown comparison.md"
        )


def _check_names(models: Sequence[str]) -> None:
    from agentrl_cli.cli.display.comparison_report import MAX_MODELS

    if not 2 <= len(models) <= MAX_MODELS:
        raise UserInputError(
            f"agentrl compare: found {format_count(len(models), 'model')}. Allowed: 2 to "
            f"{MAX_MODELS}, as in agentrl compare --config FILE base runs/EXPERIMENT/TRIAL"
        )
    repeated = [name for name, count in Counter(models).items() if count > 1]
    if repeated:
        raise UserInputError(f"{repeated[0]} was named twice: name each model once")


def _compare(
    names: Sequence[str],
    config: Path | None,
    overrides: Sequence[str],
    *,
    limit: int | None,
    best: bool,
    again: bool,
) -> ComparisonReport:
    from agentrl_cli.cli.command_exit import crashes_logged
    from agentrl_cli.cli.display.comparison_report import ComparisonReport
    from agentrl_cli.cli.display.progress_display import build_observer
    from agentrl_cli.launch import compared_models
    from agentrl_cli.store.layout import run_dir_of
    from agentrl_cli.store.run_folder import RunFolder

    models = [compared_models.find_model(name, best=best) for name in names]
    stored = [m for m in models if isinstance(m, compared_models.StoredEvaluation)]
    run = compared_models.find_configured_run(models)
    if config is None and len(stored) == len(models):
        notes: list[str] = []
        if run is not None:
            notes = compared_models.list_differences(run.load_config(), models, run.location)
        return ComparisonReport.build(stored, notes, [model.run for model in models])
    experiment = compared_models.load_shared_config(config, overrides, models)
    owner = str(config) if config is not None or run is None else run.location
    notes = compared_models.list_differences(experiment, models, owner)
    options: dict[str, Any] = {"limit": limit, "again": again}
    with (
        crashes_logged(lambda: RunFolder.open_log(run_dir_of(experiment), "eval")),
        build_observer() as observer,
    ):
        made = list(
            compared_models.evaluate_models(experiment, models, observer=observer, **options)
        )
    return ComparisonReport.build(made, notes, [model.run for model in models])


def _read_curves(names: Sequence[str]) -> RewardCurves:
    from agentrl_cli.cli.display.comparison_report import RewardCurves
    from agentrl_cli.store.run_folder import RunFolder

    return RewardCurves.read({name: RunFolder.open(name) for name in names})
