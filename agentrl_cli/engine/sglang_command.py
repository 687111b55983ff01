"""How an SGLang server is started so that :class:`SglangServer` can use it. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from agentrl_cli.config.engine import EngineConfig

#: SGLang 0.5.23 keeps up to eight positions of the context for itself: of 512, a prompt may have
#: 505 tokens, and prompt and completion together 510.
_RESERVED_POSITIONS = 8

_ENV = {
    # Otherwise logprobs are those at temperature 1, whatever the temperature was.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",
    # The reserved positions may lie beyond the model's last; none of them is ever computed.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "true",
    # /health is for the launcher, often and cheap; /health_generate goes on sampling a token.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangCommand:
    """A server's command line, its environment, and the file that it reads its key from."""

    argv: tuple[str, ...]
    env: dict[str, str]
    """To be added to the environment."""
    settings: str = field(repr=False)
    """To be written, for the owner's eyes alone, to the ``settings_path`` of the argv."""


def build_sglang_command(
    config: EngineConfig,
    *,
    python: str,
    model_path: str,
    model_name: str,
    dtype: str,
    port: int,
    api_key: str,
    settings_path: str,
    lora_rank: int | None = None,
) -> SglangCommand:
    """The command of one server on GPUs (the caller sets CUDA_VISIBLE_DEVICES).

    Its ``--api-key`` guards every endpoint but health checks, and comes from a file: a command
    line can be read by everyone on the machine.

    Args:
        config: lengths, sizes and further arguments.
        python: interpreter that has SGLang.
        model_path: folder of the model.
        model_name: what it is served as.
        dtype: of the weights.
        port: to listen on.
        api_key: that requests must carry.
        settings_path: where ``settings`` will be; ends in ``.yaml``.
        lora_rank: of the adapters that will be loaded; None: none will.

    Raises:
        ValueError: a key that SGLang would take for an option.
    """
    if api_key.startswith("-"):
        raise ValueError("a key for SGLang must not begin with '-'")
    argv = [
        *(python, "-m", "sglang.launch_server", "--config", settings_path),
        *("--model-path", model_path, "--served-model-name", model_name, "--dtype", dtype),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level-http", "warning"),
        *("--context-length", str(config.max_model_len + _RESERVED_POSITIONS)),
        *("--max-running-requests", str(config.max_num_seqs)),
        *("--mem-fraction-static", str(config.gpu_memory_utilization)),
        *("--tensor-parallel-size", str(config.tensor_parallel_size)),
        # Otherwise each piece of a stream repeats all that came before.
        "--incremental-streaming-output",
    ]
    if lora_rank is not None:
        # Names of the layers come with each adapter; the buffers are for all that may come.
        argv += ["--enable-lora", "--max-lora-rank", str(lora_rank), "--lora-target-modules", "all"]
    return SglangCommand(
        argv=(*argv, *config.server_args),
        env=dict(_ENV),
        settings=format_settings(api_key),
    )


def format_settings(api_key: str) -> str:
    """What stands in the file at ``settings_path``."""
    return f"api-key: {json.dumps(api_key)}\n"
