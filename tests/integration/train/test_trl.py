"""The same loss and gradient as TRL's GRPOTrainer on one batch, for each of its loss types.

The batch has what makes implementations differ: prompts and completions of different lengths,
tool tokens between trained ones, ratios on both sides of every clip, and advantages of both
signs and 0.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agentrl_cli.config.algorithm_config import AlgorithmConfig
from agentrl_cli.train.data.minibatches import compute_token_weights
from agentrl_cli.train.data.packing import pack_samples
from agentrl_cli.train.data.samples import Sample, assign_advantages, build_samples
from agentrl_cli.train.loss.policy_loss import LossInputs, compute_loss
from agentrl_cli.train.model.output_head import compute_micro_batch_logprobs
from agentrl_cli.train.model.packed_attention import use_packed_attention

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL (extra trl)"),
    # TRL warns of versions of vLLM that it does not know, of peft, and of itself.
    pytest.mark.filterwarnings("ignore"),
]

#: Settings of TRL's GRPOConfig, and what agentrl calls the same.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"aggregation": "trajectory_mean"}),
    "bnpo": ({"loss_type": "bnpo"}, {"aggregation": "token_mean"}),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "max_completion_length": 40},
        {"aggregation": "constant", "constant_denominator": 40.0},
    ),
    "dapo": (
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"aggregation": "token_mean", "loss": {"clip_high": 0.28}},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.5},
        {"kind": "cispo", "loss": {"clip_high": 0.5}},
    ),
    "sapo": (
        {"loss_type": "sapo", "sapo_temperature_neg": 1.3},
        {"kind": "sapo", "loss": {"negative_temperature": 1.3}},
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05},
        {"kind": "gspo", "loss": {"clip_low": 0.05, "clip_high": 0.05}},
    ),
    # By default TRL weighs the KL by the ratio, which GRPO's paper does not.
    "kl": (
        {"loss_type": "bnpo", "beta": 0.3, "use_bias_correction_kl": False},
        {"kl": {"coef": 0.3}},
    ),
    "dual clip": ({"loss_type": "bnpo", "delta": 1.4}, {"loss": {"dual_clip": 1.4}}),
    "entropy": ({"loss_type": "bnpo", "entropy_coef": 0.2}, {"entropy_coef": 0.2}),
}


@dataclasses.dataclass(frozen=True)
class Batch:
    """Samples, and what is fixed of each: [targets]."""

    samples: list[Sample]
    old_logprobs: list[Tensor]
    ref_logprobs: list[Tensor]
    advantages: list[float]


@pytest.fixture
def batch(build_model, build_trajectory) -> Batch:
    generator = torch.Generator().manual_seed(5)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 97, (count,), generator=generator).tolist()

    advantages = [1.3, -0.7, 0.0, 2.1, -1.6]
    # The second turn's new ids are tool tokens.
    trajectories = [
        build_trajectory("g", index, 1.0, turns)
        for index, turns in enumerate(
            [
                [(ids(3), ids(6))],
                [(ids(7), ids(2)), (ids(4), ids(5))],
                [(ids(2), ids(9))],
                [(ids(4), ids(1)), (ids(1), ids(3)), (ids(5), ids(8))],
                [(ids(5), ids(4))],
            ]
        )
    ]
    by_turn = {
        turn.id: advantage
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
        for turn in trajectory.interactions
    }
    samples = assign_advantages(build_samples(trajectories, "concat"), by_turn)
    model = build_model()
    old, ref = [], []
    with torch.no_grad():
        for sample in samples:
            logprobs = model(sample.input_ids[None]).logits[0].log_softmax(-1)
            own = logprobs[sample.targets.sources, sample.targets.ids]
            old.append(own + 0.4 * torch.randn(own.shape, generator=generator))
            ref.append(own + 0.5 * torch.randn(own.shape, generator=generator))
    return Batch(samples, old, ref, advantages)


@pytest.fixture
def build_trainer(build_model, tmp_path) -> Iterator[Any]:
    # It changes classes of transformers: not before its first test.
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def build(**settings: Any) -> Any:
        words = {f"w{number}": number for number in range(97)}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
            pad_token="w0",
            eos_token="w1",
        )
        arguments = trl.GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=5,
            num_generations=5,
            use_cpu=True,
            bf16=False,
            report_to="none",
            **settings,
        )
        model = build_model()
        # From where TRL loads its reference model.
        model.save_pretrained(tmp_path / "model")
        model.name_or_path = model.config._name_or_path = str(tmp_path / "model")
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "w5"}]),
            processing_class=tokenizer,
        )
        # What the training loop sets before it calls compute_loss.
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        return trainer

    return build


def to_padded(batch: Batch) -> dict[str, Tensor]:
    """The batch as TRL wants it: prompts padded on the left, completions on the right."""
    starts = [int(sample.targets.sources[0]) + 1 for sample in batch.samples]
    prompt_width = max(starts)
    width = max(s.num_tokens - start for s, start in zip(batch.samples, starts, strict=True))
    rows = len(batch.samples)
    padded = {
        "prompt_ids": torch.zeros(rows, prompt_width, dtype=torch.long),
        "prompt_mask": torch.zeros(rows, prompt_width, dtype=torch.long),
        "completion_ids": torch.zeros(rows, width, dtype=torch.long),
        "completion_mask": torch.zeros(rows, width, dtype=torch.long),
        "tool_mask": torch.zeros(rows, width, dtype=torch.long),
        "old_per_token_logps": torch.zeros(rows, width),
        "ref_per_token_logps": torch.zeros(rows, width),
        "advantages": torch.tensor(batch.advantages),
        "num_items_in_batch": torch.tensor(sum(s.num_targets for s in batch.samples)),
    }
    for row, (sample, start) in enumerate(zip(batch.samples, starts, strict=True)):
        places = sample.targets.sources + 1 - start
        padded["prompt_ids"][row, prompt_width - start :] = sample.input_ids[:start]
        padded["prompt_mask"][row, prompt_width - start :] = 1
        padded["completion_ids"][row, : sample.num_tokens - start] = sample.input_ids[start:]
        padded["completion_mask"][row, : sample.num_tokens - start] = 1
        padded["tool_mask"][row, places] = 1
        padded["old_per_token_logps"][row, places] = batch.old_logprobs[row]
        padded["ref_per_token_logps"][row, places] = batch.ref_logprobs[row]
    return padded


def compute_own(model: nn.Module, batch: Batch, settings: dict[str, Any]) -> tuple[float, float]:
    """agentrl's loss, its gradient left in ``model``, and the share of tokens that are clipped; in
    several micro-batches."""
    algorithm = AlgorithmConfig.model_validate({"rollout_correction": None, **settings})
    use_packed_attention(model)  # type: ignore[arg-type]
    weights = compute_token_weights(
        algorithm.aggregation,
        batch.samples,
        len(batch.samples),
        algorithm.constant_denominator or 1.0,
    )
    numbers = {id(sample): number for number, sample in enumerate(batch.samples)}
    total, clipped = 0.0, 0.0
    micro_batches = pack_samples(batch.samples, 30, torch.device("cpu"))
    assert len(micro_batches) > 1
    for part in micro_batches:
        own = [numbers[id(sample)] for sample in part.samples]
        scored = compute_micro_batch_logprobs(model, part)  # type: ignore[arg-type]
        old = torch.cat([batch.old_logprobs[number] for number in own])
        output = compute_loss(
            LossInputs(
                new_logprobs=scored.logprobs,
                proximal_logprobs=old,
                rollout_logprobs=old,
                is_on_policy=torch.zeros(len(old), dtype=torch.bool),
                advantages=part.targets.advantages,
                sequence_numbers=part.sequence_numbers,
                token_weights=part.spread([weights[id(sample)] for sample in part.samples]),
                ref_logprobs=torch.cat([batch.ref_logprobs[number] for number in own]),
                entropies=scored.entropies,
            ),
            algorithm,
        )
        output.loss.backward()  # type: ignore[no-untyped-call]
        total += output.loss.item()
        clipped += output.sums["clipfrac"].item()
    return total, clipped / sum(sample.num_targets for sample in batch.samples)


def compute_norm(model: nn.Module) -> float:
    return float(
        nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    )


@pytest.mark.parametrize("case", CASES)
def test_the_loss_and_the_gradient_are_those_of_trl(build_model, build_trainer, batch, case: str):
    of_trl, of_agentrl = CASES[case]
    trainer = build_trainer(**of_trl)
    loss = trainer.compute_loss(trainer.model, to_padded(batch))
    loss.backward()
    model = build_model().train()
    own, clipped = compute_own(model, batch, of_agentrl)
    # Without which the comparison would say little of clips.
    assert case == "sapo" or 0 < clipped < 1
    assert own == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    norm = compute_norm(trainer.model)
    assert norm > 1e-3
    assert compute_norm(model) == pytest.approx(norm, rel=1e-5)
    theirs = dict(trainer.model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-5 * norm, msg=name
        )
