"""What alarms report: what was seen, what it usually means, and what to type."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.log import format_count
from agentrl_cli.prefix_mismatches import REMEDIES
from agentrl_cli.records import MismatchCause

if TYPE_CHECKING:
    from agentrl_cli.train.monitor.alarm_rules import History

#: Steps whose entropy is the level that later ones are compared with.
NUM_FIRST_STEPS = 5
#: The factor by which a suggested value differs from the present one.
_FACTOR = 2
#: Below this share of the total gap, that of engine and trainer on the same weights is not its
#: cause.
_SMALL_SHARE = 0.1
#: The first entropy bonus to try: its gradient is small beside that of advantages near 1.
_FIRST_ENTROPY_COEF = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What an alarm has triggered on."""

    history: History
    num_steps: int
    """Steps in a row that it has lasted."""
    num_trajectories: int
    """Trajectories of those steps."""
    config: ExperimentConfig
    run_dir: Path

    @property
    def lasted(self) -> str:
        """``the last 5 steps (640 trajectories)``."""
        steps = "the step" if self.num_steps == 1 else f"the last {self.num_steps} steps"
        return f"{steps} ({self.num_trajectories:,} trajectories)"

    def look(self, options: str = "") -> str:
        """The command that shows the step's trajectories."""
        run = shlex.quote(str(self.run_dir))
        return f"agentrl inspect-trajectories {run} --step {self.history.step}{options}"


def describe_reward_constant(seen: Seen) -> str:
    """All rewards were the same."""
    reward = seen.history.read_or("reward_mean", 0.0)
    if reward > 0.0:
        usually = (
            "every task is solved already, so that there is nothing to learn from them; or the "
            "reward function returns this whatever the agent does"
        )
    else:
        usually = (
            "the reward function does not recognize the answer (another format, another field of "
            "the row, an exception that it catches itself); or the tasks are so hard that no "
            "trajectory succeeds"
        )
    return _compose(
        f"every reward of {seen.lasted} was {reward:.6g}, so nothing was learned from them",
        usually=usually,
        look=seen.look(),
        suggestions=[
            "call the reward function by hand on a right and on a wrong answer",
            f"{'harder' if reward > 0.0 else 'easier'} tasks, or partial rewards for partial "
            "solutions",
        ],
    )


def describe_groups_equal(seen: Seen) -> str:
    """In most groups all rewards were the same."""
    history = seen.history
    num_groups, without = history.count_groups()
    num_unscored = history.read_or("num_unscored", 0.0)
    threshold = seen.config.train.alarms.groups_equal.threshold
    head = (
        f"{without} of {num_groups} groups of this step, and at least {threshold:.0%} in "
        f"each of {seen.lasted}, gave nothing to learn from: within them, all rewards were equal"
    )
    if num_unscored:
        num_trajectories = history.read_or("num_trajectories", 0.0)
        head += f" or missing ({num_unscored:.0f} of {num_trajectories:.0f} have no reward)"
    mean = history.read("reward_mean")
    return _compose(
        head,
        usually=(
            "each task is solved either by all of its trajectories or by none"
            + ("" if mean is None else f" (mean reward {mean:.3f})")
            + ". More trajectories per task find the rare successes"
        ),
        look=seen.look(" --sort reward"),
        suggestions=[
            f"gconfig.n_samples={_FACTOR * seen.config.gconfig.n_samples}",
            "tasks that are neither always nor never solved, or partial rewards for partial "
            "solutions",
        ],
    )


def describe_logprob_gap(seen: Seen) -> str:
    """Engine and trainer differ, by the age of the weights or by their numerics."""
    history, config = seen.history, seen.config
    gap = history.read_or("logprob_gap_mean", 0.0)
    probe_gap = history.read("probe_gap_mean")
    stale = history.read_or("off_policy_fraction", 0.0)
    head = (
        f"the logprobs that tokens were sampled with and those of the trainer are {gap:.3g} nats "
        f"apart on average, above {config.train.alarms.logprob_gap.threshold:.3g} for "
        f"{seen.lasted}"
    )
    if history.first_gap is not None:
        head += f"; at the run's first step it was {history.first_gap:.2g}"
    is_engine = probe_gap is None or probe_gap > _SMALL_SHARE * gap or stale == 0.0
    if is_engine:
        measured = "" if probe_gap is None else f", {probe_gap:.2g} nats apart after publication"
        usually = (
            "the engine computes differently from the trainer (a lower precision, a quantized "
            f"model or cache, another kernel){measured}; {stale:.0%} of the tokens were sampled by "
            "older weights"
        )
        suggestions = ["model.dtype=float32"] if config.model.dtype != "float32" else []
        suggestions.append("engine.server_args without quantization of weights or cache")
    else:
        usually = (
            f"the policy moves faster than its trajectories are made: {stale:.0%} of the tokens "
            f"were sampled by older weights, while engine and trainer agree on the same ones "
            f"({probe_gap:.2g} nats)"
        )
        suggestions = [f"train.learning_rate={config.train.learning_rate / _FACTOR:g}"]
        if config.rollout.max_staleness:
            suggestions.insert(0, f"rollout.max_staleness={config.rollout.max_staleness - 1}")
    return _compose(head, usually=usually, look=seen.look(), suggestions=suggestions)


def describe_entropy_collapse(seen: Seen) -> str:
    """The policy hardly varies its answers any more."""
    history = seen.history
    entropy, first = history.read_or("entropy", 0.0), history.first_entropy or 0.0
    mean = history.read("reward_mean")
    entropy_coef = _FACTOR * seen.config.train.algorithm.entropy_coef or _FIRST_ENTROPY_COEF
    suggestions = [
        f"train.algorithm.entropy_coef={entropy_coef:g}",
        f"train.learning_rate={seen.config.train.learning_rate / _FACTOR:g}",
    ]
    if seen.config.gconfig.temperature < 1.0:
        suggestions.insert(0, "gconfig.temperature=1.0")
    return _compose(
        f"the entropy fell to {entropy:.3g} nats per token, {entropy / first:.1%} of the "
        f"{first:.3g} of the run's first {NUM_FIRST_STEPS} steps, and has been that low for "
        f"{seen.lasted}"
        + ("" if mean is None else f", while the mean reward is {mean:.3f}")
        + (
            f" and the best was {history.best_reward:.3f}"
            if mean is not None and history.best_reward > mean
            else ""
        ),
        usually=(
            "the policy has settled on one way to answer before it was the best one; what it no "
            "longer tries cannot be rewarded"
        ),
        look=seen.look(),
        suggestions=suggestions,
    )


def describe_truncated(seen: Seen) -> str:
    """Replies are cut off."""
    history, gconfig = seen.history, seen.config.gconfig
    share = history.read_or("truncated_fraction", 0.0)
    longest = history.read_or("completion_tokens_mean", 0.0)
    return _compose(
        f"{share:.0%} of the trajectories of this step had a reply cut off at its length limit, "
        f"above {seen.config.train.alarms.truncated.threshold:.0%} for {seen.lasted} "
        f"(gconfig.max_tokens is {gconfig.max_tokens}, a trajectory has {longest:,.0f} sampled "
        "tokens on average)",
        usually=(
            "the limit is too low for these tasks (gconfig.max_tokens, a lower one that the agent "
            "itself asks for, or what the prompt leaves of engine.max_model_len); or the policy "
            "has learned to never stop, since a reply that was cut off is often scored as "
            "a wrong one"
        ),
        look=seen.look(" --sort tokens"),
        suggestions=[
            f"gconfig.max_tokens={_FACTOR * gconfig.max_tokens}",
            "a system prompt that asks for short answers",
        ],
    )


def describe_kl_from_reference(seen: Seen) -> str:
    """The policy has drifted away from the reference."""
    train = seen.config.train
    kl = train.algorithm.kl
    return _compose(
        f"the policy is {seen.history.read_or('kl', 0.0):.3g} nats per token away from the "
        f"reference model, above {train.alarms.kl_from_reference.threshold:.3g} for {seen.lasted}",
        usually=(
            "the KL term is too weak for this learning rate, or the policy has found rewards for "
            "text that is no longer language: read some"
        ),
        look=seen.look(" --sort reward"),
        suggestions=[
            *([] if kl is None else [f"train.algorithm.kl.coef={_FACTOR * kl.coef:g}"]),
            f"train.learning_rate={train.learning_rate / _FACTOR:g}",
        ],
    )


def describe_kl_of_update(seen: Seen) -> str:
    """The updates of a step move the policy too far."""
    train = seen.config.train
    # Its ratio is against the policy that sampled, and not against that before the step.
    counts_age = train.algorithm.loss.kind == "ppo_clip"
    suggestions = [f"train.learning_rate={train.learning_rate / _FACTOR:g}"]
    if train.num_epochs > 1:
        suggestions.append(f"train.num_epochs={train.num_epochs // _FACTOR}")
    if train.num_minibatches > 1:
        suggestions.append(f"train.num_minibatches={train.num_minibatches // _FACTOR}")
    if counts_age and seen.config.rollout.max_staleness:
        suggestions.append(f"rollout.max_staleness={seen.config.rollout.max_staleness - 1}")
    return _compose(
        f"{'from sampling on' if counts_age else 'within one step'} the policy moves "
        f"{seen.history.read_or('approx_kl', 0.0):.3g} nats per "
        f"token (approx_kl), above {train.alarms.kl_of_update.threshold:.3g} for {seen.lasted}; "
        f"{seen.history.read_or('clipfrac', 0.0):.0%} of the tokens were clipped",
        usually="a learning rate that is too high, or too many updates on the same trajectories"
        + ("; or tokens that older weights sampled" if counts_age else ""),
        look=seen.look(),
        suggestions=suggestions,
    )


def describe_prefix_mismatches(seen: Seen) -> str:
    """Prompts did not begin with the tokens of the turns that they continue; cause by cause."""
    history = seen.history
    counts = {cause: history.read_or(f"prefix_mismatches_{cause}", 0.0) for cause in MismatchCause}
    by_size = sorted((c for c in MismatchCause if counts[c]), key=lambda c: -counts[c])
    reprefilled = sum(
        history.read_or(f"reprefilled_tokens_{cause}", 0.0) for cause in MismatchCause
    )
    dropped = sum(history.read_or(f"dropped_tokens_{cause}", 0.0) for cause in MismatchCause)
    return _compose(
        f"{format_count(sum(counts.values()), 'turn')}, "
        f"{history.read_or('prefix_mismatch_fraction', 0.0):.0%} of those that go back to an "
        "earlier one, could not continue its tokens. Nothing wrong is trained, but "
        f"{reprefilled:,.0f} prompt tokens were prefilled again, and {dropped:,.0f} sampled tokens "
        "are no longer in the context of the turns after them",
        usually="; ".join(f"{cause.value} ({counts[cause]:.0f})" for cause in by_size),
        look=seen.look(" --mismatch any"),
        suggestions=[f"{cause.value}: {REMEDIES[cause]}" for cause in by_size],
    )


def describe_not_finite(seen: Seen) -> str:
    """Updates were left out."""
    history = seen.history
    return _compose(
        "optimizer updates left out in this step: "
        f"{history.read_or('num_skipped_updates', 0.0):.0f} (made: "
        f"{history.read_or('num_updates', 0.0):.0f}). Their loss or gradient was NaN or infinite; "
        "the trainer's log names the trajectories",
        usually="a learning rate that is too high, or numbers too large for the number type",
        look=seen.look(),
        suggestions=[
            f"train.learning_rate={seen.config.train.learning_rate / _FACTOR:g}",
            *(["model.dtype=float32"] if seen.config.model.dtype != "float32" else []),
        ],
    )


def _compose(head: str, *, usually: str, look: str, suggestions: list[str]) -> str:
    lines = [head, f"usually: {usually}", f"look: {look}", *(f"try: {one}" for one in suggestions)]
    return "\n  ".join(lines)
