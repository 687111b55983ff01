"""What a step will cost, scaled up from the trajectories of a trial."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.records import InteractionStatus, Trajectory
from agentrl_cli.rollout.reward_process import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Means of one trajectory, and what they come to in a step."""

    num_trajectories: int
    """Of a step: tasks times samples."""
    calls: float
    """Model calls of one trajectory."""
    prompt_tokens: float
    """Tokens that one trajectory's calls read, each call's whole prompt counted."""
    completion_tokens: float
    agent_seconds: float
    """Outside of model calls and the reward function: tools, and the agent's own code."""
    reward_seconds: float
    model_seconds: float
    """In model calls, as long as they took here."""

    @property
    def step_prompt_tokens(self) -> float:
        """Of a step; most are in the prefix cache by then."""
        return self.prompt_tokens * self.num_trajectories

    @property
    def step_completion_tokens(self) -> float:
        """Sampled in a step."""
        return self.completion_tokens * self.num_trajectories

    def compute_seconds(self, config: ExperimentConfig) -> dict[str, float]:
        """Seconds of a step's rollouts that the model is not to blame for, and with it."""
        num_waves = math.ceil(self.num_trajectories / config.rollout.count_parallel())
        num_judged = math.ceil(self.num_trajectories / config.rollout.count_reward_workers())
        own = num_waves * self.agent_seconds
        rewards = num_judged * self.reward_seconds
        return {
            "agents": own,
            "rewards": rewards,
            "rollouts": max(own + num_waves * self.model_seconds, rewards),
        }

    def to_dict(self, config: ExperimentConfig) -> dict[str, Any]:
        """Plain data for JSON, with the step's seconds."""
        return {
            **asdict(self),
            "step_prompt_tokens": self.step_prompt_tokens,
            "step_completion_tokens": self.step_completion_tokens,
            "step_seconds": self.compute_seconds(config),
        }

    def describe(self, config: ExperimentConfig, model: str, *, is_stand_in: bool) -> str:
        """What a step costs, and what that assumes."""
        seconds = self.compute_seconds(config)
        lengths = "" if not is_stand_in else f" The lengths are those of {model}, not your model's."
        tokens = (
            f"{self.step_completion_tokens:,.0f} sampled tokens"
            if self.completion_tokens
            else "tokens unknown (the endpoint does not count them)"
        )
        read = f", prompts of {self.step_prompt_tokens:,.0f}" if self.prompt_tokens else ""
        return (
            f"a step of {self.num_trajectories:,} trajectories "
            f"({config.train_dataset.batch_size} tasks x {config.gconfig.n_samples} samples): "
            f"{tokens}{read}, {self.calls * self.num_trajectories:,.0f} model calls; at least "
            f"{seconds['agents']:,.1f} s in agents and {seconds['rewards']:,.1f} s in rewards; "
            f"{seconds['rollouts']:,.1f} s of rollouts with calls as fast as here. Assumed: "
            f"{config.rollout.count_parallel()} trajectories at a time that do not slow each other "
            f"down, {config.rollout.count_reward_workers()} reward processes, and trajectories "
            f"like those of the trial; the update is not counted.{lengths}"
        )


def measure_step_cost(
    config: ExperimentConfig, trajectories: Sequence[Trajectory], scores: Sequence[Score]
) -> StepCost | None:
    """What a step will cost; None: no trajectory called the model."""
    measured = [t for t in trajectories if t.num_turns]
    if not measured:
        return None
    done = [
        [i for i in t.interactions if i.status is InteractionStatus.COMPLETED] for t in measured
    ]
    in_calls = [sum(i.seconds for i in calls) for calls in done]
    return StepCost(
        num_trajectories=config.train_dataset.batch_size * config.gconfig.n_samples,
        calls=statistics.fmean(map(len, done)),
        prompt_tokens=statistics.fmean(sum(len(i.prompt_ids) for i in calls) for calls in done),
        completion_tokens=statistics.fmean(t.num_completion_tokens for t in measured),
        agent_seconds=statistics.fmean(
            # Calls that run side by side add up to more than the time that passed.
            max(0.0, t.seconds - t.reward_seconds - seconds)
            for t, seconds in zip(measured, in_calls, strict=True)
        ),
        # The first calls wait for processes that start once in a run.
        reward_seconds=statistics.fmean(s.run_seconds for s in scores) if scores else 0.0,
        model_seconds=statistics.fmean(in_calls),
    )
