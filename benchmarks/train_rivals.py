"""What ``benchmarks/train.py`` compares agentrl's update with: other ways to make the same one."""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentrl_cli.train.data.samples import Sample
from benchmarks.train_batches import VOCABULARY_SIZE, build_model

LEARNING_RATE = 1e-5

#: Rows of TRL's forward pass, as many as a budget of 2,048 tokens holds in the mean.
_TRL_ROWS = 4


class PlainLoop:
    """What both plain loops share: float32 weights, autocast, fused AdamW, clipping."""

    def __init__(self, dtype: str) -> None:
        self.model = build_model()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
        )
        self._autocast = dtype == "bfloat16"

    def update(self, samples: Sequence[Sample]) -> float:
        """One optimizer update; the gradient's norm."""
        num_tokens = sum(s.num_targets for s in samples)
        for rows in self.split(samples):
            with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
                losses = self.compute_losses(rows)
            (losses.sum() / num_tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)

    def split(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """The rows of each forward pass."""
        raise NotImplementedError

    def compute_losses(self, rows: Sequence[Sample]) -> Tensor:
        """The loss of every trained token of the rows."""
        raise NotImplementedError


class PaddedLoop(PlainLoop):
    """Rows of like length, as many as the padded budget holds; logits of every position."""

    def __init__(self, dtype: str, max_tokens: int) -> None:
        super().__init__(dtype)
        self._max_tokens = max_tokens

    def split(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        parts: list[list[Sample]] = [[]]
        # Sorted, because rows of like length need the least padding.
        for sample in sorted(samples, key=lambda sample: sample.num_tokens):
            longest = max(s.num_tokens for s in [*parts[-1], sample])
            if parts[-1] and longest * (len(parts[-1]) + 1) > self._max_tokens:
                parts.append([])
            parts[-1].append(sample)
        return parts

    def compute_losses(self, rows: Sequence[Sample]) -> Tensor:
        input_ids = pad_sequence([row.input_ids for row in rows], batch_first=True)
        lengths = torch.tensor([row.num_tokens for row in rows])
        attention_mask = torch.arange(input_ids.shape[1])[None] < lengths[:, None]
        logits = self.model(input_ids, attention_mask=attention_mask.long(), use_cache=False).logits
        logprobs = logits[:, :-1].float().log_softmax(-1)
        new = logprobs.gather(2, input_ids[:, 1:, None])[..., 0]
        return torch.cat(
            [
                _compute_token_losses(own[row.targets.sources], row.targets.advantages)
                for own, row in zip(new, rows, strict=True)
            ]
        )


class OneAtATimeLoop(PlainLoop):
    """A pass per sequence: no padding, and the head on scored tokens alone."""

    def split(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        return [[sample] for sample in samples]

    def compute_losses(self, rows: Sequence[Sample]) -> Tensor:
        (row,) = rows
        targets = row.targets
        logits = self.model(
            row.input_ids[None], use_cache=False, logits_to_keep=targets.sources
        ).logits[0]
        new = logits.float().log_softmax(-1).gather(1, targets.ids[:, None])[:, 0]
        return _compute_token_losses(new, targets.advantages)


class TrlLoop:
    """TRL's GRPOTrainer from its padded batch on: loss, backward pass, clipping, its optimizer.

    Its own loop would sample the completions; here they are given to ``compute_loss``. Each pass
    is padded to its own longest row, as TRL pads them with ``steps_per_generation=1``: its best
    setting, since its default pads every row to the longest of all passes of an update. On a CPU
    its output head scores the padding too.
    """

    def __init__(self, dtype: str) -> None:
        with warnings.catch_warnings():
            # It warns of versions of vLLM that it does not know, and of itself.
            warnings.simplefilter("ignore")
            self._trainer = _build_trl_trainer(dtype)
        self._optimizer = self._trainer.create_optimizer()

    def update(self, samples: Sequence[Sample]) -> float:
        """One optimizer update; the gradient's norm."""
        trainer = self._trainer
        num_targets = torch.tensor(sum(sample.num_targets for sample in samples))
        for first in range(0, len(samples), _TRL_ROWS):
            rows = _pad_for_trl(samples[first : first + _TRL_ROWS])
            rows["num_items_in_batch"] = num_targets
            loss = trainer.compute_loss(trainer.model, rows)
            trainer.accelerator.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)


def find_missing_trl() -> str | None:
    """Why TRL cannot be measured; None: it can."""
    if importlib.util.find_spec("trl") is None:
        return "TRL is not installed (uv pip install trl)"
    return None


def _compute_token_losses(new: Tensor, advantages: Tensor) -> Tensor:
    """The clipped loss on the policy that sampled, as in agentrl without correction."""
    ratio = (new - new.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def _build_trl_trainer(dtype: str) -> Any:
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY_SIZE)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        pad_token="w0",
        eos_token="w1",
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=build_model(),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=trl.GRPOConfig(
                output_dir=folder,
                loss_type="dapo",
                learning_rate=LEARNING_RATE,
                per_device_train_batch_size=_TRL_ROWS,
                num_generations=_TRL_ROWS,
                gradient_checkpointing=False,
                use_cpu=True,
                bf16=dtype == "bfloat16",
                report_to="none",
            ),
            train_dataset=Dataset.from_list([{"prompt": "w5"}]),
            processing_class=tokenizer,
        )
    # What its loop sets before it asks for a loss; this divides by the whole batch's tokens.
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation
    trainer.model.train()
    return trainer


def _pad_for_trl(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Prompts padded on the left, all else on the right."""
    starts = [int(sample.targets.sources[0]) + 1 for sample in samples]

    def pad(parts: Sequence[Tensor], side: str) -> Tensor:
        return pad_sequence(list(parts), batch_first=True, padding_side=side)

    prompts = [s.input_ids[:start] for s, start in zip(samples, starts, strict=True)]
    rest = [s.input_ids[start:] for s, start in zip(samples, starts, strict=True)]
    trained = [torch.zeros_like(ids) for ids in rest]
    for sample, start, mask in zip(samples, starts, trained, strict=True):
        mask[sample.targets.sources + 1 - start] = 1
    return {
        "prompt_ids": pad(prompts, "left"),
        "prompt_mask": pad([torch.ones_like(ids) for ids in prompts], "left"),
        "completion_ids": pad(rest, "right"),
        "completion_mask": pad([torch.ones_like(ids) for ids in rest], "right"),
        "tool_mask": pad(trained, "right"),
        "advantages": torch.tensor([float(s.targets.advantages[0]) for s in samples]),
    }
