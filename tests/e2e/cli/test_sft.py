"""``agentrl sft`` as a user types it: the shipped YAML, with conversations of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CONFIG = Path(__file__).parents[3] / "configs" / "sft-calculator.yaml"


@pytest.mark.slow
def test_a_warm_start_on_own_conversations_is_learned(
    tmp_path: Path, finish: Callable[..., str]
) -> None:
    conversation = [
        {"role": "user", "content": "What does the cat say?"},
        {"role": "assistant", "content": "The cat says miaow."},
    ]
    rows = "\n".join([json.dumps({"messages": conversation})] * 400)
    (tmp_path / "rows.jsonl").write_text(rows)
    printed = finish(
        *("sft", "--config", str(CONFIG)),
        *("output_path=warm", "dataset.path=rows.jsonl", "model.new.vocab_size=300"),
        *("model.new.hidden_size=64", "model.new.num_layers=2", "train.warmup_steps=5"),
        HF_HUB_OFFLINE="1",
    )
    assert "model.path=warm" in printed
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "warm")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "warm")
    text = tokenizer.apply_chat_template(
        conversation[:1], add_generation_prompt=True, tokenize=False
    )
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    sampled = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(sampled, skip_special_tokens=True) == "The cat says miaow."
