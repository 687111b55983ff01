"""Tokens per second of one update over a ragged batch: agentrl's learner and two plain loops.

    python -m benchmarks.training [--dtype bfloat16] [--rounds 5] [--threads 1]

All three train the same model on the same sequences with the same loss, and take turns in
every round, so that a busy machine slows all alike. Counted are real tokens: prompt and
completion of every sequence once, padding never. On a machine that others use too, look at
the CPU seconds. The loops:

* ``padded``: rows padded to the longest of their micro-batch, logits of every position;
* ``one at a time``: a forward and backward pass per sequence, without padding, the output
  head on scored tokens alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.train.advantages import compute_advantages
from agentrl_cli.train.learner import Learner
from agentrl_cli.train.samples import Sample, build_samples

VOCABULARY_SIZE = 16_000
MICRO_BATCH_TOKENS = 2048
LEARNING_RATE = 1e-5


def build_model() -> Qwen2ForCausalLM:
    """A random Qwen2 of 25 million parameters in float32; the same every time."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config)


def build_batch(num_groups: int, group_size: int) -> list[Trajectory]:
    """Agent-like trajectories: 1 to 4 turns, the first prompt and the replies ragged."""
    chance = random.Random(0)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(chance.choices(range(VOCABULARY_SIZE), k=chance.randint(low, high)))

    batch = []
    for group in range(num_groups):
        for index in range(group_size):
            interactions: list[Interaction] = []
            prompt = ids(20, 120)
            for turn in range(chance.randint(1, 4)):
                completion = ids(5, 90)
                interactions.append(
                    Interaction(
                        id=f"{group}/{index}/{turn}",
                        parent_id=interactions[-1].id if interactions else None,
                        extends_parent=turn > 0,
                        prompt_ids=prompt,
                        completion_ids=completion,
                        rollout_logprobs=(-9.7,) * len(completion),
                        versions=(0,) * len(completion),
                        started=turn,
                        turn_return=float(index),
                    )
                )
                prompt = prompt + completion + ids(5, 40)
            batch.append(
                Trajectory(
                    id=f"{group}/{index}",
                    group_id=str(group),
                    task_id=str(group),
                    interactions=tuple(interactions),
                    reward=float(index),
                )
            )
    return batch


def build_config(dtype: str, num_threads: int) -> ExperimentConfig:
    """What the learner needs; the plain loops use the same numbers."""
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "benchmark",
            "model": {"path": "none", "dtype": dtype},
            "workflow_path": "none.none",
            "train_dataset": {"path": "none"},
            "train": {
                "learning_rate": LEARNING_RATE,
                "micro_batch_tokens": MICRO_BATCH_TOKENS,
                "num_threads": num_threads,
            },
        }
    )


class PlainLoop:
    """What both plain loops share: float32 weights, autocast, stock AdamW, clipping."""

    def __init__(self, dtype: str) -> None:
        self.model = build_model()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0
        )
        self._autocast = dtype == "bfloat16"

    def update(self, samples: Sequence[Sample]) -> float:
        """One optimizer update; the loss."""
        num_tokens = sum(s.num_targets for s in samples)
        total = 0.0
        for rows in self.split(samples):
            with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
                losses = self.compute_losses(rows)
            loss = losses.sum() / num_tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total

    def split(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """The rows of each forward pass."""
        raise NotImplementedError

    def compute_losses(self, rows: Sequence[Sample]) -> Tensor:
        """The loss of every trained token of the rows."""
        raise NotImplementedError


class PaddedLoop(PlainLoop):
    """Rows in the order in which they come, as many as the padded budget holds."""

    def split(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        parts: list[list[Sample]] = [[]]
        for sample in samples:
            longest = max(s.num_tokens for s in [*parts[-1], sample])
            if parts[-1] and longest * (len(parts[-1]) + 1) > MICRO_BATCH_TOKENS:
                parts.append([])
            parts[-1].append(sample)
        return parts

    def compute_losses(self, rows: Sequence[Sample]) -> Tensor:
        def pad(rows: Sequence[Tensor]) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

        input_ids = pad([row.input_ids for row in rows])
        lengths = torch.tensor([row.num_tokens for row in rows])
        attention_mask = torch.arange(input_ids.shape[1])[None] < lengths[:, None]
        logits = self.model(input_ids, attention_mask=attention_mask.long(), use_cache=False).logits
        logprobs = logits[:, :-1].float().log_softmax(-1)
        new = logprobs.gather(2, input_ids[:, 1:, None])[..., 0]
        return torch.cat(
            [
                compute_token_losses(
                    own[row.targets.sources], row.targets.rollout_logprobs, row.targets.advantages
                )
                for own, row in zip(new, rows, strict=True)
            ]
        )


class OneAtATimeLoop(PlainLoop):
    """No padding, and the head where it is needed."""

    def split(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        return [[sample] for sample in samples]

    def compute_losses(self, rows: Sequence[Sample]) -> Tensor:
        (row,) = rows
        targets = row.targets
        logits = self.model(
            row.input_ids[None], use_cache=False, logits_to_keep=targets.sources
        ).logits[0]
        new = logits.float().log_softmax(-1).gather(1, targets.ids[:, None])[:, 0]
        return compute_token_losses(new, targets.rollout_logprobs, targets.advantages)


def compute_token_losses(new: Tensor, rollout: Tensor, advantages: Tensor) -> Tensor:
    """The on-policy clipped loss with the importance weight, as in the learner."""
    ratio = (new - new.detach()).exp()
    importance = (new.detach() - rollout).exp().clamp(max=2.0)
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -importance * objective


def measure(update: Callable[[], float]) -> tuple[float, float, float]:
    """Seconds, CPU seconds and loss of one update."""
    started, cpu_started = time.perf_counter(), time.process_time()
    loss = update()
    return time.perf_counter() - started, time.process_time() - cpu_started, loss


def format_rates(num_tokens: int, taken: Sequence[float], own: Sequence[float]) -> str:
    """Median tokens per second, and the median over rounds of how much faster agentrl is."""
    ratio = statistics.median(other / ours for other, ours in zip(taken, own, strict=True))
    return f"{num_tokens / statistics.median(taken):>10.0f}{ratio:>11.2f}x"


def main() -> None:
    """Runs the benchmark and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = build_config(arguments.dtype, arguments.threads)
    batch = build_batch(arguments.groups, arguments.group_size)
    samples = build_samples(
        batch, compute_advantages(batch, config.train.algorithm.advantage), "concat"
    )
    learner = Learner(build_model(), config)
    padded, single = PaddedLoop(arguments.dtype), OneAtATimeLoop(arguments.dtype)
    updates: dict[str, Callable[[], float]] = {
        "agentrl": lambda: learner.update(batch, 0)["loss"],
        "padded": lambda: padded.update(samples),
        "one at a time": lambda: single.update(samples),
    }
    num_tokens = sum(sample.num_tokens for sample in samples)
    num_parameters = sum(p.numel() for p in learner.model.parameters())
    print(
        f"{num_parameters / 1e6:.1f} M parameters, {len(samples)} sequences, {num_tokens} tokens, "
        f"{arguments.dtype}, {arguments.threads} thread(s), median of {arguments.rounds} rounds"
    )
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in updates}
    losses: dict[str, float] = {}
    for round_number in range(arguments.rounds + 1):
        for name, update in updates.items():
            taken, cpu_taken, loss = measure(update)
            if round_number == 0:
                # The first round warms up, and shows that all three do the same work.
                losses[name] = loss
            else:
                seconds[name].append(taken)
                cpu_seconds[name].append(cpu_taken)
    print(
        f"{'':16}{'tokens/s':>10}{'agentrl is':>12}{'tokens/CPU s':>15}{'agentrl is':>12}"
        f"{'first loss':>14}"
    )
    for name in updates:
        wall = format_rates(num_tokens, seconds[name], seconds["agentrl"])
        cpu = format_rates(num_tokens, cpu_seconds[name], cpu_seconds["agentrl"])
        print(f"{name:16}{wall}     {cpu}{losses[name]:>14.6f}")


if __name__ == "__main__":
    main()
