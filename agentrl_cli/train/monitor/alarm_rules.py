"""Alarms of a run: what each looks for, when it triggers and is reported, and which end the run.

Everything follows from the lines of ``metrics.jsonl``, so that a resumed run reports what one that
was never interrupted would. Each line says of every alarm whether it is active (``alarm_<name>``:
1 or 0); an alarm is reported when that changes. What is reported is in ``alarm_messages.py``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.train_config import AlarmConfig
from agentrl_cli.errors import AlarmError
from agentrl_cli.log import Observer, get_logger
from agentrl_cli.store.run_folder import ALARM_PREFIX
from agentrl_cli.train.monitor import alarm_messages as messages

_log = get_logger(__name__)

#: An alarm is over after as many quiet steps as it took to trigger, and at least these: one that
#: comes and goes is reported once.
_MIN_QUIET_STEPS = 3
#: Trajectories below which equal rewards or cut replies may be chance: a step of one small group
#: is no evidence, several of them together are.
_MIN_TRAJECTORIES = 32
#: Nats per token: a policy that begins with less decides nothing by chance in a thousand tokens,
#: and what is left to fall are digits of float32.
_MIN_FIRST_ENTROPY = 1e-3
#: Share of the way from the lowest mean reward to the best reward that counts as arrived.
_SOLVED_SHARE = 0.9
#: ``not_finite`` has no threshold: one update that was left out is one too many. With ``stop`` the
#: learner itself stops, before the step has any metrics.
_ANY_SKIPPED = AlarmConfig(threshold=0.0, num_steps=1)


class History:
    """The metrics of a run as alarms see them: the last two lines, and what is kept of the rest."""

    def __init__(self) -> None:
        self._current: Mapping[str, float] = {}
        self._previous: Mapping[str, float] = {}
        self._lowest_mean = math.inf
        self._first_entropies: list[float] = []
        self.best_reward = -math.inf
        """The highest reward that any trajectory had; -inf where none is known."""
        self.first_gap: float | None = None
        """``logprob_gap_mean`` of the first step that trained."""

    def add(self, line: Mapping[str, float]) -> None:
        """Adds the line of the next step."""
        self._previous, self._current = self._current, line
        self.best_reward = max(self.best_reward, self.read_or("reward_max", -math.inf))
        self._lowest_mean = min(self._lowest_mean, self.read_or("reward_mean", math.inf))
        entropy = self.read_trained("entropy")
        if entropy is not None and len(self._first_entropies) < messages.NUM_FIRST_STEPS:
            self._first_entropies.append(entropy)
        if self.first_gap is None:
            self.first_gap = self.read_trained("logprob_gap_mean")

    @property
    def step(self) -> int:
        """The last step."""
        return int(self.read_or("step", 0.0))

    def read(self, name: str) -> float | None:
        """A metric of the last step; None where it has none that is finite."""
        return _read_finite(self._current, name)

    def read_or(self, name: str, default: float) -> float:
        """The same, ``default`` for None."""
        value = self.read(name)
        return default if value is None else value

    def read_previous(self, name: str) -> float | None:
        """A metric of the step before the last."""
        return _read_finite(self._previous, name)

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
        if len(self._first_entropies) < messages.NUM_FIRST_STEPS:
            return None
        return statistics.median(self._first_entropies)

    @property
    def is_solved(self) -> bool:
        """True where the last step's rewards are nearly the best there were, and once were not.

        What then stands still has been learned; that is no failure.
        """
        mean = self.read("reward_mean")
        if mean is None or not self._lowest_mean < self.best_reward:
            return False
        return mean >= self._lowest_mean + _SOLVED_SHARE * (self.best_reward - self._lowest_mean)


def _read_finite(line: Mapping[str, float], name: str) -> float | None:
    # What is not finite is stored as null: both are nothing, so that a resumed run sees what one
    # that was never interrupted did.
    value = line.get(name)
    return value if value is not None and math.isfinite(value) else None


#: History and threshold -> whether the last step is one of those that the alarm is about; None: the
#: step does not say (nothing was scored, nothing was trained).
Condition = Callable[[History, float], bool | None]


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm."""

    name: str
    """As in ``train.alarms``."""
    holds: Condition
    describe: Callable[[messages.Seen], str]
    """What was seen, what it usually means, and what to type."""
    min_trajectories: int = 0
    """It must have lasted over at least so many, whatever the number of steps."""
    implied_by: str | None = None
    """While that alarm, which says the same and more, is active, this one is not looked at."""


def _is_reward_constant(history: History, threshold: float) -> bool | None:
    """All rewards of the step are the same, that of the step before if its were, and nothing can be
    learned from them (interactions may still have rewards of their own)."""
    low, high = history.read("reward_min"), history.read("reward_max")
    if low is None or high is None:
        return None
    # Sums of the same rewards in another order differ in the last digits.
    tolerance = threshold + 1e-9 * max(abs(low), abs(high))
    is_same = high - low <= tolerance
    before = (history.read_previous("reward_min"), history.read_previous("reward_max"))
    if before[0] is not None and before[1] is not None:
        was_same = before[1] - before[0] <= tolerance
        moved = max(high, before[1]) - min(low, before[0]) > tolerance
        is_same = is_same and not (was_same and moved)
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


def _do_prefixes_mismatch(history: History, threshold: float) -> bool | None:
    share = history.read("prefix_mismatch_fraction")
    return None if share is None else share >= threshold


def _is_above(name: str, *, of_trained: bool = False) -> Condition:
    """The metric ``name`` is above the threshold; ``of_trained``: it is a mean over trained
    tokens."""

    def holds(history: History, threshold: float) -> bool | None:
        value = history.read_trained(name) if of_trained else history.read(name)
        return None if value is None else value > threshold

    return holds


ALARMS: tuple[Alarm, ...] = (
    Alarm(
        "reward_constant", _is_reward_constant, messages.describe_reward_constant, _MIN_TRAJECTORIES
    ),
    Alarm(
        "groups_equal",
        _are_groups_equal,
        messages.describe_groups_equal,
        _MIN_TRAJECTORIES,
        implied_by="reward_constant",
    ),
    Alarm(
        "logprob_gap",
        _is_above("logprob_gap_mean", of_trained=True),
        messages.describe_logprob_gap,
    ),
    Alarm("entropy_collapse", _is_entropy_collapsed, messages.describe_entropy_collapse),
    Alarm(
        "truncated",
        _is_above("truncated_fraction"),
        messages.describe_truncated,
        _MIN_TRAJECTORIES,
    ),
    Alarm(
        "kl_from_reference", _is_above("kl", of_trained=True), messages.describe_kl_from_reference
    ),
    Alarm("kl_of_update", _is_above("approx_kl", of_trained=True), messages.describe_kl_of_update),
    Alarm("prefix_mismatches", _do_prefixes_mismatch, messages.describe_prefix_mismatches),
    Alarm("not_finite", _is_above("num_skipped_updates"), messages.describe_not_finite),
)


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
        self, holds: bool | None, step: int, num_trajectories: int, alarm: Alarm, rule: AlarmConfig
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
        num_trajectories += state.num_trajectories
        triggers = num_steps >= rule.num_steps and num_trajectories >= alarm.min_trajectories
        return AlarmState(
            is_active=triggers,
            since=step if triggers else 0,
            num_steps=num_steps,
            num_trajectories=num_trajectories,
        )


class Alarms:
    """The alarms of one run.

    Args:
        config: the experiment's.
        run_dir: the run folder, for commands that show it.
        observer: shows the run to a person.
        lines: the metrics of the steps so far.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        run_dir: Path,
        observer: Observer,
        lines: Iterable[Mapping[str, float]] = (),
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._observer = observer
        self._rules = _list_rules(config)
        self._history = History()
        self._states = {name: AlarmState() for name in self._rules}
        self._was_active = dict.fromkeys(self._rules, False)
        self._texts: list[str] = []
        for line in lines:
            self._advance(line)
            self._was_active = {name: line.get(ALARM_PREFIX + name) == 1.0 for name in self._rules}
        self._remind()

    def check(self, line: Mapping[str, float]) -> dict[str, float]:
        """Looks at a step's metrics; ``alarm_<name>`` of every alarm that is not off.

        :meth:`report` says which have triggered or are over.
        """
        since = {name: state.since for name, state in self._states.items()}
        self._advance(line)
        step = self._history.step
        for alarm in ALARMS:
            if alarm.name not in self._rules:
                continue
            state, was_active = self._states[alarm.name], self._was_active[alarm.name]
            if state.is_active and (not was_active or state.since == step):
                self._texts.append(self._describe(alarm, state))
            elif was_active and not state.is_active and self._rules[alarm.name].action == "warn":
                begun = f" (it triggered at step {since[alarm.name]})" if since[alarm.name] else ""
                self._texts.append(f"step {step}: alarm {alarm.name} is over{begun}")
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
            f"{self._run_dir}: ended after step {self._history.step} by {listed} (see above), as "
            "train.alarms says. The step is saved: the same command resumes after it, and ends "
            f"again if this lasts as long once more. To continue in spite of it, add {keys}"
        )

    def _advance(self, line: Mapping[str, float]) -> None:
        self._history.add(line)
        step = self._history.step
        num_trajectories = int(self._history.read_or("num_trajectories", 0.0))
        for alarm in ALARMS:
            rule = self._rules.get(alarm.name)
            if rule is None:
                continue
            implied = self._states.get(alarm.implied_by or "")
            is_implied = implied is not None and implied.is_active
            holds = None if is_implied else alarm.holds(self._history, rule.threshold)
            self._states[alarm.name] = self._states[alarm.name].advance(
                holds, step, num_trajectories, alarm, rule
            )

    def _describe(self, alarm: Alarm, state: AlarmState) -> str:
        seen = messages.Seen(
            history=self._history,
            num_steps=state.num_steps,
            num_trajectories=state.num_trajectories,
            config=self._config,
            run_dir=self._run_dir,
        )
        key = f"train.alarms.{alarm.name}.action"
        return (
            f"step {self._history.step}: alarm {alarm.name}: {alarm.describe(seen)}\n"
            "  (what changes the learning needs a new run: add trial_name=NAME, and "
            "model.path=CHECKPOINT to begin with what was learned"
            + (f"; {key}=off silences this)" if alarm.name != "not_finite" else ")")
        )

    def _remind(self) -> None:
        """Reports, of a resumed run, the alarms that were reported earlier and are still active."""
        active = [
            f"{name} (since step {self._states[name].since})"
            for name, rule in self._rules.items()
            if rule.action == "warn" and self._was_active[name] and self._states[name].is_active
        ]
        if active:
            self._texts.append(f"alarms still active: {', '.join(active)}")
            self.report()


def _list_rules(config: ExperimentConfig) -> dict[str, AlarmConfig]:
    """The rule of every alarm that is looked at, by name: it is not off, and makes sense here."""
    algorithm = config.train.algorithm
    rules = {name: rule for name, rule in config.train.alarms if isinstance(rule, AlarmConfig)}
    rules["not_finite"] = _ANY_SKIPPED
    if not algorithm.compares_within_groups:
        del rules["groups_equal"]
    if not algorithm.uses_reference:
        del rules["kl_from_reference"]
    return {name: rule for name, rule in rules.items() if rule.action != "off"}
