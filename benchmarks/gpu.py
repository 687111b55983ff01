"""One table of what agentrl does on a machine with a GPU, without network, in under 9 minutes.

    make gpu-kit                                  # where there is a network: the wheels
    python3 -m benchmarks.gpu --wheels .gpu-kit   # on the machine with the GPU
    python -m benchmarks.gpu --rehearse           # the same on a CPU, with tiny models

Each part runs in a process of its own with a deadline, so that what fails or hangs costs its own
rows alone; rows that were measured before it count. MFU counts the operations that the samples
need, each shared token once and nothing recomputed, against the GPU's data sheet; of GPUs that
are not listed here, and of a CPU, against a large matrix product of the same process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: One row of the table: what was measured, and the figure.
Row = tuple[str, str]

_ALL_SECONDS = 530.0
#: Dense bfloat16 operations a second, by a part of the device's name.
_DATA_SHEETS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
_MODELS = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "layers": 24, "heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "layers": 28, "heads": 12},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 2},
}
_WAYS: dict[str, dict[str, object]] = {
    "varlen": {"packing": "plain"},
    "prefix tree (flex)": {"packing": "prefix_tree"},
    "varlen, checkpointing": {"packing": "plain", "gradient_checkpointing": True},
    "varlen, compiled": {"packing": "plain", "compile": "layers"},
    "prefix tree, compiled": {"packing": "prefix_tree", "compile": "layers"},
}


@dataclass(frozen=True, slots=True)
class Part:
    """What one process measures, and the seconds that it may take."""

    measure: Callable[[bool], Iterator[Row]]
    seconds: float


def build_model(name: str, device: str) -> Any:
    """A random Qwen2 in float32, shaped as Qwen2.5's of that size."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = _MODELS[name]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16_000 if name == "tiny" else 151_936,
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device):
        return Qwen2ForCausalLM(config)


def build_learner(name: str, device: str, way: dict[str, object]) -> Any:
    """agentrl's learner of a model of that size."""
    from agentrl_cli.config.experiment import ExperimentConfig
    from agentrl_cli.train.learner import Learner

    train = {"micro_batch_tokens": 16_384, "algorithm": {"rollout_correction": None}, **way}
    config = ExperimentConfig.model_validate(
        {
            "experiment_name": "benchmark",
            "model": {"path": "none", "dtype": "bfloat16"},
            "workflow_path": "none.none",
            "train_dataset": {"path": "none"},
            "train": train,
        }
    )
    return Learner(build_model(name, device), config, device=device)


def count_operations(model: Any, group_size: int, prompt: int, reply: int, shared: bool) -> float:
    """Of forward and backward pass over a group; 6 for each weight a token meets, and 12 x width
    for each pair of tokens in each layer."""
    config = model.config
    prompts = 1 if shared else group_size
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    whole, alone = math.comb(prompt + reply + 1, 2), math.comb(prompt + 1, 2)
    pairs = group_size * (whole - alone) + prompts * alone
    tokens = group_size * reply + prompts * prompt
    head = config.vocab_size * config.hidden_size * group_size * reply
    return float(
        6 * (layer * config.num_hidden_layers * tokens + head)
        + 12 * config.hidden_size * config.num_hidden_layers * pairs
    )


def time_updates(learner: Any, batch: Any, device: str, rounds: int = 3) -> tuple[float, float]:
    """Seconds of the first update, and the median of those after it."""
    import torch

    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        learner.update(batch, 0)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[0], statistics.median(seconds[1:])


def find_peak(device: str) -> tuple[float, str]:
    """Operations a second that MFU is a share of, and where the figure is from."""
    import torch

    if device == "cuda":
        name = torch.cuda.get_device_name()
        for part, rate in _DATA_SHEETS.items():
            if part in name:
                return rate, f"{part} data sheet"
    size = 8192 if device == "cuda" else 512
    one = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        float((one @ one)[0, 0])
        seconds.append(time.perf_counter() - started)
    return 2.0 * size**3 / statistics.median(seconds), "matrix product"


def measure_updates(name: str, is_rehearsal: bool) -> Iterator[Row]:
    """MFU and memory of every way of making an update."""
    import torch

    from benchmarks.train_batches import build_group_batch

    device, shape = ("cpu", (4, 32, 32)) if is_rehearsal else ("cuda", (16, 1024, 1024))
    peak, source = find_peak(device)
    batch = build_group_batch(*shape)
    for label, way in _WAYS.items():
        try:
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            learner = build_learner("tiny" if is_rehearsal else name, device, way)
            first, seconds = time_updates(learner, batch, device)
            shared = way["packing"] == "prefix_tree"
            mfu = count_operations(learner.model, *shape, shared) / seconds / peak
            memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else math.nan
            yield (
                f"{name} update, {label}",
                f"{100 * mfu:.1f} % MFU ({source}), {seconds:.3f} s, first {first:.1f} s, "
                f"{memory:.1f} GiB",
            )
        except Exception as error:
            # The other ways are worth measuring.
            yield f"{name} update, {label}", f"FAILED: {type(error).__name__}: {error}"[:300]
        learner = None


def measure_sharing(is_rehearsal: bool) -> Iterator[Row]:
    """8 replies to a long prompt, computed once and 8 times."""
    from benchmarks.train_batches import build_group_batch

    name, device = ("tiny", "cpu") if is_rehearsal else ("0.5b", "cuda")
    batch = build_group_batch(8, *((128, 16) if is_rehearsal else (2048, 256)))
    seconds = {
        packing: time_updates(build_learner(name, device, {"packing": packing}), batch, device)[1]
        for packing in ("plain", "prefix_tree")
    }
    ratio = seconds["plain"] / seconds["prefix_tree"]
    yield "prefix sharing, 8 replies of 256 to 2,048", f"{ratio:.2f} x (goal 3 x)"


def measure_engine(is_rehearsal: bool) -> Iterator[Row]:
    """Tokens per second of the embedded engine."""
    from transformers import Qwen2Tokenizer

    from agentrl_cli.config.experiment import EngineConfig
    from agentrl_cli.engine.embedded.embedded_engine import EmbeddedEngine
    from benchmarks.embedded_engine import build_prompts, time_engine

    num_new = 8 if is_rehearsal else 128
    model = build_model(*(("tiny", "cpu") if is_rehearsal else ("0.5b", "cuda"))).eval()
    model = model if is_rehearsal else model.bfloat16()
    config = EngineConfig(max_model_len=512, max_num_seqs=128)

    async def sample() -> list[Row]:
        engine = EmbeddedEngine(model, Qwen2Tokenizer(), config, model_name="benchmark")
        try:
            await time_engine(engine, build_prompts(2, 96, 32), num_new)
            rows = []
            for count in (1, 16, 128):
                seconds = await time_engine(engine, build_prompts(count, 96, 32), num_new)
                rows.append(
                    (
                        f"embedded engine, {count} calls",
                        f"{count * num_new / seconds:,.0f} tokens/s",
                    )
                )
            return rows
        finally:
            await engine.close()

    yield from asyncio.run(sample())


def _run_command(name: str, arguments: list[str]) -> Iterator[Row]:
    """A command's last lines, as one row each; its failure is a row too."""
    started = time.perf_counter()
    # The same process group: the part's deadline ends it too.
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    yield name, f"{'done' if done.returncode == 0 else 'FAILED'} in {seconds:.0f} s"
    for line in lines[-6:]:
        yield f"{name}:", line.strip()[:200]


def measure_tests(_is_rehearsal: bool) -> Iterator[Row]:
    """The tests that need CUDA; without it they are skipped."""
    path = "tests/unit/train/model/test_packed_attention.py"
    yield from _run_command(
        "CUDA tests", ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cuda", path]
    )


def measure_head(is_rehearsal: bool) -> Iterator[Row]:
    """The memory of the output head."""
    small = ["--vocabulary", "1000", "--tokens", "64"]
    large = ["--device", "cuda", "--dtype", "bfloat16", "--width", "896", "--tokens", "4096"]
    arguments = small if is_rehearsal else large
    yield from _run_command("output head", ["-m", "benchmarks.memory", *arguments])


def measure_quickstart(is_rehearsal: bool) -> Iterator[Row]:
    """Steps of the quickstart."""
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"output_dir={folder}", f"train.total_steps={1 if is_rehearsal else 8}"]
        if not is_rehearsal:
            changes.append("engine.device=cuda")
        command = ["-m", "agentrl_cli", "train", "--config", "configs/quickstart.yaml", *changes]
        yield from _run_command("quickstart", command)


PARTS = {
    "tests": Part(measure_tests, 60),
    "updates-0.5b": Part(lambda rehearsal: measure_updates("0.5b", rehearsal), 110),
    "updates-1.5b": Part(lambda rehearsal: measure_updates("1.5b", rehearsal), 130),
    "sharing": Part(measure_sharing, 50),
    "head": Part(measure_head, 40),
    "engine": Part(measure_engine, 50),
    "quickstart": Part(measure_quickstart, 240),
}


def run_part(name: str, seconds: float, *, is_rehearsal: bool) -> list[Row]:
    """The rows that the part gave in a process of its own, and why it gave no more."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--only", name]
    command += ["--rehearse"] if is_rehearsal else []
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, start_new_session=True)
        why = ""
        try:
            if code := process.wait(seconds):
                why = f"FAILED with exit code {code}"
        except subprocess.TimeoutExpired:
            why = f"ENDED after {seconds:.0f} s, its deadline"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        errors.seek(0)
        lines = [line for line in out if line.startswith('["')]
        rows = [(what, figure) for what, figure in map(json.loads, lines)]
        if why:
            rows.append((name, f"{why}: {' / '.join(errors.read().splitlines()[-2:])[-400:]}"))
    return rows


def install_wheels(folder: Path) -> None:
    """Makes the wheels importable for this kit's processes, without touching the environment."""
    target = tempfile.mkdtemp(prefix="agentrl-wheels-")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    wheels = [str(path) for path in sorted(folder.glob("*.whl"))]
    if not wheels:
        raise SystemExit(
            f"{folder}: there are no wheels. Type, where there is a network: make gpu-kit"
        )
    subprocess.run([*pip, "--target", target, *wheels], check=True)
    paths = [str(Path.cwd()), os.environ.get("PYTHONPATH", ""), target]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def main() -> None:
    """Runs the parts and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--wheels", type=Path, help="folder of what make gpu-kit collected")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        for row in PARTS[arguments.only].measure(arguments.rehearse):
            print(json.dumps(row), flush=True)
        return
    # Who ends the kit ends the part that runs: the part has a process group of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()
    if arguments.wheels:
        install_wheels(arguments.wheels)
    rows: list[Row] = []
    for name in arguments.part:
        left = _ALL_SECONDS - (time.monotonic() - started)
        if left < 5:
            rows.append((name, "LEFT OUT: no time was left"))
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        seconds = min(PARTS[name].seconds, left)
        rows += run_part(name, seconds, is_rehearsal=arguments.rehearse)
    print("| measured | figure |\n|---|---|")
    for what, figure in rows:
        print(f"| {what} | {figure.replace('|', '/')} |")


if __name__ == "__main__":
    main()
