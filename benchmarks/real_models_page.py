"""The page and the curves that benchmarks/real_models.py makes of its records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

from agentrl_cli.evaluate.eval_report import compute_t_quantile

if TYPE_CHECKING:
    from benchmarks.real_models import Record

_PAGE = Path("docs/results/real-models.md")
_NOTES = Path("docs/results/real-models/notes.md")
_COLUMNS = (
    "run", "seeds", "base", "trained, by seed", "trained, mean (95 % over seeds)",
    "by transformers alone", "steps", "minutes",
)  # fmt: skip


def write_page(records: Sequence[Record]) -> None:
    """Writes docs/results/real-models.md and a picture for each variant."""
    by_variant: dict[str, list[Record]] = {}
    for record in records:
        by_variant.setdefault(record.variant, []).append(record)
    for name, of_variant in by_variant.items():
        _draw(name, of_variant)
    rows = [_format_row(name, of_variant) for name, of_variant in by_variant.items()]
    curves = "\n".join(
        f"![Reward of {name} by step](real-models/{name}.svg)" for name in by_variant
    )
    table = "\n".join(["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|", *rows])
    _PAGE.write_text(
        f"""# A pretrained model learns the examples

Made by `python -m benchmarks.real_models`: SmolLM2-135M-Instruct learns the projects of
[examples/](../../examples/README.md) with their own configs, in bfloat16, on 2 CPU cores that vLLM
and the trainer share. Rewards are of held-out tasks, which share no instance with training, sampled
greedily (`eval_gconfig.temperature: 0`) where nothing else is said; intervals are of 95 %, those of
one model clustered by task. *By transformers alone*: the last checkpoint, run by
`python -m benchmarks.transformers_check`, which imports nothing of agentrl.

{table}

{curves}

{_NOTES.read_text(encoding="utf-8").strip()}
""",
        encoding="utf-8",
    )


def _format_row(name: str, records: Sequence[Record]) -> str:
    before, after = ([r.evals[index]["mean"] for r in records] for index in (0, -1))
    seconds = statistics.median(sum(r.steps["step_seconds"]) for r in records)
    low, high = records[0].evals[0]["interval"]
    checks = [f"{r.check['mean']:.3f}" for r in records if r.check is not None]
    cells = [
        name,
        ", ".join(str(r.seed) for r in records),
        f"{statistics.fmean(before):.3f} ({low:.3f} to {high:.3f})",
        ", ".join(_format_eval(r) for r in records),
        _format_mean(after),
        ", ".join(checks) or "-",
        str(len(records[0].steps["reward_mean"])),
        f"{seconds / 60:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _format_eval(record: Record) -> str:
    last = record.evals[-1]
    low, high = last["interval"]
    return f"{last['mean']:.3f} ({low:.3f} to {high:.3f})"


def _format_mean(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    quantile = compute_t_quantile(0.975, len(values) - 1)
    margin = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.3f} ± {margin:.3f}"


def _draw(name: str, records: Sequence[Record]) -> None:
    """Reward of the training batches as lines, of the held-out tasks as points; a colour a seed."""
    # Equal records give equal bytes.
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(6, 3), layout="constrained")
        axes = figure.add_subplot()
        for number, record in enumerate(records):
            rewards = record.steps["reward_mean"]
            color = f"C{number}"
            axes.plot(range(1, len(rewards) + 1), rewards, color=color, linewidth=0.8, alpha=0.6)
            axes.plot(
                [e["step"] for e in record.evals],
                [e["mean"] for e in record.evals],
                *("o-",),
                color=color,
                markersize=4,
                label=f"seed {record.seed}, held out",
            )
        axes.set_xlabel("step")
        axes.set_ylabel("reward")
        axes.set_ylim(bottom=0)
        axes.set_title(f"{name}: training batches (thin) and held-out tasks (points)")
        axes.legend(loc="best", frameon=False)
        path = _PAGE.parent / "real-models" / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None, "Creator": None})
