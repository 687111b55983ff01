"""Alarms of a run: what each looks for, when it triggers, what it reports, and which end the run.

Everything follows from the lines of ``metrics.jsonl``, so that a resumed run reports what one that
was never interrupted would. Each line says of every alarm whether it is active (``alarm_<name>``:
1 or 0); an alarm is reported when that changes.
"""

from __future__ import annotations

import math
import operator
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.train_config import AlarmConfig
from agentrl_cli.errors import AlarmError
from agentrl_cli.log import Observer, format_count, get_logger
from agentrl_cli.prefix_mismatches import REMEDIES
from agentrl_cli.records import MismatchCause
from agentrl_cli.store.run_folder import ALARM_PREFIX

_log = get_logger(__name__)

#: An alarm is over after as many quiet steps as it took to trigger, and at least these: one that
#: comes and goes is reported once.
_MIN_QUIET_STEPS = 3
#: Trajectories below which equal rewards or cut replies may be chance: a step of one small group
#: is no evidence, several of them together are.
_MIN_TRAJECTORIES = 32
#: Steps whose entropy is the level that later ones are compared with.
_NUM_FIRST_STEPS = 5
#: Nats per token: a policy that begins with less decides nothing by chance in a thousand tokens,
#: and what is left to fall are digits of float32.
_MIN_FIRST_ENTROPY = 1e-3
#: Share of the way from the lowest mean reward to the best reward that counts as arrived.
_SOLVED_SHARE = 0.9
#: ``not_finite`` has no threshold: one update that was left out is one too many. With ``stop`` the
#: learner itself stops, before the step has any metrics.
_ANY_SKIPPED = AlarmConfig(threshold=0.0, num_steps=1)
#: Metrics that say nothing of a step that trained on no token.
_MEANS_OF_TRAINED = ("kl", "approx_kl")
#: The factor by which a suggested value differs from the present one.
_FACTOR = 2
#: Below this share of the total gap, that of engine and trainer on the same weights is not its
#: cause.
_SMALL_SHARE = 0.1
#: The first entropy bonus to try: its gradient is small beside that of advantages near 1.
_FIRST_ENTROPY_COEF = 0.001


class History:
    """The metrics of a run as alarms see them: the last two lines, and what is kept of the rest."""

    def __init__(self) -> None:
        self._current: Mapping[str, float] = {}
        self.previous: Mapping[str, float] = {}
        """The line of the step before the last."""
        self._lowest_mean = math.inf
        self._first_entropies: list[float] = []
        self.best_reward = -math.inf
        """The highest reward that any trajectory had; -inf where none is known."""
        self.first_gap: float | None = None
        """``logprob_gap_mean`` of the first step that trained."""

    def add(self, line: Mapping[str, float]) -> None:
        """Adds the line of the next step.

        What is not finite is stored as null: both are nothing, so that a resumed run sees what one
        that was never interrupted did.
        """
        self.previous = self._current
        self._current = {k: v for k, v in line.items() if v is not None and math.isfinite(v)}
        self.best_reward = max(self.best_reward, self.read_or("reward_max", -math.inf))
        self._lowest_mean = min(self._lowest_mean, self.read_or("reward_mean", math.inf))
        entropy = self.read_trained("entropy")
        if entropy is not None and len(self._first_entropies) < _NUM_FIRST_STEPS:
            self._first_entropies.append(entropy)
        if self.first_gap is None:
            self.first_gap = self.read_trained("logprob_gap_mean")

    @property
    def step(self) -> int:
        """The last step."""
        return int(self.read_or("step", 0.0))

    def read(self, name: str) -> float | None:
        """A metric of the last step; None where it has none that is finite."""
        return self._current.get(name)

    def read_or(self, name: str, default: float) -> float:
        """The same, ``default`` for None."""
        return self._current.get(name, default)

    def read_trained(self, name: str) -> float | None:
        """A mean over trained tokens; None where the step trained on none: it is 0 then."""
        return self.read(name) if self.read_or("train_tokens", 0.0) > 0 else None

    def count_groups(self) -> tuple[int, int]:
        """The groups that the last step learned from, and those of them without signal.

        Groups that were replaced are none of them: ``rollout.filter`` has done its work.
        """
        num_replaced = self.read_or("num_filtered_groups", 0.0)
        num_groups = self.read_or("num_groups", 0.0) - num_replaced
        without = self.read_or("num_groups_without_signal", 0.0) - num_replaced
        return int(num_groups), int(without)

    @property
    def share_without_signal(self) -> float | None:
        """The share of the last step's groups that gave nothing to learn from."""
        num_groups, without = self.count_groups()
        return without / num_groups if num_groups else None

    @property
    def first_entropy(self) -> float | None:
        """The level of the run's first steps, nats; None until there are enough of them."""
        has_enough = len(self._first_entropies) == _NUM_FIRST_STEPS
        return statistics.median(self._first_entropies) if has_enough else None

    @property
    def is_solved(self) -> bool:
        """True where the last step's rewards are nearly the best there were, and once were not.

        What then stands still has been learned; that is no failure.
        """
        mean = self.read("reward_mean")
        if mean is None or not self._lowest_mean < self.best_reward:
            return False
        return mean >= self._lowest_mean + _SOLVED_SHARE * (self.best_reward - self._lowest_mean)


#: History and threshold -> whether the last step is one of those that the alarm is about; None: the
#: step does not say (nothing was scored, nothing was trained).
Condition = Callable[[History, float], bool | None]


def _is_reward_constant(history: History, threshold: float) -> bool | None:
    """All rewards of the step are the same, that of the step before if its were, and nothing can be
    learned from them (interactions may still have rewards of their own)."""
    low, high = history.read("reward_min"), history.read("reward_max")
    if low is None or high is None:
        return None
    # Sums of the same rewards in another order differ in the last digits.
    tolerance = threshold + 1e-9 * max(abs(low), abs(high))
    is_same = high - low <= tolerance
    old_low, old_high = (history.previous.get(name) for name in ("reward_min", "reward_max"))
    if old_low is not None and old_high is not None and old_high - old_low <= tolerance:
        is_same = is_same and max(high, old_high) - min(low, old_low) <= tolerance
    return is_same and history.share_without_signal == 1.0 and not history.is_solved


def _are_groups_equal(history: History, threshold: float) -> bool | None:
    share = history.share_without_signal
    return None if share is None else share >= threshold and not history.is_solved


def _is_entropy_collapsed(history: History, threshold: float) -> bool | None:
    """The entropy is below this share of its first level, and the rewards are not the best yet."""
    entropy, first = history.read_trained("entropy"), history.first_entropy
    if entropy is None or first is None or first < _MIN_FIRST_ENTROPY:
        return None
    return entropy < threshold * first and not history.is_solved


def _passes(name: str, compare: Callable[[float, float], bool] = operator.gt) -> Condition:
    """The metric ``name`` is above the threshold."""

    def holds(history: History, threshold: float) -> bool | None:
        value = history.read_trained(name) if name in _MEANS_OF_TRAINED else history.read(name)
        return None if value is None else compare(value, threshold)

    return holds


def _is_gap_large(history: History, threshold: float) -> bool | None:
    """Engine and trainer differ by more than rounding and what is usual."""
    gap = history.read_trained("logprob_gap_mean")
    rounding = history.read_or("probe_rounding_mean", 0.0)
    return None if gap is None else gap > threshold + rounding


class Message(NamedTuple):
    """What an alarm reports."""

    seen: str
    usually: str
    suggestions: list[str]
    look: str = ""
    """Options of the command that shows the step's trajectories."""


#: History, configuration, and how long it has lasted -> what is reported.
Describe = Callable[[History, ExperimentConfig, str], Message]


def _describe_reward_constant(history: History, _config: ExperimentConfig, lasted: str) -> Message:
    reward = history.read_or("reward_mean", 0.0)
    if reward > 0.0:
        other_tasks = "harder"
        usually = (
            "every task is solved already, so that there is nothing to learn from them; or the "
            "reward function returns this whatever the agent does"
        )
    else:
        other_tasks = "easier"
        usually = (
            "the reward function does not recognize the answer (another format, another field of "
            "the row, an exception that it catches itself); or the tasks are so hard that no "
            "trajectory succeeds"
        )
    return Message(
        f"every reward of {lasted} was {reward:.6g}, so nothing was learned from them",
        usually,
        [
            "call the reward function by hand on a right and on a wrong answer",
            f"{other_tasks} tasks, or partial rewards for partial solutions",
        ],
    )


def _describe_groups_equal(history: History, config: ExperimentConfig, lasted: str) -> Message:
    num_groups, without = history.count_groups()
    seen = (
        f"{without} of {num_groups} groups of this step, and at least "
        f"{config.train.alarms.groups_equal.threshold:.0%} in each of {lasted}, gave nothing to "
        "learn from: within them, all rewards were equal"
    )
    num_unscored = history.read_or("num_unscored", 0.0)
    if num_unscored:
        num_trajectories = history.read_or("num_trajectories", 0.0)
        seen += f" or missing ({num_unscored:.0f} of {num_trajectories:.0f} have no reward)"
    mean = history.read("reward_mean")
    return Message(
        seen,
        "each task is solved either by all of its trajectories or by none"
        + ("" if mean is None else f" (mean reward {mean:.3f})")
        + ". More trajectories per task find the rare successes",
        [
            f"gconfig.n_samples={_FACTOR * config.gconfig.n_samples}",
            "tasks that are neither always nor never solved, or partial rewards for partial "
            "solutions",
        ],
        " --sort reward",
    )


def _describe_logprob_gap(history: History, config: ExperimentConfig, lasted: str) -> Message:
    """Engine and trainer differ, by the age of the weights or by their numerics."""
    gap = history.read_or("logprob_gap_mean", 0.0)
    probe_gap = history.read("probe_gap_mean")
    stale = history.read_or("off_policy_fraction", 0.0)
    seen = (
        f"the logprobs that tokens were sampled with and those of the trainer are {gap:.3g} nats "
        f"apart on average, above {config.train.alarms.logprob_gap.threshold:.3g}"
    )
    if rounding := history.read_or("probe_rounding_mean", 0.0):
        seen += f" and the {rounding:.2g} of {config.model.dtype}'s rounding"
    seen += f" for {lasted}"
    if history.first_gap is not None:
        seen += f"; at the run's first step it was {history.first_gap:.2g}"
    if probe_gap is None or probe_gap > _SMALL_SHARE * gap or stale == 0.0:
        measured = "" if probe_gap is None else f", {probe_gap:.2g} nats apart after publication"
        usually = (
            "the engine computes differently from the trainer (a lower precision, a quantized "
            f"model or cache, another kernel){measured}; {stale:.0%} of the tokens were sampled by "
            "older weights"
        )
        suggestions = _suggest_float32(config)
        suggestions.append("engine.server_args without quantization of weights or cache")
        algorithm = config.train.algorithm
        is_used = algorithm.rollout_correction is not None or algorithm.loss.kind == "ppo_clip"
        if is_used and algorithm.on_policy_logprobs == "proximal":
            suggestions.append("train.algorithm.on_policy_logprobs=rollout, to correct for it")
        return Message(seen, usually, suggestions)
    usually = (
        f"the policy moves faster than its trajectories are made: {stale:.0%} of the tokens "
        f"were sampled by older weights, while engine and trainer agree on the same ones "
        f"({probe_gap:.2g} nats)"
    )
    return Message(seen, usually, [*_suggest_less_staleness(config), _suggest_lower_rate(config)])


def _describe_entropy_collapse(history: History, config: ExperimentConfig, lasted: str) -> Message:
    entropy, first = history.read_or("entropy", 0.0), history.first_entropy or 0.0
    seen = (
        f"the entropy fell to {entropy:.3g} nats per token, {entropy / first:.1%} of the "
        f"{first:.3g} of the run's first {_NUM_FIRST_STEPS} steps, and has been that low for "
        f"{lasted}"
    )
    mean = history.read("reward_mean")
    if mean is not None:
        seen += f", while the mean reward is {mean:.3f}"
        if history.best_reward > mean:
            seen += f" and the best was {history.best_reward:.3f}"
    entropy_coef = _FACTOR * config.train.algorithm.entropy_coef or _FIRST_ENTROPY_COEF
    return Message(
        seen,
        "the policy has settled on one way to answer before it was the best one; what it no "
        "longer tries cannot be rewarded",
        [
            *(["gconfig.temperature=1.0"] if config.gconfig.temperature < 1.0 else []),
            f"train.algorithm.entropy_coef={entropy_coef:g}",
            _suggest_lower_rate(config),
        ],
    )


def _describe_truncated(history: History, config: ExperimentConfig, lasted: str) -> Message:
    max_tokens = config.gconfig.max_tokens
    return Message(
        f"{history.read_or('truncated_fraction', 0.0):.0%} of the trajectories of this step had a "
        "reply cut off at its length limit, above "
        f"{config.train.alarms.truncated.threshold:.0%} for {lasted} (gconfig.max_tokens is "
        f"{max_tokens}, a trajectory has {history.read_or('completion_tokens_mean', 0.0):,.0f} "
        "sampled tokens on average)",
        "the limit is too low for these tasks (gconfig.max_tokens, a lower one that the agent "
        "itself asks for, or what the prompt leaves of engine.max_model_len); or the policy "
        "has learned to never stop, since a reply that was cut off is often scored as a wrong one",
        [
            f"gconfig.max_tokens={_FACTOR * max_tokens}",
            "a system prompt that asks for short answers",
        ],
        " --sort tokens",
    )


def _describe_kl_from_reference(history: History, config: ExperimentConfig, lasted: str) -> Message:
    kl = config.train.algorithm.kl
    return Message(
        f"the policy is {history.read_or('kl', 0.0):.3g} nats per token away from the reference "
        f"model, above {config.train.alarms.kl_from_reference.threshold:.3g} for {lasted}",
        "the KL term is too weak for this learning rate, or the policy has found rewards for "
        "text that is no longer language: read some",
        [
            *([] if kl is None else [f"train.algorithm.kl.coef={_FACTOR * kl.coef:g}"]),
            _suggest_lower_rate(config),
        ],
        " --sort reward",
    )


def _describe_kl_of_update(history: History, config: ExperimentConfig, lasted: str) -> Message:
    train = config.train
    # Its ratio is against the policy that sampled, and not against that before the step.
    counts_age = train.algorithm.loss.kind == "ppo_clip"
    suggestions = [_suggest_lower_rate(config)]
    for name, count in (("epochs", train.num_epochs), ("minibatches", train.num_minibatches)):
        if count > 1:
            suggestions.append(f"train.num_{name}={count // _FACTOR}")
    if counts_age:
        suggestions += _suggest_less_staleness(config)
    return Message(
        f"{'from sampling on' if counts_age else 'within one step'} the policy moves "
        f"{history.read_or('approx_kl', 0.0):.3g} nats per token (approx_kl), above "
        f"{train.alarms.kl_of_update.threshold:.3g} for {lasted}; "
        f"{history.read_or('clipfrac', 0.0):.0%} of the tokens were clipped",
        "a learning rate that is too high, or too many updates on the same trajectories"
        + ("; or tokens that older weights sampled" if counts_age else ""),
        suggestions,
    )


def _describe_prefix_mismatches(
    history: History, _config: ExperimentConfig, _lasted: str
) -> Message:
    """Cause by cause, the most frequent first."""
    turns, reprefilled, dropped = (
        {cause: history.read_or(f"{name}_{cause}", 0.0) for cause in MismatchCause}
        for name in ("prefix_mismatches", "reprefilled_tokens", "dropped_tokens")
    )
    by_size = sorted((c for c in MismatchCause if turns[c]), key=lambda c: -turns[c])
    return Message(
        f"{format_count(sum(turns.values()), 'turn')}, "
        f"{history.read_or('prefix_mismatch_fraction', 0.0):.0%} of those that go back to an "
        "earlier one, could not continue its tokens. Nothing wrong is trained, but "
        f"{sum(reprefilled.values()):,.0f} prompt tokens were prefilled again, and "
        f"{sum(dropped.values()):,.0f} sampled tokens are no longer in the context of the turns "
        "after them",
        "; ".join(f"{cause.value} ({turns[cause]:.0f})" for cause in by_size),
        [f"{cause.value}: {REMEDIES[cause]}" for cause in by_size],
        " --mismatch any",
    )


def _describe_not_finite(history: History, config: ExperimentConfig, _lasted: str) -> Message:
    return Message(
        "optimizer updates left out in this step: "
        f"{history.read_or('num_skipped_updates', 0.0):.0f} (made: "
        f"{history.read_or('num_updates', 0.0):.0f}). Their loss or gradient was NaN or infinite; "
        "the trainer's log names the trajectories",
        "a learning rate that is too high, or numbers too large for the number type",
        [_suggest_lower_rate(config), *_suggest_float32(config)],
    )


def _suggest_lower_rate(config: ExperimentConfig) -> str:
    return f"train.learning_rate={config.train.learning_rate / _FACTOR:g}"


def _suggest_float32(config: ExperimentConfig) -> list[str]:
    return ["model.dtype=float32"] if config.model.dtype != "float32" else []


def _suggest_less_staleness(config: ExperimentConfig) -> list[str]:
    staleness = config.rollout.max_staleness
    if not staleness:
        return []
    if config.rollout.max_trajectory_age > staleness:
        return [f"rollout.max_trajectory_age={staleness}"]
    return [f"rollout.max_staleness={staleness - 1} rollout.max_trajectory_age={staleness - 1}"]


class Alarm(NamedTuple):
    """One alarm."""

    holds: Condition
    describe: Describe
    min_trajectories: int = 0
    """It must have lasted over at least so many, whatever the number of steps."""
    implied_by: str | None = None
    """While that alarm, which says the same and more, is active, this one is not looked at."""


#: By name in ``train.alarms``; an alarm stands after the one that implies it.
ALARMS: dict[str, Alarm] = {
    "reward_constant": Alarm(_is_reward_constant, _describe_reward_constant, _MIN_TRAJECTORIES),
    "groups_equal": Alarm(
        _are_groups_equal, _describe_groups_equal, _MIN_TRAJECTORIES, "reward_constant"
    ),
    "logprob_gap": Alarm(_is_gap_large, _describe_logprob_gap),
    "entropy_collapse": Alarm(_is_entropy_collapsed, _describe_entropy_collapse),
    "truncated": Alarm(_passes("truncated_fraction"), _describe_truncated, _MIN_TRAJECTORIES),
    "kl_from_reference": Alarm(_passes("kl"), _describe_kl_from_reference),
    "kl_of_update": Alarm(_passes("approx_kl"), _describe_kl_of_update),
    "prefix_mismatches": Alarm(
        _passes("prefix_mismatch_fraction", operator.ge), _describe_prefix_mismatches
    ),
    "not_finite": Alarm(_passes("num_skipped_updates"), _describe_not_finite),
}


@dataclass(frozen=True, slots=True)
class AlarmState:
    """Where one alarm stands after some steps."""

    is_active: bool = False
    since: int = 0
    """The step at which it triggered."""
    num_steps: int = 0
    """Steps in a row in which its condition held, until it triggered."""
    num_trajectories: int = 0
    """Trajectories of those steps."""
    num_quiet_steps: int = 0
    """Steps in a row in which it did not, while it is active."""

    def advance(
        self, holds: bool | None, history: History, min_trajectories: int, rule: AlarmConfig
    ) -> AlarmState:
        """The state after one more step; ``holds`` None: the step does not say."""
        # A run that it has ended is resumed when the command is typed again: it starts over.
        state = AlarmState() if self.is_active and rule.action == "stop" else self
        if holds is None:
            return state
        if state.is_active:
            num_quiet = 0 if holds else state.num_quiet_steps + 1
            is_over = num_quiet >= max(rule.num_steps, _MIN_QUIET_STEPS)
            return AlarmState() if is_over else replace(state, num_quiet_steps=num_quiet)
        if not holds:
            return AlarmState()
        num_steps = state.num_steps + 1
        num_trajectories = state.num_trajectories + int(history.read_or("num_trajectories", 0.0))
        triggers = num_steps >= rule.num_steps and num_trajectories >= min_trajectories
        return AlarmState(triggers, history.step if triggers else 0, num_steps, num_trajectories)


class Alarms:
    """The alarms of one run.

    Args:
        config: the experiment's.
        location: of the run folder, for commands that show it.
        observer: shows the run to a person.
        lines: the metrics of the steps so far.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        location: str,
        observer: Observer,
        lines: Iterable[Mapping[str, float]] = (),
    ) -> None:
        self._config = config
        self._location = location
        self._observer = observer
        self._rules = _list_rules(config)
        self._history = History()
        self._states = dict.fromkeys(self._rules, AlarmState())
        self._was_active = dict.fromkeys(self._rules, False)
        self._texts: list[str] = []
        for line in lines:
            self._advance(line)
            self._was_active = {name: line.get(ALARM_PREFIX + name) == 1.0 for name in self._rules}
        active = [
            f"{name} (since step {self._states[name].since})"
            for name, rule in self._rules.items()
            if rule.action == "warn" and self._was_active[name] and self._states[name].is_active
        ]
        if active:
            self._texts.append(f"alarms still active: {', '.join(active)}")
            self.report()

    def check(self, line: Mapping[str, float]) -> dict[str, float]:
        """Looks at a step's metrics; ``alarm_<name>`` of every alarm that is not off.

        :meth:`report` says which have triggered or are over.
        """
        before = dict(self._states)
        self._advance(line)
        step = self._history.step
        for name, state in self._states.items():
            was_active, since = self._was_active[name], before[name].since
            if state.is_active and (not was_active or state.since == step):
                self._texts.append(self._describe(name, state))
            elif was_active and not state.is_active and self._rules[name].action == "warn":
                begun = f" (it triggered at step {since})" if since else ""
                self._texts.append(f"step {step}: alarm {name} is over{begun}")
        self._was_active = {name: state.is_active for name, state in self._states.items()}
        return {ALARM_PREFIX + name: float(active) for name, active in self._was_active.items()}

    def report(self) -> None:
        """Reports to the observer which alarms have triggered, or are over, with the last step."""
        for text in self._texts:
            _log.warning("%s", text)
            self._observer.on_message(text)
        self._texts = []

    def find_stop(self) -> AlarmError | None:
        """What ends the run after the last step that was checked; None: it continues."""
        names = [
            name
            for name, state in self._states.items()
            if state.is_active and self._rules[name].action == "stop"
        ]
        if not names:
            return None
        keys = " ".join(f"train.alarms.{name}.action=warn" for name in names)
        listed = f"{'the alarm' if len(names) == 1 else 'the alarms'} {' and '.join(names)}"
        return AlarmError(
            f"{self._location}: ended after step {self._history.step} by {listed} (see above), as "
            "train.alarms says. The step is saved: the same command resumes after it, and ends "
            f"again if this lasts as long once more. To continue in spite of it, add {keys}"
        )

    def _advance(self, line: Mapping[str, float]) -> None:
        history = self._history
        history.add(line)
        for name, rule in self._rules.items():
            alarm = ALARMS[name]
            implied = self._states.get(alarm.implied_by or "")
            is_implied = implied is not None and implied.is_active
            holds = None if is_implied else alarm.holds(history, rule.threshold)
            state = self._states[name]
            self._states[name] = state.advance(holds, history, alarm.min_trajectories, rule)

    def _describe(self, name: str, state: AlarmState) -> str:
        steps = "the step" if state.num_steps == 1 else f"the last {state.num_steps} steps"
        lasted = f"{steps} ({state.num_trajectories:,} trajectories)"
        message = ALARMS[name].describe(self._history, self._config, lasted)
        run, step = shlex.quote(self._location), self._history.step
        silence = f"; train.alarms.{name}.action=off silences this" if name != "not_finite" else ""
        lines = [
            f"step {step}: alarm {name}: {message.seen}",
            f"usually: {message.usually}",
            f"look: agentrl inspect-trajectories {run} --step {step}{message.look}",
            *(f"try: {suggestion}" for suggestion in message.suggestions),
            "(what changes the learning needs a new run: add trial_name=NAME, and "
            f"model.path=CHECKPOINT to begin with what was learned{silence})",
        ]
        return "\n  ".join(lines)


def _list_rules(config: ExperimentConfig) -> dict[str, AlarmConfig]:
    """The rule of every alarm that is looked at, by name: it is not off, and makes sense here."""
    algorithm = config.train.algorithm
    rules = dict(config.train.alarms) | {"not_finite": _ANY_SKIPPED}
    if not algorithm.compares_within_groups:
        del rules["groups_equal"]
    if not algorithm.uses_reference:
        del rules["kl_from_reference"]
    return {name: rules[name] for name in ALARMS if name in rules and rules[name].action != "off"}
