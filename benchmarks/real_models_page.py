"""The page and the curves that benchmarks/real_models.py makes of its records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from agentrl_cli.evaluate.eval_report import compute_t_quantile

if TYPE_CHECKING:
    from benchmarks.real_models import Record

_COLUMNS = (
    "run", "seeds", "computed in", "base", "trained, by seed", "trained, mean (95 % over seeds)",
    "by transformers alone", "steps", "minutes",
)  # fmt: skip
_PART_COLUMNS = ("run", "part of the reward", "base", "trained, mean over seeds")
_HEALTH_COLUMNS = (
    "run", "steps", "seconds a step", "logprob gap", "entropy", "trainer's memory, MB",
)  # fmt: skip
#: Steps of a run whose first and last are worth comparing.
_LONG = 100
_NUM_COMPARED = 20


def write_page(records: Sequence[Record], results: Path) -> None:
    """Writes ``real-models.md`` into a folder, and a picture of each variant into its folder
    ``real-models``, where ``notes.md`` is the end of the page."""
    by_variant: dict[str, list[Record]] = {}
    for record in records:
        by_variant.setdefault(record.variant, []).append(record)
    for name, of_variant in by_variant.items():
        _draw(of_variant, results / "real-models" / f"{name}.svg")
    rows = [_format_row(name, of_variant) for name, of_variant in by_variant.items()]
    parts = [row for name, of_variant in by_variant.items() for row in _list_parts(of_variant)]
    curves = "\n".join(
        f"![Reward of {name} by step](real-models/{name}.svg)" for name in by_variant
    )
    notes = (results / "real-models" / "notes.md").read_text(encoding="utf-8").strip()
    (results / "real-models.md").write_text(
        f"""# A pretrained model learns the examples

Made by `python -m benchmarks.real_models`: SmolLM2-135M-Instruct learns the projects of
[examples/](../../examples/README.md) with their own configs, on 2 CPU cores that vLLM and the
trainer share, in bfloat16 where the processor computes in it, else in float32. Rewards are of
held-out tasks, which share no instance with training, sampled greedily
(`eval_gconfig.temperature: 0`), but in the two games; of alphabet-sort, whose three turns are
scored one by one, of the last turn. *Base*: the model as it is, or after the example's warm start
(calculator-tools, alphabet-sort, search). Intervals are of 95 %, those of one model clustered by
task. *By transformers alone*: the last checkpoint, run by
`python -m benchmarks.transformers_check`, which generates without agentrl. *Minutes*: the median
over seeds of what the steps took, on machines of several kinds and, in float32, beside other work;
starting and evaluating come on top. *Random* and *shuffled rewards* are negative controls: they
train on rewards that say nothing of the reply (`benchmarks/meaningless_rewards.py`), are evaluated
as the example is, and must not rise.

{_format_table(_COLUMNS, rows)}

What the rewards are made of, where they have parts:

{_format_table(_PART_COLUMNS, parts)}

{_format_long_runs(records)}## Curves

Thin: the mean reward of the batches that were trained on. Points: held-out tasks.

{curves}

{notes}
""",
        encoding="utf-8",
    )


def _format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _format_row(name: str, records: Sequence[Record]) -> list[str]:
    after = [r.evals[-1]["mean"] for r in records]
    seconds = statistics.median(sum(r.steps["step_seconds"]) for r in records)
    return [
        name,
        ", ".join(str(r.seed) for r in records),
        ", ".join(dict.fromkeys(r.machine["dtype"] for r in records)),
        # Often the same model: a warm start is another one where it was made on another machine.
        ", ".join(dict.fromkeys(_format_eval(r.evals[0]) for r in records)),
        ", ".join(_format_eval(r.evals[-1]) for r in records),
        _format_mean(after),
        ", ".join(f"{r.check['mean']:.3f}" for r in records),
        str(len(records[0].steps["reward_mean"])),
        f"{seconds / 60:.0f}",
    ]


def _format_eval(measured: Mapping[str, Any]) -> str:
    low, high = measured["interval"]
    return f"{measured['mean']:.3f} ({low:.3f} to {high:.3f})"


def _format_mean(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    if len(values) < 3:
        return "-"
    quantile = compute_t_quantile(0.975, len(values) - 1)
    margin = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.3f} ± {margin:.3f}"


def _list_parts(records: Sequence[Record]) -> list[list[str]]:
    """A row for each part of a variant's reward."""
    return [
        [
            records[0].variant,
            part,
            *(
                f"{statistics.fmean(r.evals[index]['parts'][part] for r in records):.3f}"
                for index in (0, -1)
            ),
        ]
        for part in records[0].evals[-1]["parts"]
    ]


def _format_long_runs(records: Sequence[Record]) -> str:
    """A table with what must not drift, and an empty line; nothing where no run is long."""
    long = [record for record in records if len(record.steps["reward_mean"]) >= _LONG]
    if not long:
        return ""
    table = _format_table(_HEALTH_COLUMNS, [_format_health(record) for record in long])
    ends = f"the first {_NUM_COMPARED} steps, and of the last {_NUM_COMPARED}"
    return f"Long runs: the median of {ends}. Shorter replies take less time.\n\n{table}\n\n"


def _format_health(record: Record) -> list[str]:
    names = ("step_seconds", "logprob_gap_mean", "entropy", "memory_mb")
    cells = [record.variant, str(len(record.steps["reward_mean"]))]
    for name, digits in zip(names, (1, 3, 2, 0), strict=True):
        values = record.steps[name]
        ends = (values[:_NUM_COMPARED], values[-_NUM_COMPARED:])
        cells.append(", ".join(f"{statistics.median(end):.{digits}f}" for end in ends))
    return cells


def _draw(records: Sequence[Record], path: Path) -> None:
    """Reward of the training batches as lines, of the held-out tasks as points; a colour a seed."""
    # Equal records give equal bytes.
    name = records[0].variant
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(6, 3), layout="constrained")
        axes = figure.add_subplot()
        for number, record in enumerate(records):
            rewards = record.steps["reward_mean"]
            color = f"C{number}"
            axes.plot(range(1, len(rewards) + 1), rewards, color=color, linewidth=0.8, alpha=0.6)
            means = [e["mean"] for e in record.evals]
            axes.errorbar(
                [e["step"] for e in record.evals],
                means,
                # Bounds below, bounds above.
                [
                    [
                        abs(mean - e["interval"][side])
                        for mean, e in zip(means, record.evals, strict=True)
                    ]
                    for side in (0, 1)
                ],
                fmt="o-",
                color=color,
                markersize=4,
                capsize=2,
                label=f"seed {record.seed}, held out",
            )
        axes.set_xlabel("step")
        axes.set_ylabel("reward")
        axes.set_ylim(bottom=0)
        axes.set_title(name)
        axes.legend(loc="best", frameon=False)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
