"""The configuration of what samples: the engine, its servers, and how weights reach them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl_cli.config.base import StrictConfig


class WeightTransferConfig(StrictConfig):
    """How the trainer's weights reach the servers (vllm, sglang)."""

    kind: Literal["disk", "nccl", "lora"] | None = None
    """``disk``: a file in a RAM-backed folder; ``nccl``: from GPU to GPU; ``lora``: the adapter
    alone. null: ``lora`` with ``model.lora``; else ``nccl`` where trainer and servers have GPUs
    of their own; else ``disk``."""
    dir: str | None = None
    """Folder for files of weights, seen by trainer and servers; null: /dev/shm where it has room,
    else the system's folder for temporary files."""


class EngineConfig(StrictConfig):
    """What samples the completions."""

    kind: Literal["embedded", "vllm", "sglang"] | None = None
    """null: ``vllm`` where there is a GPU, ``embedded`` elsewhere."""
    num_servers: int = Field(1, ge=1)
    """Server processes (vllm, sglang); the embedded engine is always one."""
    python: str | None = None
    """Interpreter whose environment has the server's package; null: the one agentrl runs on."""
    device: Literal["cpu", "cuda"] | None = None
    """Where servers compute; null: ``cuda`` where there is a GPU, ``cpu`` elsewhere."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs of one server."""
    gpu_memory_utilization: float | None = Field(None, gt=0.0, le=1.0)
    """Share of a GPU's memory that a server takes; null: 0.9, or 0.4 of one that the trainer
    computes on too."""
    cpu_kv_cache_gib: float = Field(1.0, gt=0.0)
    """Memory for keys and values of one server on CPU, in GiB."""
    tool_call_parser: str = "auto"
    """How tool calls are written by the model: a name from docs/parsers.md, ``auto`` (told by its
    chat template), or ``none``."""
    reasoning_parser: str = "auto"
    """How thoughts are written by the model: a name from docs/parsers.md, ``auto`` (told by its
    chat template), or ``none``, which leaves them in the content."""
    keep_thinking: bool = False
    """True: the history keeps the thoughts that were sampled, whatever the chat template strips;
    false: a turn whose thoughts are stripped ends a sample (``thinking_stripped``)."""
    max_model_len: int = Field(8192, ge=2)
    """Most tokens of prompt and completion together."""
    max_num_seqs: int = Field(64, ge=1)
    """Most completions sampled at the same time (by each server)."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads of the embedded engine (null: half of the cores, at least one), or of each
    server on CPU (null: an equal share of the cores but one, at least one)."""
    first_port: int | None = Field(None, ge=1024, le=65000)
    """Loopback port of the first server, the others follow; null: ports that are free."""
    server_args: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Further arguments of the server's command line, such as ``--swap-space``."""
    weight_transfer: WeightTransferConfig = WeightTransferConfig()
    start_timeout_seconds: float = Field(600.0, gt=0.0)
    """Deadline of a server's start."""
    generate_timeout_seconds: float = Field(600.0, gt=0.0)
    """Deadline of one completion."""
    publish_timeout_seconds: float = Field(120.0, gt=0.0)
    """Deadline of a weight publication."""
    max_restarts: int = Field(3, ge=0)
    """Times that a process which died is started again, counted over one hour; the next death
    stops the run."""

    def list_reading_options(self) -> dict[str, Any]:
        """How replies are read and continued, as the gateway takes it."""
        return {
            "tool_call_parser": self.tool_call_parser,
            "reasoning_parser": self.reasoning_parser,
            "keep_thinking": self.keep_thinking,
        }

    def compute_release_deadline(self) -> float:
        """Seconds after which servers have ended their calls and given up, or taken, memory."""
        return self.generate_timeout_seconds + 2 * self.publish_timeout_seconds

    def compute_publish_deadline(self) -> float:
        """Seconds after which a publication and its verification are over, whatever happens.

        Servers that are being started again meanwhile get the weights a second time.
        """
        return (
            2 * self.publish_timeout_seconds
            + self.start_timeout_seconds
            + 2 * self.generate_timeout_seconds
        )
