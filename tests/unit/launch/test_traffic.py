"""What a dry run says of a cluster's network."""

from __future__ import annotations

from pathlib import Path

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.launch.ray.traffic import describe_traffic


def test_bytes_of_weights_and_trajectories(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"0" * 3_000_000)
    config = ExperimentConfig.model_validate(
        {
            "experiment_name": "network",
            "model": {"path": str(tmp_path)},
            "agent_builder_path": "my_agent.build",
            "engine": {"kind": "vllm", "num_servers": 4},
            "gconfig": {"n_samples": 4},
            "train_dataset": {"path": "rows.jsonl", "batch_size": 30},
        }
    )
    cluster = Machine(gpu_ids=tuple("01234567"), num_nodes=2)
    weights, trajectories = describe_traffic(config, resolve_run(config, cluster, purpose="train"))
    assert weights.endswith("(nccl): to each 3 MB, 200 kB/s in steps of a minute")
    assert "120 trajectories a step to rank 0: 3.48 MB for each 1,000 tokens" in trajectories
    assert "58 kB/s" in trajectories
