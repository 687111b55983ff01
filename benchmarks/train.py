"""What one update of the trainer costs: against other trainers, by turns, and by what is shared.

    python -m benchmarks.train [--part rates turns groups compiled] [--dtype bfloat16] [--threads 1]

Each part is one table, made in one run. All ways of a part train the same model on the same
trajectories with the same loss (their first gradients' norms stand beside them), and take turns
in every round, so that a busy machine slows all alike; ratios are medians over rounds. On a
machine that others use too, look at the CPU seconds.

* ``rates``: a ragged batch of conversations (``train_batches.py``), once with prompts shared by
  groups and once without anything shared, in real tokens per second: every sample's, padding
  never. Against it, each at its best: TRL's GRPOTrainer, each pass padded to its own longest row;
  rows of like length, padded; one unpadded sequence at a time. How much of the machine's matrix
  product is used counts the operations that the samples need when nothing is shared or recomputed.
* ``turns``: the same number of tokens in 1 to 16 turns, against one sample of a single turn, and
  with a row for each turn.
* ``groups``: 8 replies of 256 tokens to a prompt of 2,048, computed once and computed 8 times.
* ``compiled``: the batch of ``rates`` with layers compiled by torch.compile and as they are, and
  what the first update takes, in which they are compiled.

Memory is measured by ``benchmarks/memory.py``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from agentrl_cli.config.algorithm_config import GrpoAdvantageConfig
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.records import Trajectory
from agentrl_cli.train.data.samples import Sample, assign_advantages, build_samples
from agentrl_cli.train.learner import Learner
from agentrl_cli.train.loss.advantages import compute_advantages
from benchmarks.train_batches import (
    VOCABULARY_SIZE,
    build_group_batch,
    build_model,
    build_ragged_batch,
    build_turns_batch,
)
from benchmarks.train_rivals import (
    LEARNING_RATE,
    OneAtATimeLoop,
    PaddedLoop,
    TrlLoop,
    find_missing_trl,
)

#: One update; its gradient's norm.
Update = Callable[[], float]


@dataclass(slots=True)
class Measurement:
    """What the updates of one way took."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    first_norm: float = math.nan

    def median(self) -> tuple[float, float]:
        """Seconds and CPU seconds."""
        return statistics.median(self.seconds), statistics.median(self.cpu_seconds)

    def compare(self, other: Measurement) -> tuple[float, float]:
        """How many times as long ``other`` took: seconds and CPU seconds."""
        return _compare(self.seconds, other.seconds), _compare(self.cpu_seconds, other.cpu_seconds)


def measure(updates: Mapping[str, Update], num_rounds: int) -> dict[str, Measurement]:
    """All ways in every round, after a round that warms up."""
    measured = {name: Measurement() for name in updates}
    for round_number in range(num_rounds + 1):
        for name, update in updates.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            norm = update()
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
            if round_number == 0:
                measured[name].first_norm = norm
            else:
                measured[name].seconds.append(seconds)
                measured[name].cpu_seconds.append(cpu_seconds)
    return measured


def build_learner(arguments: argparse.Namespace, **changes: object) -> Learner:
    """agentrl's; ``changes`` go into ``train``, ``export_style`` into ``rollout``."""
    export_style = changes.pop("export_style", "concat")
    config = ExperimentConfig.model_validate(
        {
            "experiment_name": "benchmark",
            "model": {"path": "none", "dtype": arguments.dtype},
            "workflow_path": "none.none",
            "train_dataset": {"path": "none"},
            "rollout": {"export_style": export_style},
            "train": {
                "learning_rate": LEARNING_RATE,
                "micro_batch_tokens": arguments.micro_batch_tokens,
                "num_threads": arguments.threads,
                # The rivals correct for nothing.
                "algorithm": {"rollout_correction": None},
                **changes,
            },
        }
    )
    return Learner(build_model(), config)


def build_update(learner: Learner, batch: Sequence[Trajectory]) -> Update:
    """The learner's update on the batch."""
    return lambda: learner.update(batch, 0)["grad_norm"]


def count_operations(samples: Sequence[Sample]) -> float:
    """Operations of forward and backward pass over the samples, nothing shared or recomputed:
    6 for each weight that a token meets, and 12 x width for each pair of tokens in each layer."""
    config = build_model().config
    layer = sum(p.numel() for p in build_model().model.layers[0].parameters())
    head = VOCABULARY_SIZE * config.hidden_size
    total = 0.0
    for sample in samples:
        pairs = math.comb(sample.num_tokens + 1, 2)
        total += 6 * layer * config.num_hidden_layers * sample.num_tokens
        total += 6 * head * sample.num_targets
        total += 12 * config.hidden_size * config.num_hidden_layers * pairs
    return total


def build_matrix_product(dtype: str) -> tuple[Update, float]:
    """A product of two large matrices, and its operations."""
    size = 2048
    one = torch.randn(size, size, dtype=getattr(torch, dtype))
    return lambda: float((one @ one)[0, 0]), 2.0 * size**3


def show_rates(arguments: argparse.Namespace, *, is_prompt_shared: bool) -> None:
    """agentrl against the others, on the ragged batch."""
    batch = build_ragged_batch(
        arguments.groups, arguments.group_size, is_prompt_shared=is_prompt_shared
    )
    samples = assign_advantages(
        build_samples(batch, "concat"), compute_advantages(batch, GrpoAdvantageConfig())
    )
    plain = build_learner(arguments, packing="plain")
    padded = PaddedLoop(arguments.dtype, arguments.micro_batch_tokens)
    single = OneAtATimeLoop(arguments.dtype)
    multiply, product_operations = build_matrix_product(arguments.dtype)
    updates = {
        "agentrl": build_update(build_learner(arguments), batch),
        "agentrl, packing plain": build_update(plain, batch),
        "one at a time": lambda: single.update(samples),
        "padded": lambda: padded.update(samples),
    }
    missing = find_missing_trl()
    if missing is None:
        trl = TrlLoop(arguments.dtype)
        updates["TRL GRPOTrainer"] = lambda: trl.update(samples)
    updates["matrix product"] = multiply
    measured = measure(updates, arguments.rounds)
    product_rate = product_operations / statistics.median(
        measured.pop("matrix product").cpu_seconds
    )
    num_tokens = sum(sample.num_tokens for sample in samples)
    what = "prompts shared by groups" if is_prompt_shared else "nothing shared"
    print(
        f"\nrates, {what}: {len(samples)} samples of {min(s.num_tokens for s in samples)} to "
        f"{max(s.num_tokens for s in samples)} tokens, {num_tokens} in all, "
        f"{sum(s.num_targets for s in samples)} trained; matrix product "
        f"{product_rate / 1e9:.0f} GFLOP a CPU second"
    )
    print(
        f"{'':24}{'tokens/s':>9}{'agentrl is':>11}{'tokens/CPU s':>14}{'agentrl is':>11}"
        f"{'of product':>11}{'grad norm':>11}"
    )
    for name, one in measured.items():
        seconds, cpu_seconds = one.median()
        wall_ratio, cpu_ratio = measured["agentrl"].compare(one)
        share = count_operations(samples) / cpu_seconds / product_rate
        print(
            f"{name:24}{num_tokens / seconds:>9.0f}{wall_ratio:>10.2f}x"
            f"{num_tokens / cpu_seconds:>14.0f}{cpu_ratio:>10.2f}x{share:>11.2f}"
            f"{one.first_norm:>11.5f}"
        )
    if missing is not None:
        print(f"TRL GRPOTrainer: left out, {missing}")


def show_turns(arguments: argparse.Namespace) -> None:
    """The cost of turns, against as many tokens in one turn."""
    batches = {turns: build_turns_batch(turns, 1024) for turns in (1, 2, 4, 8, 16)}
    merged = build_learner(arguments)
    apart = build_learner(arguments, export_style="individual")
    repeated = build_learner(arguments, export_style="individual", packing="plain")
    updates: dict[str, Update] = {}
    for turns, batch in batches.items():
        updates[f"merged {turns}"] = build_update(merged, batch)
        updates[f"apart {turns}"] = build_update(apart, batch)
        updates[f"repeated {turns}"] = build_update(repeated, batch)
    measured = measure(updates, arguments.rounds)
    base = measured["merged 1"]
    print("\nturns: cost of 2 x 1,024 tokens in so many turns, against one turn (CPU seconds)")
    print(f"{'turns':>5}{'merged':>10}{'row per turn':>15}{'row per turn, packing plain':>30}")
    for turns in batches:
        merged_cost, apart_cost, repeated_cost = (
            base.compare(measured[f"{name} {turns}"])[1] for name in ("merged", "apart", "repeated")
        )
        print(f"{turns:>5}{merged_cost:>9.2f}x{apart_cost:>14.2f}x{repeated_cost:>29.2f}x")


def show_groups(arguments: argparse.Namespace) -> None:
    """A long prompt with 8 replies."""
    batch = build_group_batch(8, 2048, 256)
    settings = argparse.Namespace(**vars(arguments) | {"micro_batch_tokens": 4096})
    measured = measure(
        {
            packing: build_update(build_learner(settings, packing=packing), batch)
            for packing in ("prefix_tree", "plain")
        },
        arguments.rounds,
    )
    wall_ratio, cpu_ratio = measured["prefix_tree"].compare(measured["plain"])
    print("\ngroups: 8 replies of 256 tokens to a prompt of 2,048, micro-batches of 4,096")
    for packing, one in measured.items():
        seconds, cpu_seconds = one.median()
        print(f"{packing:12}{seconds:>8.2f} s{cpu_seconds:>8.2f} CPU s{one.first_norm:>11.5f} norm")
    print(f"sharing the prompt is {wall_ratio:.2f}x as fast, {cpu_ratio:.2f}x by CPU seconds")


def show_compiled(arguments: argparse.Namespace) -> None:
    """Layers that are compiled, on the ragged batch."""
    batch = build_ragged_batch(arguments.groups, arguments.group_size, is_prompt_shared=True)
    updates = {
        name: build_update(build_learner(arguments, compile=value), batch)
        for name, value in (("as they are", None), ("compiled", "layers"))
    }
    print("\ncompiled: layers by torch.compile, on the ragged batch with prompts shared by groups")
    for name, update in updates.items():
        started = time.perf_counter()
        norm = update()
        print(f"{name:12}{time.perf_counter() - started:>8.1f} s first update{norm:>11.5f} norm")
    measured = measure(updates, arguments.rounds)
    for name, one in measured.items():
        seconds, cpu_seconds = one.median()
        print(f"{name:12}{seconds:>8.2f} s{cpu_seconds:>8.2f} CPU s")
    wall_ratio, cpu_ratio = measured["compiled"].compare(measured["as they are"])
    print(f"compiling is {wall_ratio:.2f}x as fast, {cpu_ratio:.2f}x by CPU seconds")


def main() -> None:
    """Runs the parts and prints their tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parts = ("rates", "turns", "groups", "compiled")
    parser.add_argument("--part", nargs="+", choices=parts, default=parts)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    num_parameters = sum(p.numel() for p in build_model().parameters())
    print(
        f"{num_parameters / 1e6:.1f} M parameters, {arguments.dtype}, {arguments.threads} "
        f"thread(s), micro-batches of {arguments.micro_batch_tokens} tokens, median of "
        f"{arguments.rounds} rounds"
    )
    if "rates" in arguments.part:
        show_rates(arguments, is_prompt_shared=True)
        show_rates(arguments, is_prompt_shared=False)
    if "turns" in arguments.part:
        show_turns(arguments)
    if "groups" in arguments.part:
        show_groups(arguments)
    if "compiled" in arguments.part:
        show_compiled(arguments)


def _compare(own: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(theirs / ours for theirs, ours in zip(other, own, strict=True))


if __name__ == "__main__":
    main()
