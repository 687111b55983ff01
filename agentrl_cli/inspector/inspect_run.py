"""What ``agentrl inspect-trajectories`` prints for a query."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from rich.console import Console

from agentrl_cli.inspector import json_view
from agentrl_cli.inspector.list_view import (
    build_mismatch_table,
    build_step_table,
    build_trajectory_table,
    format_alarms,
    summarize_steps,
)
from agentrl_cli.inspector.trajectory_query import Selection, TrajectoryQuery, find_one, select
from agentrl_cli.inspector.trajectory_view import (
    build_token_tables,
    build_tree,
    find_untrained_reason,
    load_spell,
)
from agentrl_cli.prefix_mismatches import MismatchSummary, summarize_prefix_mismatches
from agentrl_cli.store.run_folder import RunFolder

#: Columns of a pipe or a file, which have no width of their own.
_PIPE_WIDTH = 160


def inspect_run(
    run: str | Path,
    trajectory: str | None,
    query: TrajectoryQuery,
    *,
    tokens: bool = False,
    tokenizer_path: str | None = None,
    as_json: bool = False,
    console: Console | None = None,
) -> None:
    """Prints a run's steps, a query's trajectories, or one trajectory.

    Raises:
        UserInputError: no such run, step or trajectory.
    """
    folder = RunFolder.open(run)
    console = console or build_console()
    if trajectory is not None:
        _show_one(folder, trajectory, query, tokens, tokenizer_path, as_json, console)
    elif query.is_empty and not tokens:
        _show_steps(folder, as_json, console)
    else:
        selection = select(folder, query)
        if tokens and len(selection.found) == 1:
            name = selection.found[0].summary.id
            _show_one(folder, name, query, tokens, tokenizer_path, as_json, console)
            return
        _show_selection(folder, selection, as_json, console)
        if tokens and not as_json:
            _hint(console, "to see tokens, name one: add its number or id")


def _show_steps(folder: RunFolder, as_json: bool, console: Console) -> None:
    summaries = summarize_steps(folder)
    if as_json:
        print(json_view.format_steps(folder.location, summaries))
        return
    if not summaries:
        _hint(console, f"{folder.location}: nothing is stored yet; the first step is being sampled")
        return
    console.print(build_step_table(summaries))
    for problem in (s.problem for s in summaries if s.problem is not None):
        _hint(console, problem)
    of_steps = (s.prefix_mismatches for s in summaries if not s.source.is_eval)
    _show_prefix_mismatches(
        sum(of_steps, MismatchSummary()), "prefix mismatches over all steps", console
    )
    for line in format_alarms(folder.read_alarms()):
        _hint(console, line)
    last = next((s.source.step for s in reversed(summaries) if not s.source.is_eval), None)
    options = "--evals all" if last is None else f"--step {last}"
    _hint(console, f"its trajectories:  agentrl inspect-trajectories {_quote(folder)} {options}")


def _show_selection(
    folder: RunFolder, selection: Selection, as_json: bool, console: Console
) -> None:
    if as_json:
        print(json_view.format_selection(folder.location, selection))
        return
    if not selection.found:
        _hint(console, "no trajectory matches")
    else:
        console.print(build_trajectory_table(selection.found, console.width))
        shown = sum((f.summary.prefix_mismatches for f in selection.found), MismatchSummary())
        _show_prefix_mismatches(shown, "prefix mismatches in these trajectories", console)
    for problem in selection.problems:
        _hint(console, problem)
    if selection.num_matching > len(selection.found):
        _hint(
            console,
            f"{len(selection.found)} of {selection.num_matching} are shown; more with --limit",
        )
    if selection.found:
        name = selection.found[0].summary.id
        _hint(console, f"the first one:  agentrl inspect-trajectories {_quote(folder)} {name}")


def _show_one(
    folder: RunFolder,
    name: str,
    query: TrajectoryQuery,
    tokens: bool,
    tokenizer_path: str | None,
    as_json: bool,
    console: Console,
) -> None:
    source, trajectory = find_one(folder, query, name)
    untrained = find_untrained_reason(folder, source, trajectory) if tokens else None
    proximal = source.read_proximal_logprobs(folder, trajectory) if tokens else {}
    is_trained = untrained is None
    if as_json:
        shown = json_view.format_trajectory(
            source, trajectory, tokens=tokens, trained=is_trained, proximal=proximal
        )
        print(shown)
        return
    console.print(build_tree(trajectory, source.name))
    _show_prefix_mismatches(
        summarize_prefix_mismatches([trajectory]), "prefix mismatches in this trajectory", console
    )
    if not tokens:
        hint = f"agentrl inspect-trajectories {_quote(folder)} {trajectory.id} --tokens"
        _hint(console, f"its tokens:  {hint}")
        return
    spell = load_spell(folder, tokenizer_path)
    for table in build_token_tables(trajectory, spell, is_trained=is_trained, proximal=proximal):
        console.print(table)
    if untrained is not None:
        _hint(console, f"none of these tokens is trained on: {untrained}")
    if spell is None:
        _hint(console, "to see the tokens as text, add --tokenizer MODEL_FOLDER")


def _quote(folder: RunFolder) -> str:
    return shlex.quote(folder.location)


def _show_prefix_mismatches(summary: MismatchSummary, title: str, console: Console) -> None:
    table = build_mismatch_table(summary, title)
    if table is not None:
        console.print()
        console.print(table)


def _hint(console: Console, text: str) -> None:
    console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def build_console() -> Console:
    """As wide as the terminal, or as a pipe needs."""
    is_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_PIPE_WIDTH if is_piped else None, highlight=False)
