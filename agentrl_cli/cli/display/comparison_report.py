"""What ``agentrl compare`` prints: a table, verdicts and flips; and the reward curves of runs."""

from __future__ import annotations

import html
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl_cli.cli.display.final_report import format_mean_reward, read_evaluation
from agentrl_cli.errors import UserInputError
from agentrl_cli.log import format_count, sanitize
from agentrl_cli.sparkline import format_sparkline

if TYPE_CHECKING:
    from agentrl_cli.evaluate.comparison import Flip, PairedComparison, TaskResult
    from agentrl_cli.evaluate.eval_report import EvalReport
    from agentrl_cli.inspector.report.comparison_data import ComparedEvaluation, ComparedRun
    from agentrl_cli.inspector.report.report_page import WrittenReport
    from agentrl_cli.launch.compared_models import StoredEvaluation
    from agentrl_cli.store.run_folder import RunFolder

MAX_MODELS = len(ascii_uppercase)
#: Flips of one kind that the terminal lists; --json has all.
_MAX_FLIPS = 3
_MIN_TASKS = 10
_CURVE_WIDTH = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """A model, by the letter that stands for it."""

    letter: str
    evaluation: StoredEvaluation
    report: EvalReport
    tasks: Mapping[str, TaskResult]

    @property
    def name(self) -> str:
        """What was typed, and the evaluation that was made of it."""
        label = self.evaluation.label
        name = sanitize(self.evaluation.name)
        return name if label is None or name.endswith(label) else f"{name} ({label})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonReport:
    """Several models, and each but the first against the first."""

    models: Sequence[_Measured]
    comparisons: Sequence[PairedComparison]
    """Of every model after the first, in their order."""
    notes: Sequence[str]
    runs: Sequence[ComparedRun]
    """Those that the models are from."""

    @classmethod
    def build(
        cls,
        evaluations: Iterable[StoredEvaluation],
        notes: Iterable[str],
        runs: Iterable[RunFolder | None],
    ) -> ComparisonReport:
        """The report of stored evaluations.

        Args:
            evaluations: one of each model.
            notes: what comes before the notes that it adds.
            runs: of each model, the run that it is from.

        Raises:
            StoreError: an evaluation cannot be read.
        """
        from agentrl_cli.evaluate.comparison import compare_tasks, measure_tasks

        models = []
        for letter, evaluation in zip(ascii_uppercase, evaluations, strict=False):
            trajectories, report = read_evaluation(
                evaluation.run, evaluation.step, evaluation.label
            )
            tasks = measure_tasks(trajectories)
            models.append(
                _Measured(letter=letter, evaluation=evaluation, report=report, tasks=tasks)
            )
        comparisons = [compare_tasks(models[0].tasks, model.tasks) for model in models[1:]]
        return cls(
            models=models,
            comparisons=comparisons,
            notes=[*notes, *_list_notes(models, comparisons)],
            runs=_list_runs(runs),
        )

    def list_verdicts(self) -> list[str]:
        """A sentence about every model after the first."""
        first = self.models[0].letter
        return [
            comparison.format_verdict(first, model.letter)
            for model, comparison in zip(self.models[1:], self.comparisons, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with every flip."""
        models = [
            {
                "letter": model.letter,
                "name": sanitize(model.evaluation.name),
                "run": model.evaluation.run.location,
                "step": model.evaluation.step,
                "eval": model.evaluation.label,
                "report": model.report.to_dict(),
            }
            for model in self.models
        ]
        comparisons = []
        pairs = zip(self.models[1:], self.comparisons, self.list_verdicts(), strict=True)
        for model, comparison, sentence in pairs:
            flips = {
                kind: [asdict(f) | {"show": self._list_commands(model, f.task_id)} for f in found]
                for kind, found in _list_flips(comparison)
            }
            names = {"before": self.models[0].letter, "after": model.letter}
            verdict = {"verdict": comparison.verdict, "summary": sentence}
            comparisons.append(names | verdict | asdict(comparison) | flips)
        return {"models": models, "comparisons": comparisons, "notes": list(self.notes)}

    def _list_commands(self, model: _Measured, task_id: str) -> list[str]:
        """The commands that show what the first model, and this one, did at a task."""
        pair = (self.models[0], model)
        return [shlex.join(one.evaluation.list_inspect_words(task_id)) for one in pair]

    def print(self, console: Console) -> None:
        """Prints all but the flips beyond the first few."""
        for model in self.models:
            console.print(Text(f"{model.letter}  {model.name}"), soft_wrap=True)
        head, *rows = _build_cells(self.models)
        table = Table(box=None, pad_edge=False)
        for index, title in enumerate(head):
            table.add_column(title, justify="left" if index < 2 else "right")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print()
        console.print(table)
        console.print()
        pairs = zip(self.models[1:], self.comparisons, self.list_verdicts(), strict=True)
        for model, comparison, sentence in pairs:
            console.print(Text(sentence, style="bold"), soft_wrap=True)
            self._print_flips(model, comparison, console)
        for note in self.notes:
            console.print(Text(f"note: {sanitize(note)}", style="yellow"), soft_wrap=True)

    def _print_flips(
        self, model: _Measured, comparison: PairedComparison, console: Console
    ) -> None:
        from agentrl_cli.inspector.safe_text import one_line

        for kind, flips in _list_flips(comparison):
            for flip in flips[:_MAX_FLIPS]:
                title = f"  {kind.replace('_', ' ')}: task {flip.task_id}  "
                console.print(Text(title + one_line(flip.question, 79 - len(title))))
                commands = self._list_commands(model, flip.task_id)
                for letter, command in zip(
                    (self.models[0].letter, model.letter), commands, strict=True
                ):
                    line = Text(f"    {letter}  {sanitize(command)}", style="dim")
                    console.print(line, soft_wrap=True)
            if len(flips) > _MAX_FLIPS:
                num_more = format_count(len(flips) - _MAX_FLIPS, "more task")
                rest = f"  {kind.replace('_', ' ')}: {num_more} (--html and --json have all)"
                console.print(Text(rest))

    def format_markdown(self) -> str:
        """Table, verdicts and notes, to be pasted into a pull request."""
        head, *rows = _build_cells(self.models)
        names = ["model", *(model.name for model in self.models)]
        cells = [[row[0], name, *row[1:]] for row, name in zip([head, *rows], names, strict=True)]
        lines = _format_markdown_table(cells)
        lines += ["", *(f"- **{_escape(verdict)}**" for verdict in self.list_verdicts())]
        lines += [f"- {_escape(sanitize(note))}" for note in self.notes]
        return "\n".join(lines) + "\n"

    def write_page(self, path: Path) -> WrittenReport:
        """Writes the page of the models: all tasks, what was said, and the curves of their runs.

        Raises:
            StoreError: the disk is full, or the file cannot be written to.
        """
        from agentrl_cli.inspector.report.comparison_data import read_comparison
        from agentrl_cli.inspector.report.report_page import write_page

        letters = [model.letter for model in self.models[1:]]
        verdicts = dict(zip(letters, self.list_verdicts(), strict=True))
        notes = [*map(sanitize, self.notes)]
        evaluations = _list_evaluations(self.models)
        return write_page(*read_comparison(evaluations, self.runs, verdicts, notes), path)


def _list_evaluations(models: Sequence[_Measured]) -> list[ComparedEvaluation]:
    from agentrl_cli.inspector.report.comparison_data import ComparedEvaluation

    known: dict[str, list[str]] = {}
    evaluations = []
    for model in models:
        names = {}
        for key, task in model.tasks.items():
            # In another dataset, another task has the same position.
            rows = known.setdefault(task.task_id, [])
            if key not in rows:
                rows.append(key)
            number = rows.index(key) + 1
            names[task.task_id] = task.task_id if number == 1 else f"{task.task_id} (row {number})"
        evaluations.append(
            ComparedEvaluation(
                letter=model.letter,
                name=model.name,
                folder=model.evaluation.run,
                step=model.evaluation.step,
                label=model.evaluation.label,
                report=model.report.to_dict(),
                task_names=names,
            )
        )
    return evaluations


def _list_runs(runs: Iterable[RunFolder | None]) -> list[ComparedRun]:
    """Each run once, with the letters of all models that are from it."""
    from agentrl_cli.inspector.report.comparison_data import ComparedRun

    found: dict[str, tuple[RunFolder, list[str]]] = {}
    for letter, run in zip(ascii_uppercase, runs, strict=False):
        if run is not None:
            found.setdefault(run.location, (run, []))[1].append(letter)
    return [
        ComparedRun(letters=", ".join(letters), name=sanitize(location), folder=run)
        for location, (run, letters) in found.items()
    ]


def _list_flips(comparison: PairedComparison) -> list[tuple[str, Sequence[Flip]]]:
    return [
        ("newly_passed", comparison.newly_passed),
        ("newly_failed", comparison.newly_failed),
    ]


def _list_notes(
    models: Sequence[_Measured], comparisons: Sequence[PairedComparison]
) -> Iterable[str]:
    for model, comparison in zip(models[1:], comparisons, strict=True):
        if comparison.num_unpaired:
            yield (
                f"{format_count(comparison.num_unpaired, 'task')} of {models[0].letter} and "
                f"{model.letter} left out of the difference: not attempted, or without a reward, "
                "in one of them"
            )
    num_tasks = min(comparison.num_tasks for comparison in comparisons)
    if num_tasks < _MIN_TASKS:
        yield (
            f"the interval of {format_count(num_tasks, 'task')} is a rough guess; compare on "
            f"{_MIN_TASKS} or more"
        )
    for model in models:
        report = model.report
        if report.num_unscored:
            yield (
                f"{model.letter}: {report.num_unscored} of "
                f"{format_count(report.num_trajectories, 'trajectory').replace('ys', 'ies')} "
                "without a reward, left out of every mean"
            )


def _build_cells(models: Sequence[_Measured]) -> list[list[str]]:
    """The head and a row for each model."""
    from agentrl_cli.inspector.safe_text import format_number

    shared = set.intersection(*(set(model.report.pass_at_k) for model in models))
    k_values = sorted({min(shared), max(shared)}) if shared else []
    head = ["", "mean reward (95 %)", *(f"pass@{k}" for k in k_values)]
    rows = [[*head, "turns", "tokens", "seconds", "failed"]]
    for model in models:
        report = model.report
        lengths = (report.turns, report.completion_tokens, report.seconds)
        rows.append(
            [
                model.letter,
                format_mean_reward(report),
                *(f"{report.pass_at_k[k]:.3f}" for k in k_values),
                *(format_number(one.mean if one else None, 1) for one in lengths),
                str(report.num_policy_failures + report.num_surroundings_failures),
            ]
        )
    return rows


def _format_markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(map(_escape, row))} |" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


def _escape(text: str) -> str:
    """``text`` as Markdown shows it, on one line; no HTML, no links and no end of a cell."""
    line = html.escape(" ".join(text.split()), quote=False)
    return "".join(f"\\{c}" if c in "\\`*_[]|" else c for c in line)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCurves:
    """The mean reward of every step of several runs."""

    runs: Mapping[str, Sequence[float]]
    """By the name that was typed; NaN where a step has none."""
    folders: Sequence[RunFolder]

    @classmethod
    def read(cls, folders: Mapping[str, RunFolder]) -> RewardCurves:
        """The curves of the runs.

        Raises:
            UserInputError: no step of a run is done.
        """
        runs = {}
        for name, folder in folders.items():
            rewards = [line.get("reward_mean", math.nan) for line in folder.read_metrics()]
            if not any(map(math.isfinite, rewards)):
                raise UserInputError(f"{name}: no step of this run has a reward yet: no curve")
            runs[name] = rewards
        return cls(runs=runs, folders=[*folders.values()])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "curves": [
                {"run": name, "reward_mean": [r if math.isfinite(r) else None for r in rewards]}
                for name, rewards in self.runs.items()
            ]
        }

    def _build_cells(self) -> list[list[str]]:
        finite = [r for rewards in self.runs.values() for r in rewards if math.isfinite(r)]
        bounds = min(0.0, *finite), max(1.0, *finite)
        longest = max(map(len, self.runs.values()))
        rows = [["", "steps", "first", "reward", "last", "highest"]]
        for letter, rewards in zip(ascii_uppercase, self.runs.values(), strict=False):
            known = [r for r in rewards if math.isfinite(r)]
            # As wide as its share of the longest: equal steps stand below each other.
            width = math.ceil(min(_CURVE_WIDTH, longest) * len(rewards) / longest)
            curve = format_sparkline(rewards, width, bounds)
            ends = [f"{known[0]:.3f}", curve, f"{known[-1]:.3f}", f"{max(known):.3f}"]
            rows.append([letter, str(len(rewards)), *ends])
        return rows

    def print(self, console: Console) -> None:
        """Prints the curves below each other, on one scale."""
        for letter, name in zip(ascii_uppercase, self.runs, strict=False):
            console.print(Text(f"{letter}  {sanitize(name)}"), soft_wrap=True)
        head, *rows = self._build_cells()
        table = Table(box=None, pad_edge=False)
        for title in head:
            table.add_column(title, justify="left" if title == "reward" else "right")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print()
        console.print(table)

    def format_markdown(self) -> str:
        """The same as a table of Markdown."""
        head, *rows = self._build_cells()
        names = map(sanitize, self.runs)
        table = [[head[0], "run", *head[1:]]]
        table += [[row[0], name, *row[1:]] for row, name in zip(rows, names, strict=True)]
        return "\n".join(_format_markdown_table(table)) + "\n"

    def write_page(self, path: Path) -> WrittenReport:
        """Writes a page with every curve of the runs.

        Raises:
            StoreError: the disk is full, or the file cannot be written to.
        """
        from agentrl_cli.inspector.report.comparison_data import read_comparison
        from agentrl_cli.inspector.report.report_page import write_page

        return write_page(*read_comparison([], _list_runs(self.folders)), path)
