"""Why a server did not start, read from its log."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import AgentrlError, EngineError, ModelError, UserInputError

#: Of a server's own sentence, in characters.
_MAX_SHOWN = 700


@dataclass(frozen=True, slots=True)
class _Cause:
    """A sentence that servers write, and what to do about it."""

    pattern: str
    what: str
    keys: tuple[str, ...]
    """Configuration keys that change it, shown with this run's values."""
    error: type[UserInputError] = UserInputError


_DOES_NOT_FIT = "the model does not fit"

#: The first that is found counts: causes stand before their consequences.
_CAUSES = (
    _Cause(
        r"To serve at least one request with the model's max seq len[^\n]*",
        _DOES_NOT_FIT,
        ("engine.max_model_len", "MEMORY"),
        ModelError,
    ),
    _Cause(
        r"The model's max seq len \(\d+\) is larger than the maximum number of tokens that can be "
        r"stored in KV cache[^\n]*",
        _DOES_NOT_FIT,
        ("engine.max_model_len", "MEMORY"),
        ModelError,
    ),
    _Cause(
        r"No available memory for the cache blocks[^\n]*",
        _DOES_NOT_FIT,
        ("MEMORY", "engine.tensor_parallel_size", "model.dtype"),
        ModelError,
    ),
    _Cause(
        r"(?:Failed to load model - not enough GPU memory|(?:torch\.)?(?:cuda\.)?OutOfMemoryError"
        r"|CUDA out of memory|HIP out of memory)[^\n]*",
        _DOES_NOT_FIT,
        ("engine.gpu_memory_utilization", "engine.tensor_parallel_size", "model.dtype"),
        ModelError,
    ),
    _Cause(
        # SGLang's.
        r"Not enough memory\. Please try[^\n]*",
        _DOES_NOT_FIT,
        ("engine.gpu_memory_utilization", "engine.max_model_len", "engine.tensor_parallel_size"),
        ModelError,
    ),
    _Cause(
        r"(?:Free memory on device|Available memory on node)[^\n]*",
        "there is too little free memory for the server",
        ("MEMORY",),
    ),
    _Cause(
        r"(?:DefaultCPUAllocator: can't allocate memory|std::bad_alloc|MemoryError)[^\n]*",
        _DOES_NOT_FIT,
        ("engine.cpu_kv_cache_gib", "model.dtype", "engine.num_servers"),
        ModelError,
    ),
    _Cause(
        r"User-specified max_model_len \(\d+\) is greater than[^\n]*",
        "the model takes fewer tokens than are asked for",
        ("engine.max_model_len",),
    ),
    _Cause(
        r"(?:Model architectures? \[[^\n]*(?:not supported|failed to be inspected)"
        r"|has no vLLM implementation|does not recognize this architecture)[^\n]*",
        "the server does not know the model's architecture",
        ("model.path", "engine.kind"),
        ModelError,
    ),
    _Cause(
        r"(?:Repo id must be|Can't load the configuration of|is not a local folder and is not a "
        r"valid model identifier|Repository Not Found|Cannot find any model weights"
        r"|Invalid repository ID or local directory)[^\n]*",
        "the server found no model",
        ("model.path", "tokenizer_path"),
        ModelError,
    ),
    _Cause(
        r"SafetensorError: [^\n]*",
        "the model's files cannot be read",
        ("model.path",),
        ModelError,
    ),
    _Cause(
        r"(?:error: unrecognized arguments|error: argument )[^\n]*",
        "the server refuses an argument",
        ("engine.server_args",),
    ),
    _Cause(
        r"LoRA rank \d+ is greater than max_lora_rank[^\n]*|argument --max-lora-rank[^\n]*",
        "the server has no room for adapters of that rank",
        ("model.lora.rank",),
    ),
)

_PORT_TAKEN = re.compile(r"address already in use", re.IGNORECASE)


def find_start_failure(
    config: ExperimentConfig, name: str, log: str, log_path: str, *, on_cpu: bool
) -> AgentrlError | None:
    """The error of a server whose log tells why it did not start; None where it does not.

    Args:
        config: the experiment; values of the keys that matter are shown.
        name: the server.
        log: what it wrote.
        log_path: where the whole log is.
        on_cpu: memory is then a matter of other keys.
    """
    found = [(match, cause) for cause in _CAUSES if (match := re.search(cause.pattern, log))]
    if not found:
        return None
    match, cause = found[0]
    memory = "engine.cpu_kv_cache_gib" if on_cpu else "engine.gpu_memory_utilization"
    keys = [memory if key == "MEMORY" else key for key in cause.keys]
    if on_cpu:
        keys = [key for key in keys if key != "engine.tensor_parallel_size"]
    listed = ", ".join(f"{key} ({_read(config, key)})" for key in dict.fromkeys(keys))
    return cause.error(
        f"{name}: {cause.what}. It says:\n  {match[0][:_MAX_SHOWN].strip()}\n"
        f"What changes it: {listed}. The whole log: {log_path}"
    )


def says_port_taken(log: str) -> bool:
    """True where a server ended because another program listens on its port."""
    return _PORT_TAKEN.search(log) is not None


def explain_unknown_failure(name: str, how: str, tail: str, log_path: str) -> EngineError:
    """The error of a server that failed for an unknown reason."""
    shown = "\n".join(f"  {line}" for line in tail.splitlines()) or "  (nothing)"
    return EngineError(f"{name} {how}. The last lines of {log_path}:\n{shown}")


def _read(config: ExperimentConfig, key: str) -> object:
    """The value of a dotted key."""
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return list(value) if isinstance(value, tuple) else value
