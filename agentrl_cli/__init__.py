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
    "AgentRun": "agentrl_cli.agents.openai_agents",
    "GraphRun": "agentrl_cli.agents.langgraph",
    "RolloutWorkflow": "agentrl_cli.rollout.workflow",
    "TrackedCamelModel": "agentrl_cli.agents.camel_model",
    "TrackingClient": "agentrl_cli.tracking.client",
    "build_anthropic_client": "agentrl_cli.agents.anthropic_sdk",
    "build_chat_model": "agentrl_cli.agents.langgraph",
    "build_run_config": "agentrl_cli.agents.openai_agents",
    "load_config": "agentrl_cli.config.config_file",
}
__all__ = [
    "AgentRun",
    "AgentWorkflow",
    "AsyncRewardWrapper",
    "GraphRun",
    "PPOTrainer",
    "RolloutWorkflow",
    "TrackedCamelModel",
    "TrackingClient",
    "build_anthropic_client",
    "build_chat_model",
    "build_run_config",
    "load_config",
]

if TYPE_CHECKING:
    from agentrl_cli.agents.anthropic_sdk import build_anthropic_client
    from agentrl_cli.agents.camel_model import TrackedCamelModel
    from agentrl_cli.agents.langgraph import GraphRun, build_chat_model
    from agentrl_cli.agents.openai_agents import AgentRun, build_run_config
    from agentrl_cli.config.config_file import load_config
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
