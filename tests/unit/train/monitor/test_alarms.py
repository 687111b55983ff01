"""When alarms trigger, by histories made around each threshold, and what they report."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_cli.config.config_file import load_config
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.train_config import AlarmsConfig
from agentrl_cli.errors import ConfigError
from agentrl_cli.log import SilentObserver
from agentrl_cli.store.run_folder import ALARM_PREFIX as PREFIX
from agentrl_cli.train.monitor.alarms import ALARMS, Alarms

Line = dict[str, float]

#: A step of an ordinary run in which nothing is wrong.
HEALTHY: Line = {
    "num_trajectories": 64.0,
    "num_unscored": 0.0,
    "num_groups": 8.0,
    "num_groups_without_signal": 2.0,
    "reward_mean": 0.5,
    "reward_min": 0.0,
    "reward_max": 1.0,
    "truncated_fraction": 0.1,
    "train_tokens": 1000.0,
    "entropy": 1.0,
    "logprob_gap_mean": 0.01,
    "probe_gap_mean": 1e-6,
    "off_policy_fraction": 0.5,
    "kl": 0.1,
    "approx_kl": 0.01,
    "prefix_mismatch_fraction": 0.0,
    "completion_tokens_mean": 80.0,
    "num_updates": 3.0,
    "clipfrac": 0.4,
}
#: Rewards that are all one number.
CONSTANT = {
    "reward_mean": 0.0,
    "reward_min": 0.0,
    "reward_max": 0.0,
    "num_groups_without_signal": 8.0,
}
SOLVED = CONSTANT | {"reward_mean": 1.0, "reward_min": 1.0, "reward_max": 1.0}


class Listener(SilentObserver):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_message(self, text: str) -> None:
        self.messages.append(text)


def build_config(alarms: Any = None, **changes: Any) -> ExperimentConfig:
    train: dict[str, Any] = {"alarms": alarms or {}, "algorithm": {"kl": {"coef": 0.1}}}
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "e",
            "model": {"path": "m"},
            "agent_builder_path": "a.b",
            "train_dataset": {"path": "d"},
            "train": train,
            **changes,
        }
    )


class Run:
    """Steps that alarms look at, one after the other, as the training loop makes them."""

    def __init__(
        self,
        config: ExperimentConfig | None = None,
        lines: Sequence[Line] = (),
        location: str = "runs/e/t",
    ) -> None:
        self.config = config or build_config()
        self.listener = Listener()
        self.lines = list(lines)
        self.alarms = Alarms(self.config, location, self.listener, self.lines)

    def step(self, *changes: Line) -> set[str]:
        """One more step; the names of the active alarms."""
        line = {"step": float(len(self.lines) + 1), **HEALTHY}
        for change in changes:
            line |= change
        line |= self.alarms.check(line)
        self.lines.append(line)
        self.alarms.report()
        return {k.removeprefix(PREFIX) for k, v in line.items() if k.startswith(PREFIX) and v}

    def steps(self, number: int, *changes: Line) -> list[set[str]]:
        return [self.step(*changes) for _ in range(number)]

    def messages_about(self, name: str) -> list[str]:
        return [text for text in self.listener.messages if f"alarm {name}" in text]

    def resume(self, config: ExperimentConfig | None = None) -> Run:
        """The run started again, from what its file holds."""
        stored = [
            {
                k: v if math.isfinite(v) else math.nan
                for k, v in json.loads(json.dumps(line)).items()
            }
            for line in self.lines
        ]
        return Run(config or self.config, stored)


def test_a_healthy_run_says_nothing() -> None:
    run = Run()
    assert run.steps(50) == [set()] * 50
    assert run.listener.messages == []
    assert {k for k in run.lines[-1] if k.startswith(PREFIX)} == {
        PREFIX + name
        for name in (
            *("reward_constant", "groups_equal", "logprob_gap", "entropy_collapse", "truncated"),
            *("kl_from_reference", "kl_of_update", "prefix_mismatches", "not_finite"),
        )
    }


@pytest.mark.parametrize(
    ("name", "quiet", "triggering", "num_steps"),
    [
        (
            "reward_constant",
            CONSTANT | {"reward_max": 1e-3, "num_groups_without_signal": 7.0},
            CONSTANT,
            5,
        ),
        # Interactions with rewards of their own give a signal where those of the whole do not.
        ("reward_constant", CONSTANT | {"num_groups_without_signal": 7.0}, CONSTANT, 5),
        ("groups_equal", {"num_groups_without_signal": 7.0}, {"num_groups_without_signal": 8.0}, 5),
        ("logprob_gap", {"logprob_gap_mean": 0.1}, {"logprob_gap_mean": 0.101}, 3),
        (
            "logprob_gap",
            {"logprob_gap_mean": 0.15, "probe_rounding_mean": 0.06},
            {"logprob_gap_mean": 0.15, "probe_rounding_mean": 0.04},
            3,
        ),
        ("truncated", {"truncated_fraction": 0.4}, {"truncated_fraction": 0.41}, 3),
        ("kl_from_reference", {"kl": 1.0}, {"kl": 1.01}, 3),
        ("kl_of_update", {"approx_kl": 0.1}, {"approx_kl": 0.11}, 3),
        (
            "prefix_mismatches",
            {"prefix_mismatch_fraction": 0.099},
            {"prefix_mismatch_fraction": 0.1},
            1,
        ),
        ("not_finite", {"num_skipped_updates": 0.0}, {"num_skipped_updates": 1.0}, 1),
    ],
)
def test_it_triggers_past_its_threshold_for_so_many_steps_and_is_over_later(
    name: str, quiet: Line, triggering: Line, num_steps: int
) -> None:
    run = Run()
    assert not any(name in seen for seen in run.steps(20, quiet))
    assert not any(name in seen for seen in run.steps(num_steps - 1, triggering))
    # One good step, and it starts to count again.
    assert name not in run.step(quiet)
    assert not any(name in seen for seen in run.steps(num_steps - 1, triggering))
    assert name in run.step(triggering)
    assert all(name in seen for seen in run.steps(10, triggering))
    assert len(run.messages_about(name)) == 1
    num_quiet = max(num_steps, 3)
    assert all(name in seen for seen in run.steps(num_quiet - 1, quiet))
    assert name in run.step(triggering), "it came back before it was over"
    assert all(name in seen for seen in run.steps(num_quiet - 1, quiet))
    assert name not in run.step(quiet)
    began, ended = run.messages_about(name)
    since = 20 + num_steps - 1 + 1 + num_steps
    assert began.startswith(f"step {since}: alarm {name}: ")
    assert ended == f"step {len(run.lines)}: alarm {name} is over (it triggered at step {since})"


def test_entropy_is_compared_with_the_first_steps() -> None:
    run = Run()
    for entropy in (1.9, 2.1, 2.0, 50.0, 1.0):
        run.step({"entropy": entropy})
    # Their median is 2.0.
    assert not any(run.steps(10, {"entropy": 0.2}))
    assert not any(run.steps(4, {"entropy": 0.19}))
    assert run.step({"entropy": 0.19}) == {"entropy_collapse"}
    [text] = run.listener.messages
    assert "fell to 0.19 nats per token, 9.5% of the 2 of the run's first 5 steps" in text
    assert "mean reward is 0.500 and the best was 1.000" in text


@pytest.mark.parametrize(
    ("first", "later", "found"),
    [
        (0.01, 0.01, set()),
        # What is left to lose are the last digits of numbers.
        (0.0, 0.0, set()),
        (9e-4, 0.0, set()),
        (1e-3, 9e-5, {"entropy_collapse"}),
    ],
)
def test_a_model_that_begins_certain_is_no_collapse(
    first: float, later: float, found: set[str]
) -> None:
    run = Run()
    assert not any(run.steps(5, {"entropy": first}))
    assert run.steps(30, {"entropy": later})[-1] == found


def test_a_run_that_has_learned_everything_is_no_failure() -> None:
    run = Run()
    for mean in (0.1, 0.3, 0.5, 0.7, 0.9):
        assert run.step({"reward_mean": mean}) == set()
    assert not any(run.steps(20, SOLVED, {"entropy": 0.001}))
    nearly = {"reward_mean": 0.95, "num_groups_without_signal": 8.0, "entropy": 0.001}
    assert not any(run.steps(20, nearly))
    assert run.listener.messages == []
    # What was learned is lost again: that is one.
    assert "reward_constant" in run.steps(6, CONSTANT)[-1]


def test_the_best_reward_from_the_first_step_on_is_worth_a_word() -> None:
    run = Run()
    assert run.steps(5, SOLVED)[-1] == {"reward_constant"}
    [text] = run.listener.messages
    assert "every reward of the last 5 steps (320 trajectories) was 1, so nothing" in text
    assert "every task is solved already" in text
    assert "harder tasks" in text


def test_constant_rewards_trigger_one_alarm_until_they_differ() -> None:
    run = Run()
    assert run.steps(20, CONSTANT)[-1] == {"reward_constant"}
    assert len(run.listener.messages) == 1
    # Groups of equal rewards, but not of one reward: what is left when the first is over.
    active = run.steps(8, {"num_groups_without_signal": 8.0})
    assert active[-1] == {"groups_equal"}
    off = Run(build_config({"reward_constant": {"action": "off"}}))
    assert off.steps(20, CONSTANT)[-1] == {"groups_equal"}


def test_equal_rewards_must_be_equal_over_steps_too() -> None:
    run = Run()
    for step in range(20):
        reward = float(step % 2)
        line = CONSTANT | {"reward_mean": reward, "reward_min": reward, "reward_max": reward}
        assert "reward_constant" not in run.step(line)
    noisy = Run()
    for _ in range(4):
        noisy.step(CONSTANT | {"reward_min": 0.3, "reward_max": 0.1 + 0.2})
    assert noisy.step(CONSTANT | {"reward_min": 0.3, "reward_max": 0.1 + 0.2}) == {
        "reward_constant"
    }


def test_small_steps_must_last_until_there_is_evidence() -> None:
    small = CONSTANT | {
        "num_trajectories": 4.0,
        "num_groups": 1.0,
        "num_groups_without_signal": 1.0,
        "truncated_fraction": 0.75,
    }
    run = Run()
    assert not any(run.steps(7, small))
    assert run.step(small) == {"reward_constant", "truncated"}
    assert "the last 8 steps (32 trajectories)" in run.listener.messages[0]


@pytest.mark.parametrize(
    "changes",
    [
        # Nothing was trained: means over nothing are 0 and say nothing.
        {"train_tokens": 0.0, "entropy": 0.0, "logprob_gap_mean": 9.0, "kl": 9.0, "approx_kl": 9.0},
        {"logprob_gap_mean": math.nan, "kl": math.inf, "approx_kl": math.nan, "entropy": math.nan},
    ],
)
def test_steps_that_do_not_say_count_for_nothing(changes: Line) -> None:
    run = Run()
    bad = {"logprob_gap_mean": 1.0, "kl": 5.0, "approx_kl": 1.0}
    run.steps(5)
    run.steps(2, bad)
    assert not any(run.steps(30, changes))
    # They neither ended the series nor were they part of it.
    assert run.step(bad) == {"logprob_gap", "kl_from_reference", "kl_of_update"}
    assert all(run.steps(30, changes))


def test_lines_without_any_metrics_are_no_alarm() -> None:
    """Of an older version, or of an update that learned from nothing."""
    run = Run()
    for step in range(1, 40):
        assert not any(run.alarms.check({"step": float(step)}).values())
    assert run.alarms.find_stop() is None


def test_groups_that_were_replaced_are_not_those_that_were_learned_from() -> None:
    run = Run()
    replaced = {"num_groups": 80.0, "num_filtered_groups": 72.0, "num_groups_without_signal": 74.0}
    assert not any(run.steps(20, replaced))
    none_found = replaced | {"num_groups_without_signal": 80.0}
    assert run.steps(5, none_found)[-1] == {"groups_equal"}
    assert "8 of 8 groups" in run.listener.messages[0]


def test_unscored_trajectories_trigger_too() -> None:
    line = {
        "num_unscored": 64.0,
        "num_groups_without_signal": 8.0,
        "reward_mean": math.nan,
        "reward_min": math.nan,
        "reward_max": math.nan,
    }
    run = Run()
    assert run.steps(5, line)[-1] == {"groups_equal"}
    [text] = run.listener.messages
    assert "(64 of 64 have no reward)" in text


@pytest.mark.parametrize(
    ("algorithm", "name", "line"),
    [
        ({"kind": "ppo"}, "groups_equal", {"num_groups_without_signal": 8.0}),
        (
            {"advantage": {"kind": "reinforce_plus_plus", "baseline": "batch"}},
            "groups_equal",
            {"num_groups_without_signal": 8.0},
        ),
        ({"kind": "grpo"}, "kl_from_reference", {"kl": 9.0}),
    ],
)
def test_what_makes_no_sense_for_an_algorithm_is_not_looked_at(
    algorithm: Any, name: str, line: Line
) -> None:
    run = Run(build_config(train={"algorithm": algorithm}))
    assert not any(run.steps(30, line))
    assert PREFIX + name not in run.lines[-1]


def test_off_is_not_looked_at_and_yaml_reads_it_as_false() -> None:
    run = Run(build_config({"truncated": {"action": False}}))
    assert run.config.train.alarms.truncated.action == "off"
    assert not any(run.steps(30, {"truncated_fraction": 1.0}))
    assert PREFIX + "truncated" not in run.lines[-1]


def test_what_is_not_finite_is_never_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "experiment_name: e\nmodel: {path: m}\nagent_builder_path: a.b\n"
        "train_dataset: {path: d}\ntrain: {alarms: {not_finite: {action: off}}}\n"
    )
    with pytest.raises(ConfigError, match="'off' is not one of the choices; allowed: stop, warn"):
        load_config(path)


def test_stop_ends_the_run_and_again_where_it_lasts() -> None:
    config = build_config({"truncated": {"action": "stop"}})
    cut = {"truncated_fraction": 0.9}
    run = Run(config)
    run.steps(2, cut)
    assert run.alarms.find_stop() is None
    run.step(cut)
    error = run.alarms.find_stop()
    both = Run(build_config({n: {"action": "stop"} for n in ("truncated", "logprob_gap")}))
    both.steps(3, {**cut, "logprob_gap_mean": 1.0})
    assert "by the alarms logprob_gap and truncated" in str(both.alarms.find_stop())
    assert error is not None
    assert error.exit_code == 1
    assert "runs/e/t: ended after step 3 by the alarm truncated" in str(error)
    assert "add train.alarms.truncated.action=warn" in str(error)
    again = run.resume()
    assert again.steps(2, cut) == [set(), set()]
    assert again.alarms.find_stop() is None
    assert again.listener.messages == []
    assert again.step(cut) == {"truncated"}
    assert again.alarms.find_stop() is not None
    assert len(again.listener.messages) == 1
    # Or a person has thought better of it.
    regardless = run.resume(build_config())
    assert regardless.listener.messages == ["alarms still active: truncated (since step 3)"]
    assert regardless.step(cut) == {"truncated"}
    assert regardless.alarms.find_stop() is None
    regardless.steps(3)
    assert regardless.listener.messages[1:] == [
        "step 7: alarm truncated is over (it triggered at step 3)"
    ]


_CHANGES: list[Callable[[], Line]] = [
    dict,
    lambda: CONSTANT,
    lambda: SOLVED,
    lambda: {"truncated_fraction": 0.9},
    lambda: {"logprob_gap_mean": 1.0, "approx_kl": 2.0, "kl": math.inf},
    lambda: {"entropy": 0.001},
    lambda: {"train_tokens": 0.0},
    lambda: {"prefix_mismatch_fraction": 0.5, "num_groups_without_signal": 8.0},
]


@given(
    choices=st.lists(st.sampled_from(range(len(_CHANGES))), min_size=2, max_size=60),
    cut=st.integers(0, 59),
    actions=st.lists(st.sampled_from(["warn", "stop"]), min_size=2, max_size=2),
)
def test_a_resumed_run_reports_what_one_that_never_stopped_does(
    choices: list[int], cut: int, actions: list[str]
) -> None:
    names = ("truncated", "reward_constant")
    config = build_config({n: {"action": a} for n, a in zip(names, actions, strict=True)})
    whole = Run(config)
    for choice in choices:
        whole.step(_CHANGES[choice]())
    first = Run(config)
    for choice in choices[:cut]:
        first.step(_CHANGES[choice]())
    second = first.resume()
    for choice in choices[cut:]:
        second.step(_CHANGES[choice]())
    active = [
        [{k: v for k, v in line.items() if k.startswith(PREFIX)} for line in run.lines]
        for run in (whole, second)
    ]
    assert active[0] == active[1]
    reported = [text for text in second.listener.messages if "still active" not in text]
    assert first.listener.messages + reported == whole.listener.messages


def test_a_changed_threshold_is_reported_when_a_run_resumes() -> None:
    run = Run()
    run.steps(10, {"truncated_fraction": 0.3})
    stricter = run.resume(build_config({"truncated": {"threshold": 0.2}}))
    assert stricter.step({"truncated_fraction": 0.3}) == {"truncated"}
    assert len(stricter.messages_about("truncated")) == 1
    looser = stricter.resume()
    looser.step({"truncated_fraction": 0.3})
    assert looser.step({"truncated_fraction": 0.3}) == {"truncated"}
    over = stricter.resume(build_config({"truncated": {"threshold": 0.5}}))
    assert over.step({"truncated_fraction": 0.3}) == set()
    assert over.listener.messages == ["step 12: alarm truncated is over"]


YAML = """
experiment_name: e
model: {path: m, dtype: bfloat16}
agent_builder_path: a.b
train_dataset: {path: d}
gconfig: {n_samples: 8, max_tokens: 64, temperature: 0.5}
train: {num_epochs: 4, num_minibatches: 2, algorithm: {kl: {coef: 0.05}}}
"""

#: What makes each alarm trigger, and words that its message must hold.
CASES: list[tuple[str, Line, list[str]]] = [
    (
        "reward_constant",
        {"reward_mean": 0.0, "reward_max": 0.0, "num_groups_without_signal": 8.0},
        ["every reward of the last 5 steps (320 trajectories) was 0,", "does not recognize"],
    ),
    (
        "groups_equal",
        {"num_groups_without_signal": 8.0},
        ["8 of 8 groups", "at least 90%", "gconfig.n_samples=16", "mean reward 0.500"],
    ),
    (
        "logprob_gap",
        {"logprob_gap_mean": 0.25},
        [
            "0.25 nats",
            "first step it was 0.01",
            "rollout.max_trajectory_age=2",
            "50% of the tokens",
        ],
    ),
    (
        "logprob_gap",
        {"logprob_gap_mean": 0.25, "probe_gap_mean": 0.09, "probe_rounding_mean": 0.06},
        [
            *("the engine computes differently", "0.09 nats apart after", "model.dtype=float32"),
            "above 0.1 and the 0.06 of bfloat16's rounding for the last 3 steps",
            "try: train.algorithm.on_policy_logprobs=rollout",
        ],
    ),
    ("entropy_collapse", {"entropy": 0.02}, ["0.02 nats", "2.0% of the 1", "temperature=1.0"]),
    ("truncated", {"truncated_fraction": 0.8}, ["80%", "above 40%", "gconfig.max_tokens=128"]),
    ("kl_from_reference", {"kl": 3.0}, ["3 nats per token", "train.algorithm.kl.coef=0.1"]),
    ("kl_of_update", {"approx_kl": 0.3}, ["0.3 nats", "40% of the tokens", "train.num_epochs=2"]),
    (
        "prefix_mismatches",
        {
            "prefix_mismatch_fraction": 0.25,
            "prefix_mismatches_thinking_stripped": 4.0,
            "prefix_mismatches_retokenized": 1.0,
            "reprefilled_tokens_thinking_stripped": 1000.0,
            "reprefilled_tokens_retokenized": 234.0,
            "dropped_tokens_thinking_stripped": 7.0,
        },
        ["5 turns, 25%", "1,234 prompt tokens", "7 sampled", "type engine.keep_reasoning=true"],
    ),
    ("not_finite", {"num_skipped_updates": 2.0}, ["left out in this step: 2 (made: 3)"]),
]


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(YAML)
    return path


def trigger(config: ExperimentConfig, changes: Line, location: str = "r") -> str:
    """The only message of a run in which something goes wrong after five steps."""
    run = Run(config, location=location)
    run.steps(5)
    run.steps(10, changes)
    [text] = run.listener.messages
    return text


@pytest.mark.parametrize(("name", "changes", "words"), CASES, ids=lambda c: str(c)[:40])
def test_a_message_says_what_was_seen_and_what_to_type(
    config_path: Path, name: str, changes: Line, words: list[str]
) -> None:
    config = load_config(config_path)
    text = trigger(config, changes, "my runs/e/t")
    assert re.match(rf"step \d+: alarm {name}: ", text)
    for one in words:
        assert one in text, text
    assert "\n  usually: " in text
    assert "\n  try: " in text
    assert re.search(r"\n  look: agentrl inspect-trajectories 'my runs/e/t'", text)
    # What a person is told to type is taken.
    typed = re.findall(r"(?<![\w.])((?:train|gconfig|model|rollout|engine)\.[\w.]+=[\w.\-]+)", text)
    load_config(config_path, typed)
    assert typed or name == "reward_constant"


CLIPPED = ("train.algorithm.loss.kind=ppo_clip", "train.num_epochs=1", "train.num_minibatches=1")


@pytest.mark.parametrize(
    ("overrides", "changes", "said", "unsaid"),
    [
        # More of a bonus where there is one.
        (
            ["train.algorithm.entropy_coef=0.01"],
            {"entropy": 0.02},
            ["try: train.algorithm.entropy_coef=0.02\n"],
            [],
        ),
        ([], {"entropy": 0.02}, ["try: train.algorithm.entropy_coef=0.001\n"], []),
        # Where the ratio is against who sampled, approx_kl is that of the age of the tokens too.
        (
            [],
            {"approx_kl": 0.3},
            ["within one step the policy moves 0.3 nats"],
            ["older weights", "max_trajectory_age"],
        ),
        (
            CLIPPED,
            {"approx_kl": 0.3},
            [
                "from sampling on the policy moves 0.3 nats",
                "or tokens that older weights sampled",
                "try: rollout.max_trajectory_age=2\n",
            ],
            [],
        ),
        # Numbers that a step does not have are left out, not shown as 0 or nan.
        (
            [],
            {"reward_mean": math.nan, "num_groups_without_signal": 8.0},
            [],
            ["mean reward", "nan"],
        ),
        (
            [],
            {"logprob_gap_mean": 0.5, "probe_gap_mean": math.nan},
            [],
            ["nan", "nats apart after"],
        ),
    ],
)
def test_a_message_fits_the_configuration_and_the_step(
    config_path: Path, overrides: Sequence[str], changes: Line, said: list[str], unsaid: list[str]
) -> None:
    text = trigger(load_config(config_path, list(overrides)), changes)
    assert all(one in text for one in said)
    assert not any(one in text for one in unsaid)


def test_every_alarm_has_a_case_and_a_rule() -> None:
    names = set(ALARMS)
    assert names == {name for name, _, _ in CASES}
    assert names == set(AlarmsConfig.model_fields)
    assert {alarm.implied_by for alarm in ALARMS.values()} <= names | {None}
