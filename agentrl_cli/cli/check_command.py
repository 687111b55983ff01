"""``agentrl check``."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.cli.eval_command import EndpointOption, check_endpoint
from agentrl_cli.cli.train_command import ConfigOption, OverridesArgument
from agentrl_cli.log import sanitize

if TYPE_CHECKING:
    from agentrl_cli.launch.preflight.check import CheckReport

_COLORS = {"error": "red", "warning": "yellow", "note": "cyan"}


def check_command(
    config: ConfigOption,
    overrides: OverridesArgument = None,
    tasks: Annotated[
        int, typer.Option(min=1, max=1000, help="Tasks that the agent is run on.", metavar="N")
    ] = 4,
    samples: Annotated[
        int, typer.Option(min=1, max=64, help="Attempts at each task.", metavar="N")
    ] = 2,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="The GPUs to train on, as NAME:COUNT or MEMORY:COUNT: H100:8, 80GB:8.",
            metavar="GPUS",
        ),
    ] = None,
    base_url: EndpointOption = None,
    model: Annotated[str | None, typer.Option(help="The endpoint's model.", metavar="NAME")] = None,
    timeout_seconds: Annotated[
        float, typer.Option(min=1.0, max=86_400.0, help="Longest time for the agent's runs.")
    ] = 300.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="The report as JSON; all else goes to stderr.")
    ] = False,
) -> None:
    """Look before training, without a GPU: will it work, and what must change first? Runs the
    agent on a few tasks; exits with 1 if there are errors."""
    check_endpoint(None, base_url, model)
    from agentrl_cli.cli.display.progress_display import build_observer
    from agentrl_cli.launch.preflight.check import run_check
    from agentrl_cli.launch.preflight.memory_fit import parse_gpus
    from agentrl_cli.launch.preflight.trial import TrialPlan

    gpus = None if gpu is None else parse_gpus(gpu)
    plan = TrialPlan(
        num_tasks=tasks,
        n_samples=samples,
        timeout_seconds=timeout_seconds,
        base_url=base_url,
        endpoint_model=model,
    )
    # What agents print, too, would stand in the JSON.
    with redirect_stdout(sys.stderr) if as_json else nullcontext(), build_observer() as observer:
        report = run_check(config, overrides or [], plan, gpus, observer)
    next_command = _build_next_command(report, config, overrides or [], gpu)
    if as_json:
        # What the user's code raised may hold a key.
        typer.echo(sanitize(json.dumps(report.to_dict() | {"next": next_command}, indent=2)))
    else:
        _print_report(report, next_command)
    if report.errors:
        raise typer.Exit(1)


def _print_report(report: CheckReport, next_command: str) -> None:
    for finding in report.findings:
        typer.echo()
        typer.secho(finding.severity.value, fg=_COLORS[finding.severity], bold=True, nl=False)
        where = f"  {finding.where}" if finding.where else ""
        typer.echo(sanitize(f" [{finding.code}]{where}"))
        for line in finding.found.splitlines():
            typer.echo(sanitize(f"  {line}"))
        for number, line in enumerate(finding.remedy.splitlines()):
            typer.echo(sanitize(f"  {'   ' if number else '-> '}{line}"))
    typer.echo()
    typer.secho(report.verdict, bold=True)
    typer.echo(f"next:  {sanitize(next_command)}")


def _build_next_command(
    report: CheckReport, config: Path, overrides: Sequence[str], gpu: str | None
) -> str:
    """Training if nothing is wrong; else the same check, with what the errors say to type."""
    words = [*overrides]
    if report.errors:
        remedies = report.typed_remedies
        keys = {word.partition("=")[0] for word in remedies}
        words = [word for word in words if word.partition("=")[0] not in keys] + remedies
        flags = [] if gpu is None else ["--gpu", gpu]
        return shlex.join(["agentrl", "check", "--config", str(config), *flags, *words])
    return shlex.join(["agentrl", "train", "--config", str(config), *words])
