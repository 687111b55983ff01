"""A pretrained model learns the examples: runs on several seeds, and the page about them.

    python -m benchmarks.real_models            # all runs that have no record yet, then the page
    python -m benchmarks.real_models --only reverse-text --seeds 1 2
    python -m benchmarks.real_models --page     # the page alone, from the records

Each run is ``agentrl train`` on an example's own config with SmolLM2-135M-Instruct
(benchmarks/real_model.py), sampled by vLLM on the same CPU. One that is interrupted is resumed.
What a run showed is kept as a record in docs/results/real-models, small enough to be
committed; docs/results/real-models.md and its curves are made from the records alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl_cli.config.resolved_run import Machine
from agentrl_cli.evaluate.eval_report import EvalReport
from agentrl_cli.store.run_folder import RunFolder
from benchmarks.real_model import fetch_real_model
from benchmarks.real_models_page import write_page

_RESULTS = Path("docs/results")
RECORDS = _RESULTS / "real-models"
_RUNS = Path("runs/real-models")
_CHECK_SECONDS = 1800
#: What a record keeps of each step's metrics.
_COLUMNS = (
    "reward_mean", "completion_tokens_mean", "entropy", "logprob_gap_mean", "token_age_mean",
    "num_groups_without_signal", "failures", "step_seconds", "memory_mb",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant:
    """One setting of one example, to be run on some seeds."""

    name: str
    example: str
    overrides: Sequence[str] = ()
    seeds: Sequence[int] = (1,)
    is_warm: bool = False
    """Whether it begins with the example's warm start."""


_SEEDS = (1, 2, 3)
_REVERSE = "reverse_text"
_WORDS = "word_problems"
_SHORT_STEPS = (
    "train.total_steps=200", "train_dataset.batch_size=4", "train.eval_every_steps=50",
)  # fmt: skip
_CRITIC = ("train.algorithm.kind=ppo", "train.critic.learning_rate=1.0e-4")


def _meaningless(example: str, kind: str) -> tuple[str, str]:
    """The overrides of a negative control."""
    module = "benchmarks.meaningless_rewards"
    return (
        f"reward_fn_path={module}.{example}_{kind}",
        f"valid_dataset.path={module}:{example}_held_out",
    )


VARIANTS = (
    Variant("reverse-text", _REVERSE, seeds=_SEEDS),
    Variant("word-problems", _WORDS, seeds=_SEEDS),
    Variant("calculator-tools", "calculator_tools", seeds=_SEEDS, is_warm=True),
    Variant("alphabet-sort", "alphabet_sort", is_warm=True),
    Variant("guess-number", "guess_number"),
    Variant("twenty-questions", "twenty_questions"),
    Variant("search", "search", is_warm=True),
    Variant("reverse-text-ppo", _REVERSE, _CRITIC),
    Variant("reverse-text-rloo", _REVERSE, ("train.algorithm.kind=rloo",)),
    Variant("reverse-text-gspo", _REVERSE, ("train.algorithm.kind=gspo",)),
    Variant("reverse-text-lora", _REVERSE, ("model.lora={rank: 16}", "train.learning_rate=3.0e-4")),
    Variant("reverse-text-200-steps", _REVERSE, _SHORT_STEPS),
    Variant("reverse-text-random-rewards", _REVERSE, _meaningless(_REVERSE, "random")),
    Variant("word-problems-shuffled-rewards", _WORDS, _meaningless(_WORDS, "shuffled")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one run showed."""

    variant: str
    example: str
    seed: int
    overrides: Sequence[str]
    steps: dict[str, list[float]]
    """By column, a value for each step."""
    evals: list[dict[str, Any]]
    """Held-out tasks: ``step``, ``mean``, ``interval``, ``tasks``, ``parts``."""
    alarms: list[str]
    check: dict[str, Any]
    """The last checkpoint by transformers alone: ``mean``, ``interval``, ``tasks``."""
    machine: dict[str, Any]


def build_command(variant: Variant, seed: int, model: Path, dtype: str) -> list[str]:
    """The run's command; typed again, it resumes."""
    return [
        sys.executable, "-m", "agentrl_cli", "train",
        "--config", f"examples/{variant.example}/config.yaml",
        f"model.path={model}", f"model.dtype={dtype}", f"output_dir={_RUNS}",
        f"experiment_name={variant.name}", f"trial_name=seed{seed}", f"seed={seed}",
        *variant.overrides,
    ]  # fmt: skip


def warm_up(example: str, model: Path) -> Path:
    """The model after an example's warm start, which is made once.

    Raises:
        subprocess.CalledProcessError: the command failed; its output is shown.
    """
    folder = _RUNS / f"{example}-warm"
    if not (folder / "config.json").is_file():
        command = [sys.executable, "-m", "agentrl_cli", "sft"]
        config = f"examples/{example}/warm_start.yaml"
        overrides = (f"model.path={model}", f"output_path={folder}")
        subprocess.run([*command, "--config", config, *overrides], check=True)
    return folder


def run(variant: Variant, seed: int, model: Path) -> Record:
    """Trains, checks the last checkpoint without agentrl, and reads what the run has stored.

    Raises:
        subprocess.CalledProcessError: a command failed; its output is shown.
    """
    start = warm_up(variant.example, model) if variant.is_warm else model
    dtype = "float32" if Machine.detect().emulates_bfloat16 else "bfloat16"
    subprocess.run(build_command(variant, seed, start, dtype), check=True)
    folder = RunFolder.open(_RUNS / variant.name / f"seed{seed}")
    metrics = folder.read_metrics()
    checkpoint = folder.path / "checkpoints" / f"step-{len(metrics):06d}"
    arguments = (str(checkpoint), variant.example, "--dtype", dtype)
    check = subprocess.run(
        [sys.executable, "-m", "benchmarks.transformers_check", *arguments],
        check=True,
        timeout=_CHECK_SECONDS,
        stdout=subprocess.PIPE,
        text=True,
    )
    return Record(
        variant=variant.name,
        example=variant.example,
        seed=seed,
        overrides=list(variant.overrides),
        steps={name: [round(line.get(name, 0.0), 5) for line in metrics] for name in _COLUMNS},
        evals=[_read_eval(folder, step) for step in folder.eval_steps()],
        alarms=sorted({name for line in metrics for name in line if _is_alarm(name, line)}),
        check=json.loads(check.stdout),
        machine={
            "cores": os.cpu_count(),
            "dtype": dtype,
            "python": platform.python_version(),
        },
    )


def _is_alarm(name: str, line: dict[str, float]) -> bool:
    return name.startswith("alarm_") and line[name] > 0


def _read_eval(folder: RunFolder, step: int) -> dict[str, Any]:
    report = EvalReport.from_dict(folder.read_eval_report(step))
    return {
        "step": step,
        "mean": report.mean_reward,
        "interval": report.interval,
        "tasks": report.num_tasks,
        "parts": dict(report.reward_parts),
    }


def read_records(folder: Path = RECORDS) -> list[Record]:
    """All records, in the order of the variants and seeds."""
    order = [variant.name for variant in VARIANTS]
    found = [
        Record(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")
    ]
    return sorted(found, key=lambda record: (order.index(record.variant), record.seed))


def list_missing(
    only: Sequence[str] | None, seeds: Sequence[int] | None
) -> list[tuple[Variant, int, Path]]:
    """Runs without a record: first seeds of all variants before second ones.

    Args:
        only: names of variants; None: all.
        seeds: None: those that each variant names.
    """
    runs = [
        (variant, seed, RECORDS / f"{variant.name}-{seed}.json")
        for variant in VARIANTS
        for seed in (seeds or variant.seeds)
        if only is None or variant.name in only
    ]
    return [one for one in sorted(runs, key=lambda one: one[1]) if not one[2].exists()]


def main() -> None:
    """Runs what is missing, and writes the page after each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[variant.name for variant in VARIANTS])
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--page", action="store_true", help="write the page alone")
    arguments = parser.parse_args()
    RECORDS.mkdir(parents=True, exist_ok=True)
    if not arguments.page:
        model = fetch_real_model()
        for variant, seed, path in list_missing(arguments.only, arguments.seeds):
            record = run(variant, seed, model)
            path.write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")
            write_page(read_records(), _RESULTS)
    write_page(read_records(), _RESULTS)


if __name__ == "__main__":
    main()
