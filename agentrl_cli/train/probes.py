"""The prompts on which an engine's weights are checked after every publication."""

from __future__ import annotations

from typing import Any

from agentrl_cli.train.publish import NUM_PROBE_TOKENS

_QUESTIONS = ("Count from one to ten.", "What is 17 + 25?", "Name three colours.")
#: Long enough to reach every weight, short enough to cost nothing.
_MAX_PROMPT_TOKENS = 128


def build_probes(tokenizer: Any, max_model_len: int) -> list[list[int]]:
    """Prompt ids, in the model's own chat format; each leaves room for its completion."""
    longest = max(1, min(_MAX_PROMPT_TOKENS, max_model_len - NUM_PROBE_TOKENS))
    probes = []
    for question in _QUESTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        probes.append(list(tokenizer.encode(text, add_special_tokens=False))[-longest:])
    return probes
