"""``agentrl train --seeds``: one configuration with several seeds, one run after the other."""

from __future__ import annotations

import math
import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from agentrl_cli.cli.command_exit import run_reporting_failures
from agentrl_cli.errors import AgentrlError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from agentrl_cli.config.experiment import ExperimentConfig
    from agentrl_cli.store.run_folder import RunFolder

#: Exit codes above it are of commands that were stopped.
_STOPPED = 128
#: What the table has of each run.
_COLUMNS = ("first reward", "last reward", "first evaluation", "last evaluation")


@dataclass(frozen=True, slots=True)
class SeedResults:
    """What the runs of several seeds came to."""

    exit_code: int
    _table: Table
    _runs: Sequence[RunFolder]

    def print(self, console: Console) -> None:
        """Prints the results, and what to type to see the curves of the runs."""
        from agentrl_cli.cli.display.comparison_report import MAX_MODELS

        console.print(self._table)
        runs = [run.location for run in self._runs if _has_curve(run)][:MAX_MODELS]
        if len(runs) > 1:
            words = ["agentrl", "compare", "--curves", *runs]
            line = f"\nsee their curves in one picture:  {shlex.join(words)} --html curves.html"
            console.print(line, markup=False, soft_wrap=True)


def train_seeds(
    train: Callable[[list[str]], None],
    config: Path,
    overrides: Sequence[str],
    typed: str,
    *,
    skip_finished: bool,
) -> SeedResults:
    """Calls ``train`` with the overrides of each seed, and gives what the runs came to.

    A run that fails does not keep the others from running; one that is stopped does.

    Raises:
        ConfigError: the seeds or the configuration cannot be used.
    """
    from agentrl_cli.config.config_file import load_config

    own = next((word for word in overrides if word.startswith("seed=")), None)
    if own is not None:
        raise ConfigError(f"{own}: --seeds {typed} gives every run its seed. Leave {own} out")
    trial = load_config(config, overrides).trial_name
    typed_seeds = {
        seed: [*overrides, f"seed={seed}", f"trial_name={trial}-seed{seed}"]
        for seed in _parse_seeds(typed)
    }
    experiments = {seed: load_config(config, words) for seed, words in typed_seeds.items()}
    codes: dict[int, int] = {}
    for number, (seed, words) in enumerate(typed_seeds.items(), 1):
        typer.secho(f"seed {seed} ({number} of {len(experiments)})", bold=True)
        run = partial(_train_one, train, experiments[seed], words, skip_finished=skip_finished)
        codes[seed] = run_reporting_failures(run)
        if codes[seed] > _STOPPED:
            return _read_runs(experiments, codes, codes[seed])
    failed = set(codes.values()) - {0}
    code = 0 if not failed else 2 if set(codes.values()) == {2} else 1
    return _read_runs(experiments, codes, code)


def _train_one(
    train: Callable[[list[str]], None],
    experiment: ExperimentConfig,
    words: list[str],
    *,
    skip_finished: bool,
) -> None:
    if skip_finished and _is_finished(experiment):
        typer.echo("its last step is done already")
        return
    try:
        train(words)
    except typer.Exit as end:
        raise SystemExit(end.exit_code) from None


def _parse_seeds(typed: str) -> list[int]:
    """The seeds of ``1,2,3``."""
    if re.fullmatch(r"\d+(,\d+)*", typed.replace(" ", "")) is None:
        raise ConfigError(
            f"--seeds {typed!r} is not understood. Allowed: whole numbers from 0 on, as in "
            "--seeds 1,2,3"
        )
    seeds = [int(seed) for seed in typed.split(",")]
    repeated = next((seed for seed in seeds if seeds.count(seed) > 1), None)
    if repeated is not None:
        raise ConfigError(f"--seeds {typed}: {repeated} is there twice: name each seed once")
    return seeds


def _is_finished(experiment: ExperimentConfig) -> bool:
    """True where the run's last step is done, with the same configuration."""
    from agentrl_cli.store.run_folder import RunFolder

    RunFolder.check_resumable(experiment)
    run = _find_run(experiment)
    latest = None if run is None else run.latest_checkpoint()
    return latest is not None and latest[0] >= experiment.train.total_steps


def _read_runs(
    experiments: Mapping[int, ExperimentConfig], codes: Mapping[int, int], code: int
) -> SeedResults:
    runs = (_find_run(experiments[seed]) for seed in codes)
    return SeedResults(code, _build_table(experiments, codes), [run for run in runs if run])


def _has_curve(run: RunFolder) -> bool:
    return any(math.isfinite(line.get("reward_mean", math.nan)) for line in run.read_metrics())


def _find_run(experiment: ExperimentConfig) -> RunFolder | None:
    """The run's folder; None where a cluster has it, on a disk of its own."""
    from agentrl_cli.store.layout import run_dir_of
    from agentrl_cli.store.run_folder import RunFolder

    try:
        return RunFolder.open(run_dir_of(experiment))
    except AgentrlError:
        return None


def _build_table(experiments: Mapping[int, ExperimentConfig], codes: Mapping[int, int]) -> Table:
    """A row for each seed, and the mean with its interval over those whose run was completed."""
    table = Table(box=None, pad_edge=False)
    for title in ("seed", *_COLUMNS):
        table.add_column(title, justify="right")
    completed: list[Sequence[float]] = []
    for seed, experiment in experiments.items():
        if codes.get(seed) != 0:
            ended = f"exit code {codes[seed]}" if seed in codes else "not begun"
            table.add_row(str(seed), ended)
            continue
        results = _read_results(experiment)
        completed.append(results)
        table.add_row(str(seed), *map(_format, results))
    if completed:
        columns = [
            [v for v in column if math.isfinite(v)] for column in zip(*completed, strict=True)
        ]
        table.add_section()
        table.add_row("mean", *(_format(statistics.fmean(c)) if c else "-" for c in columns))
        table.add_row("95 %", *map(_format_interval, columns))
    return table


def _read_results(experiment: ExperimentConfig) -> list[float]:
    """The numbers of the table; NaN where there is none."""
    from agentrl_cli.store.run_outline import read_metric

    folder = _find_run(experiment)
    if folder is None:
        return [math.nan] * len(_COLUMNS)
    rewards = [m["reward_mean"] for m in folder.read_metrics() if "reward_mean" in m]
    steps = folder.eval_steps()
    results = [math.nan, math.nan] if not rewards else [rewards[0], rewards[-1]]
    for step in (steps[0], steps[-1]) if steps else ():
        value = read_metric(folder.read_eval_report(step), "mean_reward")
        results.append(math.nan if value is None else value)
    return (results + [math.nan] * len(_COLUMNS))[: len(_COLUMNS)]


def _format(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"


def _format_interval(values: Sequence[float]) -> str:
    """The t interval over the seeds; of rewards from 0 to 1, inside of that range."""
    from agentrl_cli.evaluate.eval_report import compute_clustered_interval

    interval = compute_clustered_interval([[value] for value in values])
    if interval is None:
        return "-"
    low, high = interval
    if min(values) >= 0.0 and max(values) <= 1.0:
        low, high = max(0.0, low), min(1.0, high)
    return f"{low:.3f} to {high:.3f}"
