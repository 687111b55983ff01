"""A vocabulary of 150,000: an update in which no tensor of all logits ever stands."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl_cli.train.learner import Learner
from agentrl_cli.train.logprobs import MAX_LOGITS

VOCABULARY_SIZE = 150_000


class _Largest(TorchDispatchMode):
    """Keeps the size of the largest float tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_values = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.num_values = max(self.num_values, tensor.numel())
        return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_largest_tensor_of_an_update_is_one_tile(
    build_model, build_config, build_trajectory, dtype
):
    model = build_model(
        vocab_size=VOCABULARY_SIZE, hidden_size=8, num_attention_heads=2, num_key_value_heads=1
    )
    config = build_config(dtype=dtype, micro_batch_tokens=1000)
    learner = Learner(model, config)
    batch = [build_trajectory("g", i, float(i), [([1, 2], list(range(160)))]) for i in range(2)]
    with _Largest() as largest:
        metrics = learner.update(batch, 0)
    assert metrics["num_micro_batches"] == 1
    # All logits would be 320 rows; a tile has 223, or 320 of a part of the vocabulary.
    assert MAX_LOGITS - VOCABULARY_SIZE < largest.num_values <= MAX_LOGITS < 320 * VOCABULARY_SIZE
