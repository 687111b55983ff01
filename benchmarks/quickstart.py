"""The quickstart on several seeds, warm start included: ``python -m benchmarks.quickstart``.

Writes docs/results/quickstart.md, or with ``--config configs/quickstart-vllm.yaml`` (or
``quickstart-ppo.yaml``) the page of that name. Every seed runs as a user's first command does, in a
process of its own and with an empty model cache; with ``--cache kept`` as any later one.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl_cli.store.run_folder import RunFolder

_RESULTS = Path("docs/results")
#: Seconds that the first command may take: vLLM's servers need a minute to start.
_PROMISED_SECONDS = {"quickstart": 240, "quickstart-ppo": 240, "quickstart-vllm": 420}

Cache = Literal["empty", "kept"]


@dataclass(frozen=True, slots=True)
class SeedResult:
    """What one run of the quickstart did."""

    seed: int
    before: float
    after: float
    seconds: float
    metrics: list[dict[str, float]]
    """One line a step."""

    @property
    def step_seconds(self) -> float:
        """Median of a step."""
        return statistics.median(line["step_seconds"] for line in self.metrics)

    def passed(self, promised_seconds: int) -> bool:
        """Whether the run did what the quickstart promises."""
        return self.before <= 0.45 and self.after >= 0.95 and self.seconds <= promised_seconds


def run_seed(
    config_path: Path,
    seed: int,
    cache: Cache,
    overrides: Sequence[str] = (),
    program: str = "agentrl_cli",
) -> SeedResult:
    """Runs the quickstart's command once, or another ``program`` that takes its arguments.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"seed={seed}", f"trial_name=seed{seed}", f"output_dir={folder}"]
        command = [sys.executable, "-m", program, "train", "--config", str(config_path)]
        command += [*arguments, *overrides]
        environment = dict(os.environ)
        if cache == "empty":
            environment["AGENTRL_CACHE"] = f"{folder}/cache"
        started = time.perf_counter()
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        run = RunFolder.open(Path(folder) / config_path.stem / f"seed{seed}")
        metrics = run.read_metrics()
        before, after = (run.read_eval_report(step)["mean_reward"] for step in (0, len(metrics)))
    return SeedResult(seed, before, after, seconds, metrics)


def format_results(config_path: Path, results: list[SeedResult], cache: Cache) -> str:
    """The page."""
    promised = _PROMISED_SECONDS[config_path.stem]
    num_passed = sum(result.passed(promised) for result in results)
    rows = "\n".join(
        f"| {r.seed} | {r.before:.3f} | {r.after:.3f} | {r.seconds:.0f} | {r.step_seconds:.1f} |"
        for r in results
    )
    command = f"python -m benchmarks.quickstart --config {config_path}"
    if cache == "empty":
        beginning = """Every run began with an empty cache, so
its seconds hold the Python imports, the warm start of `builtin:calculator`, the start of the
engine, two evaluations of 256 held-out tasks, and the training steps."""
    else:
        command += " --cache kept"
        beginning = """The warm start of
`builtin:calculator` lay in the cache, so a run's seconds hold the Python imports, the start of the
engine, two evaluations of 256 held-out tasks, and the training steps."""
    return f"""# {config_path.name} on {len(results)} seeds

Made by `{command}` ({os.cpu_count()} CPU cores,
{platform.machine()}, Python {platform.python_version()}). {beginning}

| seed | mean reward before | after | seconds, all in | median seconds a step |
|---|---|---|---|---|
{rows}

Promised: at most 0.45 before, at least 0.95 after, at most {promised} seconds.
Kept on {num_passed} of {len(results)} seeds.
"""


def main() -> None:
    """Runs the seeds one after the other and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--cache", choices=["empty", "kept"], default="empty")
    arguments = parser.parse_args()
    results = []
    for seed in arguments.seeds:
        result = run_seed(arguments.config, seed, arguments.cache)
        results.append(result)
        print(
            f"seed {seed}: {result.before:.3f} to {result.after:.3f}, {result.seconds:.0f} s",
            flush=True,
        )
    page = _RESULTS / f"{arguments.config.stem}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(format_results(arguments.config, results, arguments.cache), encoding="utf-8")
    print(f"wrote {page}")


if __name__ == "__main__":
    main()
