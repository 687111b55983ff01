"""The configuration of ``train``: how the model is updated, and the alarms that watch it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from agentrl_cli.config.algorithm_config import AlgorithmConfig, CriticConfig
from agentrl_cli.config.config_schema import ResumeSafe, StrictConfig


def _read_off(value: Any) -> Any:
    # YAML reads the bare word off as false.
    return "off" if value is False else value


NumSteps = Annotated[int, Field(ge=1, description="Number of consecutive steps that it must last.")]
AlarmAction = Annotated[Literal["off", "warn", "stop"], BeforeValidator(_read_off)]


class AlarmConfig(StrictConfig):
    """One alarm, and when it triggers."""

    action: AlarmAction = "warn"
    """``warn``: report it once when it triggers and once when it is over; ``stop``: report it,
    save, and end the run with exit code 1 (the same command resumes it); ``off``: do not look."""
    threshold: float
    num_steps: NumSteps = 5


class RewardConstantConfig(AlarmConfig):
    """Every trajectory of every step has the same reward: there is nothing to learn from. Does
    not trigger where that is the best reward so far and there were worse ones before."""

    threshold: float = Field(0.0, ge=0.0)
    """Rewards that differ by no more than this count as equal."""


class GroupsEqualConfig(AlarmConfig):
    """The trajectories of each group have the same score, so that their advantages are 0.
    Does not trigger where nearly all rewards are the best ones."""

    threshold: float = Field(0.9, gt=0.0, le=1.0)
    """Smallest share of a step's groups at which it triggers."""


class LogprobGapConfig(AlarmConfig):
    """What the engine sampled with and what the trainer computes drift apart
    (``logprob_gap_mean``)."""

    threshold: float = Field(0.1, gt=0.0)
    """Nats per token, beyond what ``model.dtype`` rounds (``probe_rounding_mean``)."""
    num_steps: NumSteps = 3


class EntropyCollapseConfig(AlarmConfig):
    """The policy hardly varies its answers any more, though they are not yet right."""

    threshold: float = Field(0.1, gt=0.0, lt=1.0)
    """Share of the entropy of the run's first steps."""


class TruncatedConfig(AlarmConfig):
    """Replies are cut off at their length limit."""

    threshold: float = Field(0.4, gt=0.0, lt=1.0)
    """Share of a step's trajectories with such a reply."""
    num_steps: NumSteps = 3


class KlFromReferenceConfig(AlarmConfig):
    """The policy runs away from the reference model; only where a KL term is trained with."""

    threshold: float = Field(1.0, gt=0.0)
    """Nats per token."""
    num_steps: NumSteps = 3


class KlOfUpdateConfig(AlarmConfig):
    """The updates of one step change the policy too much (``approx_kl``): where a step makes
    several updates, or with the loss ``ppo_clip``, for which the age of the tokens counts too."""

    threshold: float = Field(0.1, gt=0.0)
    """Nats per token."""
    num_steps: NumSteps = 3


class PrefixMismatchesConfig(AlarmConfig):
    """Turns that go back to an earlier one could not continue its tokens."""

    threshold: float = Field(0.1, gt=0.0, le=1.0)
    """Share of the turns that go back to an earlier one."""
    num_steps: NumSteps = 1


class NotFiniteConfig(StrictConfig):
    """A loss or a gradient is NaN or infinite."""

    action: Annotated[Literal["warn", "stop"], BeforeValidator(_read_off)] = "stop"
    """``stop``: end the run with exit code 1, its weights as they were; ``warn``: leave that
    optimizer update out and continue."""


class AlarmsConfig(StrictConfig):
    """What is watched while training, and what happens when it goes wrong."""

    reward_constant: RewardConstantConfig = RewardConstantConfig()
    groups_equal: GroupsEqualConfig = GroupsEqualConfig()
    logprob_gap: LogprobGapConfig = LogprobGapConfig()
    entropy_collapse: EntropyCollapseConfig = EntropyCollapseConfig()
    truncated: TruncatedConfig = TruncatedConfig()
    kl_from_reference: KlFromReferenceConfig = KlFromReferenceConfig()
    kl_of_update: KlOfUpdateConfig = KlOfUpdateConfig()
    prefix_mismatches: PrefixMismatchesConfig = PrefixMismatchesConfig()
    not_finite: NotFiniteConfig = NotFiniteConfig()


class TrainConfig(StrictConfig):
    """How the model is updated."""

    total_steps: ResumeSafe[int] = Field(200, ge=1)
    learning_rate: float = Field(1.0e-6, gt=0.0)
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig | None = Field(None, validate_default=True)
    """Where ``algorithm.advantage`` is ``gae``; null without it."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up: constant, or a decay to ``min_learning_rate``."""
    min_learning_rate: float = Field(0.0, ge=0.0)
    weight_decay: float = Field(0.0, ge=0.0)
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0)
    adam_epsilon: float = Field(1.0e-8, gt=0.0)
    max_grad_norm: float = Field(1.0, gt=0.0)
    """Gradients are scaled down to this global norm."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer updates per step: the batch's groups are divided among them."""
    num_epochs: int = Field(1, ge=1)
    """Passes over the batch of one step."""
    micro_batch_tokens: ResumeSafe[int] = Field(16384, ge=1)
    """Maximum number of tokens packed into one forward pass; a longer sample has one to itself."""
    packing: ResumeSafe[Literal["prefix_tree", "plain"]] = "prefix_tree"
    """``prefix_tree``: tokens that several samples of a forward pass begin with (a prompt, turns
    that branches share) are computed and counted once; ``plain``: once for every sample."""
    gradient_checkpointing: ResumeSafe[bool] = False
    """Trade compute for memory."""
    compile: ResumeSafe[Literal["layers"] | None] = None
    """``layers``: torch.compile for the model's layers. Faster updates, after half a minute of
    compiling in the first step; needs a C++ compiler. null: nothing is compiled."""
    num_processes: ResumeSafe[int | None] = Field(None, ge=1)
    """Processes that train together, the model in shards over them (FSDP2), each on a GPU of its
    own where the trainer has any; null: one for each GPU that engine servers leave, 1 on the CPU
    and with the embedded engine; under torchrun, as many as it starts."""
    num_threads: ResumeSafe[int | None] = Field(None, ge=1)
    """CPU threads of the trainer; null: all cores."""
    eval_every_steps: ResumeSafe[int | None] = Field(None, ge=1)
    """null: evaluate before the first step and after the last one only."""
    save_every_steps: ResumeSafe[int | None] = Field(None, ge=1)
    """null: save after the last step only."""
    keep_last_checkpoints: ResumeSafe[int] = Field(3, ge=1)
    """Older checkpoints are deleted, except the best one."""
    keep_best_checkpoint: ResumeSafe[
        Annotated[str, Field(pattern=r"^(mean_reward|pass_at_[1-9]\d*)$")] | None
    ] = "mean_reward"
    """Metric of the evaluations (``mean_reward``, ``pass_at_1``, ...) by which the best checkpoint
    is saved after its evaluation, and kept until another is better; null: none is."""
    trace: ResumeSafe[bool] = False
    """Write ``trace.json`` into the run folder: what trainer and trajectories do when, for Perfetto
    (ui.perfetto.dev). It ends at 64 MB; a start replaces that of an earlier one."""
    alarms: ResumeSafe[AlarmsConfig] = AlarmsConfig()
    probe_tolerance: ResumeSafe[float | None] = Field(None, gt=0.0)
    """Maximum |engine - trainer| logprob after a weight publication, in nats: the mean over likely
    tokens, weighted by probability. null: 5 times the trainer's own rounding (its pass in
    ``model.dtype`` against one in float32), at least 1e-3."""

    @field_validator("critic")
    @classmethod
    def _fits_algorithm(cls, critic: CriticConfig | None, info: ValidationInfo) -> Any:
        algorithm = info.data.get("algorithm")
        if not isinstance(algorithm, AlgorithmConfig):
            # What is wrong with it is said there.
            return critic
        if algorithm.uses_critic:
            critic = critic or CriticConfig()
            total_steps = info.data.get("total_steps")
            if total_steps is not None and critic.warmup_steps >= total_steps:
                raise ValueError(
                    f"warmup_steps is {critic.warmup_steps} and train.total_steps {total_steps}: "
                    "the critic would learn alone until the end. Type "
                    f"train.critic.warmup_steps={total_steps - 1}, or a smaller number"
                )
            return critic
        if critic is not None:
            raise ValueError(
                f"advantages of kind {algorithm.advantage.kind} need no critic. Type "
                "train.critic=null, or train.algorithm.kind=ppo to train with one"
            )
        return critic
