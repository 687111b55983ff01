"""What a run moves between the nodes of a cluster, for whoever plans its network."""

from __future__ import annotations

from pathlib import Path

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import ResolvedRun

#: Of a trajectory's record: what benchmarks/cluster_costs.py measures.
_BYTES_PER_TOKEN = 29
_STEP_SECONDS = 60.0


def describe_traffic(config: ExperimentConfig, run: ResolvedRun) -> list[str]:
    """Bytes of a step, and bytes per second in steps of a minute, a line each."""
    if not run.servers or config.train_dataset is None:
        return []
    servers = len(run.servers)
    files = Path(config.model.path).expanduser().glob("*.safetensors")
    num_bytes = sum(path.stat().st_size for path in files)
    if config.model.lora is not None:
        weights = "the adapter"
    elif num_bytes:
        rate = _format_bytes(servers * num_bytes / _STEP_SECONDS)
        weights = f"{_format_bytes(num_bytes)}, {rate}/s in steps of a minute"
    else:
        weights = "the model's size, which is not known before it is on this machine"
    count = config.train_dataset.batch_size * config.gconfig.n_samples
    size = count * 1000 * _BYTES_PER_TOKEN
    return [
        f"moves weights to {servers} servers after each step ({run.weight_transfer}): to each "
        f"{weights}",
        f"moves {count} trajectories a step to rank 0: {_format_bytes(size)} for each 1,000 tokens "
        f"that they have on average, {_format_bytes(size / _STEP_SECONDS)}/s in steps of a minute",
    ]


def _format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
