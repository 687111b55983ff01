"""What a run's steps are made of, on a clock of the tests' own: ages, order, kills."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_cli.records import Boundary, Failure, Interaction, Trajectory
from agentrl_cli.rollout.dataset import TaskStream, list_outcomes
from agentrl_cli.rollout.step_planner import StepPlanner
from agentrl_cli.scores import compute_score

FAILURE = Failure(boundary=Boundary.TOOL, kind="ConnectionError", message="no such host")


@dataclass(frozen=True)
class Setting:
    """What a run is made of; every start has a new stream and a new planner."""

    num_rows: int = 12
    batch_size: int = 2
    n_samples: int = 2
    last_step: int = 4
    max_staleness: int = 0
    max_trajectory_age: int = 8
    max_concurrent: int = 64
    num_backup_tasks: int = 0
    shuffle: bool = False
    max_cooldown_epochs: int | None = None
    flat_tasks: frozenset[int] = frozenset()
    max_failed_groups: int | None = None

    def build_planner(self, disk: Disk) -> StepPlanner:
        stream = TaskStream(
            [{"i": i} for i in range(self.num_rows)],
            batch_size=self.batch_size,
            shuffle=self.shuffle,
            seed=3,
            num_backup_tasks=self.num_backup_tasks,
            max_staleness=self.max_staleness,
            max_cooldown_epochs=self.max_cooldown_epochs,
        )
        for step, batch in disk.steps.items():
            stream.batch(step)
            scores = ((t.group_id, t.task_id, compute_score(t)) for t in batch)
            stream.observe(step, list_outcomes(scores))
        return StepPlanner(
            stream,
            n_samples=self.n_samples,
            max_staleness=self.max_staleness,
            max_trajectory_age=self.max_trajectory_age,
            first_step=len(disk.steps) + 1,
            last_step=self.last_step,
            already_finished=list(disk.pending.values()),
            max_failed_groups=self.max_failed_groups,
            open_rounds=disk.open_rounds,
        )

    def judge(self, attempt):
        """A reward that is a function of the task, the group and the sample."""
        if int(attempt.task.task_id) in self.flat_tasks:
            return 1.0
        chance = random.Random(attempt.task.group_id)
        if chance.random() < 0.1:
            return None if attempt.sample_index else 0.0
        return float(attempt.sample_index % 2) if chance.random() < 0.7 else 0.0


@st.composite
def settings_of_runs(draw, max_staleness=3):
    num_rows = draw(st.integers(1, 12))
    staleness = draw(st.integers(0, max_staleness))
    return Setting(
        num_rows=num_rows,
        batch_size=draw(st.integers(1, 5)),
        n_samples=draw(st.integers(2, 4)),
        last_step=draw(st.integers(1, 9)),
        max_staleness=staleness,
        max_trajectory_age=staleness + draw(st.integers(0, 4)),
        max_concurrent=draw(st.integers(1, 30)),
        num_backup_tasks=draw(st.integers(0, 6)),
        shuffle=draw(st.booleans()),
        max_cooldown_epochs=draw(st.one_of(st.none(), st.integers(1, 5))),
        flat_tasks=frozenset(draw(st.sets(st.integers(0, num_rows - 1)))),
    )


@dataclass
class Disk:
    """What outlives a kill: whole steps, and finished trajectories of those that are not."""

    steps: dict[int, list[Trajectory]] = field(default_factory=dict)
    pending: dict[str, Trajectory] = field(default_factory=dict)
    open_rounds: dict[int, list[str]] = field(default_factory=dict)


@dataclass
class Simulation:
    """A run on a clock of its own, until the last step or until so many things have happened."""

    setting: Setting
    disk: Disk
    seed: int = 0
    judge: object = None
    seconds: object = None
    """Of an attempt; None: mostly 1, and of some 100."""
    started: list = field(default_factory=list)
    """(id, policy version) of each trajectory, in the order of their starts."""
    now: float = 0.0

    def run(self, max_events=None):
        """True at the end of the run."""
        setting, disk, chance = self.setting, self.disk, random.Random(self.seed)
        planner = setting.build_planner(disk)
        self.version = planner.next_step - 1
        planner.publish(self.version)
        self.events, self.order, self.num_running = [], itertools.count(), 0
        self.is_learning = False
        for _ in itertools.count() if max_events is None else range(max_events):
            self.start_what_may_start(planner, chance)
            if not self.is_learning and planner.next_step > setting.last_step:
                return True
            if not self.is_learning and (batch := planner.take_step()) is not None:
                step = planner.next_step - 1
                disk.steps[step], disk.open_rounds = batch, planner.open_rounds
                for one in batch:
                    del disk.pending[one.id]
                self.is_learning = True
                self.happens(chance.choice([0.1, 5.0]), None)
            assert self.events, "the run waits for nothing"
            self.now, _, attempt = heapq.heappop(self.events)
            if attempt is None:
                self.is_learning, self.version = False, self.version + 1
                planner.publish(self.version)
            else:
                self.num_running -= 1
                ended = self.end(*attempt)
                disk.pending[ended.id] = ended
                planner.finish(ended)
        return False

    def start_what_may_start(self, planner, chance):
        while self.num_running < self.setting.max_concurrent:
            if (attempt := planner.start()) is None:
                return
            self.num_running += 1
            self.started.append((attempt.id, self.version))
            usual = chance.random() if chance.random() < 0.8 else 100 * chance.random()
            self.happens(usual if self.seconds is None else self.seconds(attempt), attempt)

    def happens(self, seconds, attempt):
        attempt = attempt and (attempt, self.version)
        heapq.heappush(self.events, (self.now + seconds, next(self.order), attempt))

    def end(self, attempt, version):
        call = Interaction(id="call", versions=[-1, version])
        reward = (self.judge or self.setting.judge)(attempt)
        if reward == "fails":
            return attempt.begin_trajectory(failure=FAILURE, interactions=(call,))
        return attempt.begin_trajectory(reward=reward, interactions=(call,))


def list_groups(batch):
    groups = defaultdict(list)
    for one in batch:
        groups[one.group_id].append(one)
    return dict(groups)


def has_signal(group):
    return len({t.reward for t in group} - {None}) > 1


def check_steps(setting, disk):
    """Every step is complete, nothing is in two of them, and no token is too old."""
    assert list(disk.steps) == list(range(1, setting.last_step + 1))
    seen = set()
    for step, batch in disk.steps.items():
        groups = list_groups(batch)
        assert all(t.step == step for t in batch)
        indices = list(range(setting.n_samples))
        assert all([t.sample_index for t in g] == indices for g in groups.values())
        assert not seen & set(groups)
        seen |= set(groups)
        replaced = {t.group_id: t.replaced_by for t in batch if t.replaced_by is not None}
        assert len(groups) - len(replaced) == setting.batch_size
        assert all(not has_signal(groups[name]) and by in groups for name, by in replaced.items())
        for one in batch:
            if one.replaced_by is None:
                version = one.interactions[0].versions[-1]
                assert 0 <= step - 1 - version <= setting.max_trajectory_age
    first_groups = [
        f"{number:06d}.{position:03d}"
        for number in range(1, setting.last_step + 1)
        for position in range(setting.batch_size)
    ]
    # Every task of the order, slow ones too, is in some step.
    assert seen >= set(first_groups)


@settings(max_examples=150, deadline=None)
@given(setting=settings_of_runs(), seed=st.integers(0, 10**6))
def test_every_group_is_in_one_step_and_none_is_too_old(setting, seed):
    disk = Disk()
    simulation = Simulation(setting, disk, seed)
    assert simulation.run()
    check_steps(setting, disk)
    assert not disk.pending
    assert disk.open_rounds == {}
    ids = [id_ for id_, _ in simulation.started]
    assert sorted(ids) == sorted(t.id for batch in disk.steps.values() for t in batch)
    # Round k may begin when the policy version is k - 1 - max_staleness.
    for id_, version in simulation.started:
        assert int(id_[:6]) - 1 - version <= setting.max_staleness
    if not setting.num_backup_tasks:
        assert all(a <= b for (a, _), (b, _) in pairwise(simulation.started))


@settings(max_examples=100, deadline=None)
@given(setting=settings_of_runs(), seeds=st.lists(st.integers(0, 10**6), max_size=8))
def test_a_run_that_is_killed_loses_nothing_and_makes_nothing_twice(setting, seeds):
    disk = Disk()
    for seed in seeds:
        before, stored = set(disk.pending), dict(disk.steps)
        simulation = Simulation(setting, disk, seed)
        simulation.run(max_events=random.Random(seed).randrange(150))
        assert not before & {id_ for id_, _ in simulation.started}
        assert {step: disk.steps[step] for step in stored} == stored
    assert Simulation(setting, disk, 7).run()
    check_steps(setting, disk)
    assert not disk.pending


def describe(disk):
    return {
        step: [(t.group_id, t.task_id, t.sample_index, t.reward, t.replaced_by) for t in batch]
        for step, batch in disk.steps.items()
    }


@settings(max_examples=60, deadline=None)
@given(setting=settings_of_runs(max_staleness=0), seeds=st.lists(st.integers(0, 10**6), max_size=4))
def test_without_staleness_steps_are_the_rounds_whatever_ends_first_or_is_killed(setting, seeds):
    undisturbed, disk = Disk(), Disk()
    assert Simulation(setting, undisturbed).run()
    for seed in seeds:
        Simulation(setting, disk, seed).run(max_events=random.Random(seed).randrange(120))
    assert Simulation(setting, disk, 7).run()
    assert describe(disk) == describe(undisturbed)
    for step, batch in disk.steps.items():
        groups = list_groups(batch)
        # Positions continue after the round's, without a gap.
        assert list(groups) == [f"{step:06d}.{n:03d}" for n in range(len(groups))]
        num_flat = sum(not has_signal(g) for g in groups.values())
        replaced = {t.group_id: t.replaced_by for t in batch if t.replaced_by is not None}
        assert len(replaced) == min(num_flat, setting.num_backup_tasks)
        assert list(replaced.values()) == list(groups)[setting.batch_size :]
        assert all(name < by for name, by in replaced.items())


def take_steps(setting, disk, **options):
    simulation = Simulation(setting, disk, **options)
    assert simulation.run()
    return {step: [*list_groups(batch)] for step, batch in disk.steps.items()}, simulation


def test_a_slow_group_is_passed_over_until_it_would_be_too_old():
    setting = Setting(
        batch_size=2, last_step=6, max_staleness=1, max_trajectory_age=3, n_samples=1, num_rows=20
    )
    slow = {"000001.000/0": 1e6}
    steps, simulation = take_steps(
        setting, Disk(), seconds=lambda attempt: slow.get(attempt.id, 1.0)
    )
    # It began under version 0, so its last step is that which trains version 3.
    assert steps[1] == ["000001.001", "000002.000"]
    assert steps[4][0] == "000001.000"
    # All the others were trained on, or in progress, while step 4 waited for it.
    assert simulation.now == pytest.approx(1e6, rel=1e-3)
    steps, simulation = take_steps(
        setting, Disk(), seconds=lambda attempt: 5.0 if attempt.id in slow else 1.0
    )
    assert any("000001.000" in steps[step] for step in (2, 3))


def test_several_slow_groups_get_their_places_before_the_last_step_that_has_room():
    """Three groups that began under version 0 cannot all go into its last step, of two groups."""
    setting = Setting(
        batch_size=2, last_step=5, max_staleness=2, max_trajectory_age=2, n_samples=1, num_rows=20
    )
    slow = {f"00000{n}.000/0": 1e6 for n in (1, 2, 3)}
    disk = Disk()
    steps, _ = take_steps(setting, disk, seconds=lambda attempt: slow.get(attempt.id, 1.0))
    check_steps(setting, disk)
    assert [n for n in (1, 2, 3) for group in steps[n] if f"{group}/0" in slow] == [2, 3, 3]


def test_failures_that_end_first_are_no_step_of_their_own():
    """While others are at work they say nothing of the agent, and there is nothing to learn."""
    setting = Setting(batch_size=2, last_step=2, max_staleness=1, n_samples=1, num_rows=20)
    failing = {"000001.000", "000001.001"}
    disk = Disk()
    take_steps(
        setting,
        disk,
        seconds=lambda attempt: 1.0 if attempt.task.group_id in failing else 50.0,
        judge=lambda attempt: None if attempt.task.group_id in failing else 1.0,
    )
    assert all(any(t.reward is not None for t in batch) for batch in disk.steps.values())


def test_an_earlier_rounds_replacement_goes_before_later_rounds():
    setting = Setting(
        max_staleness=2, max_concurrent=1, num_backup_tasks=1, flat_tasks=frozenset({0})
    )
    _, simulation = take_steps(setting, Disk())
    # One runs at a time. When the first group is over, the second of round 1 waits already;
    # the replacement comes after it and before round 2.
    assert [id_ for id_, _ in simulation.started[:7]] == [
        "000001.000/0", "000001.000/1", "000001.001/0", "000001.001/1",
        "000001.002/0", "000001.002/1", "000002.000/0",
    ]  # fmt: skip


def test_a_group_that_replaces_may_be_replaced():
    setting = Setting(last_step=1, num_backup_tasks=3, num_rows=9)
    rewards = {0: (1, 1), 1: (0, 1), 2: (0, 0), 3: (1, 0)}
    disk = Disk()
    take_steps(setting, disk, judge=lambda a: float(rewards[int(a.task.task_id)][a.sample_index]))
    assert [(t.group_id, t.task_id, t.replaced_by) for t in disk.steps[1][::2]] == [
        ("000001.000", "0", "000001.002"),
        ("000001.001", "1", None),
        ("000001.002", "2", "000001.003"),
        ("000001.003", "3", None),
    ]


def test_a_finished_trajectory_of_another_task_is_made_again():
    """A program's own task had the place of the dataset's; nobody knows it after a restart."""
    setting = Setting(num_rows=4, batch_size=1, last_step=1)
    own = Trajectory(id="000001.000/0", group_id="000001.000", task_id="mine", step=1, reward=5.0)
    disk = Disk(pending={own.id: own})
    _, simulation = take_steps(setting, disk)
    assert sorted(id_ for id_, _ in simulation.started) == ["000001.000/0", "000001.000/1"]
    assert {t.task_id for t in disk.steps[1]} == {"0"}


def test_how_far_a_step_is_counts_what_it_can_be_made_of():
    setting = Setting(batch_size=2, n_samples=2, max_staleness=1, last_step=2)
    planner = setting.build_planner(Disk())
    planner.publish(0)
    attempts = [planner.start() for _ in range(8)]
    counts = []
    # One of each of the four groups, then the others.
    for attempt in [*attempts[::2], *attempts[1::2]]:
        planner.finish(attempt.begin_trajectory(reward=1.0, interactions=(Interaction(id="c"),)))
        counts.append(planner.count_finished())
    assert planner.start() is None
    # Two groups of two: as long as one of them is missing, so is at least one trajectory.
    assert counts == [1, 2, 2, 2, 3, 4, 4, 4]


def test_a_round_of_which_no_step_was_made_yet_is_not_lost():
    setting = Setting(batch_size=1, n_samples=1, last_step=4, max_staleness=1, num_rows=20)
    disk = Disk()
    seconds = {"000001.000/0": 1e6}
    options = {"seconds": lambda attempt: seconds.get(attempt.id, 1.0)}
    # Ends: the second group, the step made of it; then the run is killed.
    assert not Simulation(setting, disk, **options).run(max_events=2)
    assert disk.open_rounds == {1: [], 2: ["000002.000"]}
    take_steps(setting, disk, **options)
    check_steps(setting, disk)


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("num_backup_tasks", [0, 1])
def test_a_task_that_fails_again_and_again_is_set_aside(max_staleness, num_backup_tasks):
    """Four tasks, two a step: each comes every other step."""
    setting = Setting(
        num_rows=4, batch_size=2, last_step=14, max_staleness=max_staleness,
        max_failed_groups=3, num_backup_tasks=num_backup_tasks,
    )  # fmt: skip
    recovers = {"2": 2}
    seen = Counter()

    def judge(attempt):
        task_id = attempt.task.task_id
        seen[task_id] += attempt.sample_index
        if task_id == "0" or seen[task_id] <= recovers.get(task_id, 0):
            return "fails"
        return float(attempt.sample_index)

    disk = Disk()
    assert Simulation(setting, disk, judge=judge, seconds=lambda _: 1.0).run()
    assert list(disk.steps) == list(range(1, 15))
    failed = [t for batch in disk.steps.values() for t in batch if t.failure is not None]
    # Groups that were begun before the third had failed are made all the same.
    num_failed = sum(t.task_id == "0" for t in failed) // setting.n_samples
    assert 3 <= num_failed <= 3 + max_staleness * (1 + num_backup_tasks)
    worked = Counter(t.task_id for batch in disk.steps.values() for t in batch if not t.failure)
    assert worked["2"] > 0
    if not max_staleness:
        # Nobody takes the place of the task that is set aside.
        assert {len(list_groups(disk.steps[step])) for step in (11, 13)} == {1}


def test_without_a_limit_no_task_is_set_aside():
    setting = Setting(num_rows=2, batch_size=1, last_step=12, n_samples=1)
    disk = Disk()
    judge = lambda attempt: "fails" if attempt.task.task_id == "0" else 1.0  # noqa: E731
    take_steps(setting, disk, judge=judge)
    assert all(len(batch) == 1 for batch in disk.steps.values())
