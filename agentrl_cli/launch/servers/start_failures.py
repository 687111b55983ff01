"""Why a server did not start, read from its log."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import NamedTuple

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import UserInputError

#: Of a server's own sentence, in characters.
_MAX_SHOWN = 700


class _Cause(NamedTuple):
    """What is wrong, the beginnings of the sentences in which servers say so, and the keys that
    change it, shown with this run's values."""

    what: str
    pattern: str
    keys: str


_DOES_NOT_FIT = "the model does not fit"

#: The first that is found counts: causes stand before their consequences.
_CAUSES = (
    _Cause(
        _DOES_NOT_FIT,
        r"To serve at least one request with the model's max seq len"
        r"|The model's max seq len \(\d+\) is larger than the maximum number of tokens",
        "engine.max_model_len MEMORY",
    ),
    _Cause(
        _DOES_NOT_FIT,
        r"No available memory for the cache blocks|Failed to load model - not enough GPU memory"
        r"|(?:torch\.)?(?:cuda\.)?OutOfMemoryError|CUDA out of memory|HIP out of memory"
        # SGLang's.
        r"|Not enough memory\. Please try",
        "MEMORY engine.max_model_len engine.tensor_parallel_size model.dtype",
    ),
    _Cause(
        "there is too little free memory for the server",
        r"Free memory on device|Available memory on node",
        "MEMORY",
    ),
    _Cause(
        _DOES_NOT_FIT,
        r"DefaultCPUAllocator: can't allocate memory|std::bad_alloc|MemoryError",
        "engine.cpu_kv_cache_gib model.dtype engine.num_servers",
    ),
    _Cause(
        "the model takes fewer tokens than are asked for",
        r"User-specified max_model_len \(\d+\) is greater than",
        "engine.max_model_len",
    ),
    _Cause(
        "the server does not know the model's architecture",
        r"Model architectures? \[[^\n]*(?:not supported|failed to be inspected)"
        r"|has no vLLM implementation|does not recognize this architecture",
        "model.path engine.kind",
    ),
    _Cause(
        "the server found no model",
        r"Repo id must be|Can't load the configuration of|is not a local folder and is not a valid "
        r"model identifier|Repository Not Found|Cannot find any model weights"
        r"|Invalid repository ID or local directory",
        "model.path tokenizer_path",
    ),
    _Cause("the model's files cannot be read", r"SafetensorError: ", "model.path"),
    _Cause(
        "the server has no room for adapters of that rank",
        r"LoRA rank \d+ is greater than max_lora_rank|argument --max-lora-rank",
        "model.lora.rank",
    ),
    _Cause(
        "the server refuses an argument",
        r"error: unrecognized arguments|error: argument ",
        "engine.server_args",
    ),
)


def find_start_failure(
    config: ExperimentConfig, name: str, log: str, log_path: str, *, on_cpu: bool
) -> UserInputError | None:
    """The error of a server whose log tells why it did not start; None where it does not.

    ``on_cpu``: memory is then a matter of other keys.
    """
    memory = "engine.cpu_kv_cache_gib" if on_cpu else "engine.gpu_memory_utilization"
    for what, pattern, keys in _CAUSES:
        if match := re.search(rf"(?:{pattern})[^\n]*", log):
            shown = [
                f"{key} ({_read(config, key)})"
                for key in keys.replace("MEMORY", memory).split()
                if not (on_cpu and key == "engine.tensor_parallel_size")
            ]
            return UserInputError(
                f"{name}: {what}. It says:\n  {match[0][:_MAX_SHOWN].strip()}\n"
                f"What changes it: {', '.join(shown)}. The whole log: {log_path}"
            )
    return None


def _read(config: ExperimentConfig, key: str) -> object:
    value = attrgetter(key)(config)
    return list(value) if isinstance(value, tuple) else value
