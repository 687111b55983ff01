"""How large the cache and the steps of the embedded engine are."""

from __future__ import annotations

import math

from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import get_device_and_memory_breakdown
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from agentrl_cli.config.engine import EngineConfig
from agentrl_cli.errors import EngineError

#: Tokens of one cache page, and the grain at which prompts share their beginnings.
PAGE_SIZE = 16
#: Share of the free memory that the cache may take: the trainer lives in the same process.
_MEMORY_SHARE = {"cpu": 0.15, "cuda": 0.4}
#: Room beyond the longest calls, so that shared beginnings outlive the calls that made them.
_HEADROOM = 1.25


def build_batching_config(model: PreTrainedModel, config: EngineConfig) -> ContinuousBatchingConfig:
    """Explicit sizes: room for every call at full length, or for what the memory allows.

    Raises:
        EngineError: not even one call of full length fits.
    """
    text_config = model.config.get_text_config()
    on_cpu = model.device.type == "cpu"
    max_batch_tokens = max(512 if on_cpu else 2048, config.max_num_seqs)
    head_dim, num_kv_heads = find_head_dim(text_config), find_num_key_value_heads(text_config)
    item = model.dtype.itemsize
    # What the library counts per cached token: keys and values of all layers, one layer's
    # working copies, indices, and a mask (counted even where attention needs none).
    token_bytes = (
        text_config.num_hidden_layers * 2 * num_kv_heads * head_dim * item
        + (2 * text_config.num_attention_heads + num_kv_heads) * head_dim * item
        + 8
        + max_batch_tokens * item
    )
    _, total, reserved, allocated = get_device_and_memory_breakdown()
    share = _MEMORY_SHARE["cpu" if on_cpu else "cuda"]
    affordable = int((total - max(reserved, allocated)) * share) // (token_bytes * PAGE_SIZE)
    pages_per_call = math.ceil(config.max_model_len / PAGE_SIZE) + 1
    wanted = math.ceil(pages_per_call * config.max_num_seqs * _HEADROOM)
    if affordable < pages_per_call:
        raise EngineError(
            f"engine.max_model_len: a call of {config.max_model_len} tokens needs "
            f"{pages_per_call * PAGE_SIZE * token_bytes / 2**30:.1f} GiB of cache and "
            f"{affordable * PAGE_SIZE * token_bytes / 2**30:.1f} GiB may be used. "
            f"Type engine.max_model_len={max(2, (affordable - 1) * PAGE_SIZE)} or less"
        )
    return ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=min(wanted, affordable),
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=config.max_num_seqs,
        max_blocks_per_request=0,
        use_cuda_graph=False,
        use_async_batching=False,
        return_logprobs=True,
        auto_switch_to_flash=False,
        max_memory_percent=0.9,
    )
