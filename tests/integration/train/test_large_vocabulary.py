"""A vocabulary of 150,000: an update in which no tensor of all logits ever stands."""

from __future__ import annotations

import pytest

from agentrl_cli.train.learner import Learner
from agentrl_cli.train.model.output_head import MAX_LOGITS

VOCABULARY_SIZE = 150_000


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_largest_tensor_of_an_update_is_one_tile(
    build_model, build_config, build_trajectory, watch_largest, dtype
):
    model = build_model(
        vocab_size=VOCABULARY_SIZE, hidden_size=8, num_attention_heads=2, num_key_value_heads=1
    )
    config = build_config(dtype=dtype, micro_batch_tokens=1000)
    learner = Learner(model, config)
    batch = [build_trajectory("g", i, float(i), [([1, 2], list(range(160)))]) for i in range(2)]
    with watch_largest() as largest:
        metrics = learner.update(batch, 0)
    assert metrics["num_micro_batches"] == 1
    # All logits would be 320 rows; a tile has 223, or 320 of a part of the vocabulary.
    assert MAX_LOGITS - VOCABULARY_SIZE < largest.num_values <= MAX_LOGITS < 320 * VOCABULARY_SIZE
