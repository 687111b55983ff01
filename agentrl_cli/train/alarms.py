"""Alarms of a run: which ring, when they are told, and which end the run.

Everything follows from the lines of ``metrics.jsonl``, so that a run which is started again rings
as one that never stopped. Each line says of every alarm whether it rings (``alarm_<name>``: 1 or
0); an alarm is told when that changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl_cli.config.alarms import AlarmConfig
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import AlarmError
from agentrl_cli.log import Observer, get_logger
from agentrl_cli.store.metrics_file import ALARM_PREFIX
from agentrl_cli.train.alarm_history import History
from agentrl_cli.train.alarm_messages import Seen
from agentrl_cli.train.alarm_table import ALARMS, Alarm

_log = get_logger(__name__)

#: An alarm is over after as many quiet steps as it took to ring, and at least these: one that
#: comes and goes is told once.
_MIN_QUIET_STEPS = 3

#: ``not_finite`` has no threshold: one update that was left out is one too many.
_ANY_SKIPPED = AlarmConfig(threshold=0.0, num_steps=1)


@dataclass(frozen=True, slots=True)
class AlarmState:
    """Where one alarm stands after some steps."""

    is_ringing: bool = False
    since: int = 0
    """The step at which it began to ring."""
    num_steps: int = 0
    """Steps in a row in which its condition held, until it rang."""
    num_trajectories: int = 0
    """Trajectories of those steps."""
    num_quiet_steps: int = 0
    """Steps in a row in which it did not, while it rings."""

    def advance(
        self, holds: bool | None, step: int, num_trajectories: int, alarm: Alarm, rule: AlarmConfig
    ) -> AlarmState:
        """The state after one more step; ``holds`` None: the step does not say."""
        # A run that it has ended goes on when the command is typed again: it begins anew.
        state = AlarmState() if self.is_ringing and rule.action == "stop" else self
        if holds is None:
            return state
        if state.is_ringing:
            num_quiet = 0 if holds else state.num_quiet_steps + 1
            is_over = num_quiet >= max(rule.num_steps, _MIN_QUIET_STEPS)
            return AlarmState() if is_over else replace(state, num_quiet_steps=num_quiet)
        if not holds:
            return AlarmState()
        num_steps = state.num_steps + 1
        num_trajectories += state.num_trajectories
        rings = num_steps >= rule.num_steps and num_trajectories >= alarm.min_trajectories
        return AlarmState(
            is_ringing=rings,
            since=step if rings else 0,
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
        self._rules = list_rules(config)
        self._history = History()
        self._states = {name: AlarmState() for name in self._rules}
        self._was_told = dict.fromkeys(self._rules, False)
        self._texts: list[str] = []
        for line in lines:
            self._advance(line)
            self._was_told = {name: line.get(ALARM_PREFIX + name) == 1.0 for name in self._rules}
        self._remind()

    def check(self, line: Mapping[str, float]) -> dict[str, float]:
        """Looks at a step's metrics; ``alarm_<name>`` of every alarm that is not off.

        :meth:`tell` says what began or is over.
        """
        since = {name: state.since for name, state in self._states.items()}
        self._advance(line)
        step = self._history.step
        for alarm in ALARMS:
            if alarm.name not in self._rules:
                continue
            state, was_told = self._states[alarm.name], self._was_told[alarm.name]
            if state.is_ringing and (not was_told or state.since == step):
                self._texts.append(self._describe(alarm, state))
            elif was_told and not state.is_ringing and self._rules[alarm.name].action == "warn":
                rang = f"; it rang from step {since[alarm.name]} on" if since[alarm.name] else ""
                self._texts.append(f"step {step}: the alarm {alarm.name} is over{rang}")
        self._was_told = {name: state.is_ringing for name, state in self._states.items()}
        return {ALARM_PREFIX + name: float(rings) for name, rings in self._was_told.items()}

    def tell(self) -> None:
        """Tells the observer what began, and what is over, with the last step."""
        for text in self._texts:
            _log.warning("%s", text)
            self._observer.on_message(text)
        self._texts = []

    def find_stop(self) -> AlarmError | None:
        """What ends the run after the last step that was checked; None: it goes on."""
        names = [
            name
            for name, state in self._states.items()
            if state.is_ringing and self._rules[name].action == "stop"
        ]
        if not names:
            return None
        listed = ("the alarm " if len(names) == 1 else "the alarms ") + " and ".join(names)
        keys = " ".join(f"train.alarms.{name}.action=warn" for name in names)
        return AlarmError(
            f"{self._run_dir}: ended after step {self._history.step} by {listed} (what was seen "
            "is said above), as train.alarms says. The step is saved: the same command goes on "
            f"from there, and ends again where it lasts as long once more. To go on whatever "
            f"rings, add {keys}"
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
            is_implied = implied is not None and implied.is_ringing
            holds = None if is_implied else alarm.holds(self._history, rule.threshold)
            self._states[alarm.name] = self._states[alarm.name].advance(
                holds, step, num_trajectories, alarm, rule
            )

    def _describe(self, alarm: Alarm, state: AlarmState) -> str:
        seen = Seen(
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
        """Says of a run that goes on what has rung before and still does."""
        ringing = [
            f"{name} (since step {self._states[name].since})"
            for name, rule in self._rules.items()
            if rule.action == "warn" and self._was_told[name] and self._states[name].is_ringing
        ]
        if ringing:
            self._texts.append(f"alarms that ring since before: {', '.join(ringing)}")
            self.tell()


def list_rules(config: ExperimentConfig) -> dict[str, AlarmConfig]:
    """The rule of every alarm that is looked at, by name: it is not off, and makes sense here."""
    chosen = config.train.alarms
    rules: dict[str, AlarmConfig] = {
        "reward_constant": chosen.reward_constant,
        "groups_equal": chosen.groups_equal,
        "logprob_gap": chosen.logprob_gap,
        "entropy_collapse": chosen.entropy_collapse,
        "truncated": chosen.truncated,
        "kl_from_reference": chosen.kl_from_reference,
        "kl_of_update": chosen.kl_of_update,
        "broken_turns": chosen.broken_turns,
        # With ``stop`` the learner itself stops, before the step has any metrics.
        "not_finite": _ANY_SKIPPED,
    }
    algorithm = config.train.algorithm
    if not algorithm.compares_within_groups:
        del rules["groups_equal"]
    if not algorithm.uses_reference:
        del rules["kl_from_reference"]
    return {name: rule for name, rule in rules.items() if rule.action != "off"}
