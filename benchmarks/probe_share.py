"""How much of a step the check of published weights takes, with more calls in flight than seats.

    python -m benchmarks.probe_share

``agentrl train`` with SmolLM2-135M-Instruct (benchmarks/real_model.py) on one vLLM server of 16
seats, at which 64 trajectories of one call wait at any time. After each publication the server's
logprobs of the probes are compared with the trainer's (``probe_seconds`` of a step). Prints a row
for each step; the first is left out of the median, because what is compiled once is compiled in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl_cli.store.run_folder import RunFolder
from benchmarks.real_model import fetch_real_model

_NUM_SEATS, _NUM_IN_FLIGHT = 16, 64
_NUM_GROUPS, _N_SAMPLES, _MAX_TOKENS = 8, 8, 48
_GOAL = 0.05
_QUESTIONS = ("Name a colour.", "Say hello.", "What is the sea?", "Who are you?", "Count to five.")


def build_agent() -> Any:
    """An agent of one call."""

    async def solve(data: dict[str, Any], client: Any, model: str) -> float:
        messages = [{"role": "user", "content": data["question"]}]
        reply = await client.chat.completions.create(model=model, messages=messages)
        return 1.0 / (1 + len((reply.choices[0].message.content or "").split()))

    return solve


def run(model: Path, folder: Path, num_steps: int) -> list[dict[str, float]]:
    """The metrics of each step.

    Raises:
        subprocess.CalledProcessError: the command failed; its output is shown.
    """
    rows = [json.dumps({"question": f"{q} ({n})"}) for n in range(40) for q in _QUESTIONS]
    data = folder / "rows.jsonl"
    data.write_text("\n".join(rows) + "\n", encoding="utf-8")
    config = {
        "experiment_name": "probe-share",
        "output_dir": str(folder / "runs"),
        "model": {"path": str(model), "dtype": "float32"},
        "agent_builder_path": "benchmarks.probe_share.build_agent",
        "gconfig": {"n_samples": _N_SAMPLES, "max_tokens": _MAX_TOKENS},
        "train_dataset": {"path": str(data), "batch_size": _NUM_GROUPS},
        "engine": {
            "kind": "vllm",
            "max_model_len": 512,
            "max_num_seqs": _NUM_SEATS,
            "start_timeout_seconds": 1200,
        },
        # Equal, so that their number does not follow the load.
        "rollout": {
            "max_concurrent": _NUM_IN_FLIGHT,
            "min_concurrent": _NUM_IN_FLIGHT,
            "num_workers": 0,
            "max_staleness": 1,
            "timeout_seconds": 900,
        },
        "train": {"total_steps": num_steps, "learning_rate": 1e-5, "save_every_steps": None},
    }
    path = folder / "config.yaml"
    # JSON is YAML.
    path.write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "agentrl_cli", "train", "--config", str(path)]
    subprocess.run(command, check=True)
    return RunFolder.open(folder / "runs" / "probe-share" / "t0").read_metrics()


def format_table(steps: Sequence[dict[str, float]]) -> str:
    """A row for each step, and the median of those after the first."""
    lines = ["| step | seconds | probe, seconds | share |", "|---|---|---|---|"]
    for line in steps:
        step, seconds, probe = line["step"], line["step_seconds"], line["probe_seconds"]
        lines.append(f"| {step:.0f} | {seconds:.1f} | {probe:.2f} | {probe / seconds:.1%} |")
    shares = [line["probe_seconds"] / line["step_seconds"] for line in steps[1:]]
    verdict = f"median after the first {statistics.median(shares):.1%} (goal {_GOAL:.0%})"
    return "\n".join([*lines, "", verdict])


def main() -> None:
    """Trains and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("at least 2 steps: the first is left out of the median")
    with tempfile.TemporaryDirectory() as folder:
        print(format_table(run(fetch_real_model(), Path(folder), arguments.steps)))


if __name__ == "__main__":
    main()
