"""A real model trains an agent with tools: ``python -m benchmarks.real_model_training``.

Writes docs/results/real-model-training.md. SmolLM2-135M-Instruct, whose own chat template shows no
tools, is trained by ``agentrl train`` with the quickstart's agent of the OpenAI Agents SDK, with
``model.chat_template: hermes-chatml``, on each engine and in each number type. That agent under the
model's own template must be refused; the page says so as well.
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
from statistics import median
from typing import Any

from agentrl_cli.models.chat_templates import DEFAULT_TEMPLATE
from agentrl_cli.records import Trajectory
from agentrl_cli.store.run_folder import RunFolder
from benchmarks.real_model import fetch_real_model

_PAGE = Path("docs/results/real-model-training.md")
_CONFIG = Path("configs/quickstart.yaml")
_NUM_STEPS = 3
_COLUMNS = (
    "engine", "dtype", "steps", "trajectories (failed)", "shown the tool", "tool calls",
    "sampled tokens", "trained tokens", "gradient norms", "mean logprob gap, nats",
    "largest probe gap, of what is allowed", "median seconds a step", "seconds, all in",
)  # fmt: skip
ENGINES = ("embedded", "vllm")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What one run did."""

    engine: str
    dtype: str
    num_steps: int
    num_trajectories: int
    num_failed: int
    num_tools_shown: int
    """Trajectories whose first prompt names the tool."""
    num_tool_calls: int
    num_tokens: int
    """Sampled ones."""
    trained_tokens: tuple[float, ...]
    """Passed forward and back, by step."""
    grad_norms: tuple[float, ...]
    """Before clipping, by step."""
    probe_gap: float
    """Largest of all publications after a step, in parts of what is allowed."""
    gap: float
    """Mean |rollout - proximal| logprob, in nats, over the steps."""
    step_seconds: float
    """Median of a step."""
    seconds: float

    def passed(self) -> bool:
        """Whether all steps were done, on agents that heard of their tool, and taught something."""
        return (
            self.num_steps == _NUM_STEPS
            and self.num_tools_shown == self.num_trajectories > 0
            and min(self.trained_tokens) > 0
            and min(self.grad_norms) > 0
        )


def reward_brevity(completions: str) -> float:
    """More for fewer words: the model, which is small, solves no task, and equal rewards would
    teach nothing."""
    return 1.0 / (1 + len(completions.split()))


def build_command(model: Path, output_dir: str, engine: str, dtype: str) -> list[str]:
    """The command of one run."""
    return [
        sys.executable, "-m", "agentrl_cli", "train", "--config", str(_CONFIG),
        f"output_dir={output_dir}", f"trial_name={engine}-{dtype}",
        f"model.path={model}", f"model.dtype={dtype}", f"model.chat_template={DEFAULT_TEMPLATE}",
        f"engine.kind={engine}", "engine.max_num_seqs=16", "engine.start_timeout_seconds=1200",
        "train_dataset.batch_size=2", "gconfig.n_samples=4", "gconfig.max_tokens=48",
        "reward_fn_path=benchmarks.real_model_training.reward_brevity",
        "valid_dataset=null", "rollout.max_staleness=0", "rollout.timeout_seconds=900",
        f"train.total_steps={_NUM_STEPS}", "train.learning_rate=1.0e-5",
        "train.save_every_steps=null",
    ]  # fmt: skip


def run(model: Path, engine: str, dtype: str) -> RunResult:
    """Trains once.

    Raises:
        subprocess.CalledProcessError: the command failed; its output is shown.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        subprocess.run(build_command(model, folder, engine, dtype), check=True)
        run_dir = Path(folder) / "quickstart" / f"{engine}-{dtype}"
        return read_result(model, run_dir, engine, dtype, time.perf_counter() - started)


def read_result(model: Path, run_dir: Path, engine: str, dtype: str, seconds: float) -> RunResult:
    """What the run in a folder did."""
    done = RunFolder.open(run_dir)
    metrics = done.read_metrics()
    trajectories = [t for s in done.trajectory_steps() for t in done.read_trajectories(s)]
    tokenizer = _load_tokenizer(model)
    interactions = [i for t in trajectories for i in t.interactions]
    return RunResult(
        engine=engine,
        dtype=dtype,
        num_steps=len(metrics),
        num_trajectories=len(trajectories),
        num_failed=sum(t.failure is not None for t in trajectories),
        num_tools_shown=sum(_shows_tool(tokenizer, t) for t in trajectories),
        num_tool_calls=sum(t.num_tool_calls for t in trajectories),
        num_tokens=sum(i.num_completion_tokens for i in interactions),
        trained_tokens=tuple(line["train_tokens"] for line in metrics),
        grad_norms=tuple(line["grad_norm"] for line in metrics),
        probe_gap=max(line["probe_gap_mean"] / line["probe_tolerance"] for line in metrics),
        gap=sum(line["logprob_gap_mean"] for line in metrics) / len(metrics),
        step_seconds=median(line["step_seconds"] for line in metrics),
        seconds=seconds,
    )


def is_refused(model: Path) -> bool:
    """Whether the agent is refused, exit code 2, under the model's own template."""
    with tempfile.TemporaryDirectory() as folder:
        command = build_command(model, folder, "embedded", "float32")
        done = subprocess.run(
            [*command, "model.chat_template=null"], capture_output=True, text=True, check=False
        )
    named = f"model.chat_template={DEFAULT_TEMPLATE}" in done.stdout + done.stderr
    return done.returncode == 2 and named


def _load_tokenizer(model: Path) -> Any:
    from agentrl_cli.models.model_files import load_tokenizer

    return load_tokenizer(str(model))


def _shows_tool(tokenizer: Any, trajectory: Trajectory) -> bool:
    if not trajectory.interactions:
        return False
    return '"name": "calculate"' in tokenizer.decode(trajectory.interactions[0].prompt_ids)


def format_page(results: list[RunResult], refused: bool) -> str:
    """The page."""
    rows = "\n".join(
        f"| {r.engine} | {r.dtype} | {r.num_steps} | {r.num_trajectories} ({r.num_failed}) "
        f"| {r.num_tools_shown} | {r.num_tool_calls} | {r.num_tokens} "
        f"| {sum(r.trained_tokens):.0f} | {', '.join(f'{n:.2g}' for n in r.grad_norms)} "
        f"| {r.gap:.1e} | {r.probe_gap:.2g} | {r.step_seconds:.0f} | {r.seconds:.0f} |"
        for r in results
    )
    own = "refused with exit code 2 and this remedy" if refused else "NOT refused"
    num_passed = sum(r.passed() for r in results)
    return f"""# A real model trains an agent with tools

Made by `python -m benchmarks.real_model_training` ({os.cpu_count()} CPU cores,
{platform.machine()}, Python {platform.python_version()}): `agentrl train` with
SmolLM2-135M-Instruct and the quickstart's agent (OpenAI Agents SDK, one tool) under
`model.chat_template: {DEFAULT_TEMPLATE}`. Under the model's own template, which shows no
tools, the same command is {own}. The reward is for brevity: the model is too
small for the task, and equal rewards would teach nothing.

| {" | ".join(_COLUMNS)} |
{"|---" * len(_COLUMNS)}|
{rows}

All {_NUM_STEPS} steps done, each with an update, every prompt with the tool: {num_passed} of
{len(results)} runs.
"""


def main() -> None:
    """Runs all combinations one after the other and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--page", type=Path, default=_PAGE)
    arguments = parser.parse_args()
    model = fetch_real_model()
    results = []
    for engine in arguments.engine:
        for dtype in arguments.dtype:
            results.append(run(model, engine, dtype))
            print(results[-1], flush=True)
    page = format_page(results, is_refused(model))
    arguments.page.parent.mkdir(parents=True, exist_ok=True)
    arguments.page.write_text(page, encoding="utf-8")
    print(f"wrote {arguments.page}")
    if not all(result.passed() for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
