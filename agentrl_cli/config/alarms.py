"""Alarms: what is watched in the metrics of every step, and what happens when it goes wrong."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from agentrl_cli.config.base import StrictConfig


def _read_off(value: Any) -> Any:
    # YAML reads the bare word off as false.
    return "off" if value is False else value


AlarmAction = Annotated[Literal["off", "warn", "stop"], BeforeValidator(_read_off)]


class AlarmConfig(StrictConfig):
    """One alarm, and when it rings."""

    action: AlarmAction = "warn"
    """``warn``: say it once when it begins and once when it is over; ``stop``: say it, save, and
    end the run with exit code 1 (the same command goes on); ``off``: do not look."""
    threshold: float
    num_steps: int = Field(5, ge=1)
    """Steps in a row that it must last."""


class RewardConstantConfig(AlarmConfig):
    """Every trajectory of every step has the same reward: there is nothing to learn from. Not
    where that is the best reward, and there were worse ones before."""

    threshold: float = Field(0.0, ge=0.0)
    """Rewards that are no further apart are the same."""


class GroupsEqualConfig(AlarmConfig):
    """The trajectories of each group have the same score, so that their advantages are 0. Not
    where that is because nearly all rewards are the best ones."""

    threshold: float = Field(0.9, gt=0.0, le=1.0)
    """Share of a step's groups from which on it holds."""


class LogprobGapConfig(AlarmConfig):
    """What the engine sampled with and what the trainer computes drift apart
    (``logprob_gap_mean``)."""

    threshold: float = Field(0.1, gt=0.0)
    """Nats per token."""
    num_steps: int = Field(3, ge=1)
    """Steps in a row that it must last."""


class EntropyCollapseConfig(AlarmConfig):
    """The policy hardly varies its answers any more, though they are not yet right."""

    threshold: float = Field(0.1, gt=0.0, lt=1.0)
    """Share of the entropy of the run's first steps."""


class TruncatedConfig(AlarmConfig):
    """Replies are cut off at their length limit."""

    threshold: float = Field(0.4, gt=0.0, lt=1.0)
    """Share of a step's trajectories with such a reply."""
    num_steps: int = Field(3, ge=1)
    """Steps in a row that it must last."""


class KlFromReferenceConfig(AlarmConfig):
    """The policy runs away from the reference model; only where a KL term is trained with."""

    threshold: float = Field(1.0, gt=0.0)
    """Nats per token."""
    num_steps: int = Field(3, ge=1)
    """Steps in a row that it must last."""


class KlOfUpdateConfig(AlarmConfig):
    """The updates of one step change the policy too much (``approx_kl``): where a step makes
    several updates, or with the loss ``ppo_clip``, for which the age of the tokens counts too."""

    threshold: float = Field(0.1, gt=0.0)
    """Nats per token."""
    num_steps: int = Field(3, ge=1)
    """Steps in a row that it must last."""


class BrokenTurnsConfig(AlarmConfig):
    """Turns that go back to an earlier one could not continue its tokens."""

    threshold: float = Field(0.1, gt=0.0, le=1.0)
    """Share of the turns that could break."""
    num_steps: int = Field(1, ge=1)
    """Steps in a row that it must last."""


class NotFiniteConfig(StrictConfig):
    """A loss or a gradient is NaN or infinite; the micro-batch is saved in the run folder."""

    action: Annotated[Literal["warn", "stop"], BeforeValidator(_read_off)] = "stop"
    """``stop``: end the run with exit code 1, its weights as they were; ``warn``: leave that
    optimizer update out and go on."""


class AlarmsConfig(StrictConfig):
    """What is watched while training, and what happens when it goes wrong."""

    reward_constant: RewardConstantConfig = RewardConstantConfig()
    groups_equal: GroupsEqualConfig = GroupsEqualConfig()
    logprob_gap: LogprobGapConfig = LogprobGapConfig()
    entropy_collapse: EntropyCollapseConfig = EntropyCollapseConfig()
    truncated: TruncatedConfig = TruncatedConfig()
    kl_from_reference: KlFromReferenceConfig = KlFromReferenceConfig()
    kl_of_update: KlOfUpdateConfig = KlOfUpdateConfig()
    broken_turns: BrokenTurnsConfig = BrokenTurnsConfig()
    not_finite: NotFiniteConfig = NotFiniteConfig()
