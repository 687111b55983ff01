"""The quickstart on several seeds, warm start included: ``python -m benchmarks.quickstart``.

Writes docs/results/quickstart.md. Every seed runs as a user's first command does, in a
process of its own and with an empty model cache.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from agentrl_cli.store.run_folder import RunFolder

_RESULTS = Path("docs/results/quickstart.md")
_CONFIG = "configs/quickstart.yaml"


@dataclass(frozen=True, slots=True)
class SeedResult:
    """What one run of the quickstart did."""

    seed: int
    before: float
    after: float
    seconds: float
    step_seconds: float
    """Median of a step."""

    @property
    def passed(self) -> bool:
        """Whether the run did what the quickstart promises."""
        return self.before <= 0.45 and self.after >= 0.95 and self.seconds <= 240


def run_seed(seed: int) -> SeedResult:
    """Runs the quickstart's command once.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"seed={seed}", f"trial_name=seed{seed}", f"output_dir={folder}"]
        command = [sys.executable, "-m", "agentrl_cli", "train", "--config", _CONFIG, *arguments]
        environment = {**os.environ, "AGENTRL_CACHE": f"{folder}/cache"}
        started = time.perf_counter()
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        run = RunFolder.open(Path(folder) / "quickstart" / f"seed{seed}")
        metrics = run.read_metrics()
        before, after = (run.read_eval_report(step)["mean_reward"] for step in (0, len(metrics)))
        step_seconds = sorted(line["step_seconds"] for line in metrics)[len(metrics) // 2]
    return SeedResult(seed, before, after, seconds, step_seconds)


def format_results(results: list[SeedResult]) -> str:
    """The page."""
    num_passed = sum(result.passed for result in results)
    rows = "\n".join(
        f"| {r.seed} | {r.before:.3f} | {r.after:.3f} | {r.seconds:.0f} | {r.step_seconds:.1f} |"
        for r in results
    )
    return f"""# The quickstart on {len(results)} seeds

Made by `python -m benchmarks.quickstart` ({os.cpu_count()} CPU cores, {platform.machine()},
Python {platform.python_version()}). Every run began with an empty cache, so its seconds hold the
Python imports, the warm start of `builtin:calculator`, two evaluations of 256 held-out
tasks, and the training steps of `configs/quickstart.yaml`.

| seed | mean reward before | after | seconds, all in | median seconds a step |
|---|---|---|---|---|
{rows}

Promised: at most 0.45 before, at least 0.95 after, at most 240 seconds.
Kept on {num_passed} of {len(results)} seeds.
"""


def main() -> None:
    """Runs the seeds one after the other and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    results = []
    for seed in parser.parse_args().seeds:
        results.append(run_seed(seed))
        print(results[-1], flush=True)
    _RESULTS.parent.mkdir(parents=True, exist_ok=True)
    _RESULTS.write_text(format_results(results), encoding="utf-8")
    print(f"wrote {_RESULTS}")


if __name__ == "__main__":
    main()
