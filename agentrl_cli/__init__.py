"""agentrl: reinforcement learning for any LLM agent, with one command.

The public names below are loaded when first used, so that importing the package
costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "AgentWorkflow": "agentrl_cli.rollout.workflow",
    "AsyncRewardWrapper": "agentrl_cli.rollout.rewards",
    "PPOTrainer": "agentrl_cli.launch.trainer",
    "RolloutWorkflow": "agentrl_cli.rollout.workflow",
    "TrackingClient": "agentrl_cli.tracking.client",
    "load_config": "agentrl_cli.config.loading",
}
__all__ = [
    "AgentWorkflow",
    "AsyncRewardWrapper",
    "PPOTrainer",
    "RolloutWorkflow",
    "TrackingClient",
    "load_config",
]

if TYPE_CHECKING:
    from agentrl_cli.config.loading import load_config
    from agentrl_cli.launch.trainer import PPOTrainer
    from agentrl_cli.rollout.rewards import AsyncRewardWrapper
    from agentrl_cli.rollout.workflow import AgentWorkflow, RolloutWorkflow
    from agentrl_cli.tracking.client import TrackingClient


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'agentrl_cli' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
