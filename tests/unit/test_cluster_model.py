"""What the simulation of a cluster must hold to, whatever its constants."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.cluster_model import Cluster, Simulation, Workload

CLUSTER = Cluster(
    num_servers=4,
    num_workers=2,
    num_seats=4,
    step_seconds=0.01,
    sequence_seconds=0.001,
    prefill_seconds=1e-4,
    call_seconds=0.01,
    trajectory_seconds=0.005,
    announce_seconds=0.05,
    transfer="one_by_one",
    transfer_seconds=0.5,
    learn_seconds=2.0,
    max_concurrent=24,
)
WORK = Workload(
    num_groups=4,
    n_samples=4,
    max_staleness=2,
    max_age=3,
    num_warm=2,
    num_timed=12,
    num_ahead=2,
    first_prompt_tokens=50,
    next_prompt_tokens=20,
    draw_tokens=lambda chance: chance.lognormvariate(4.0, 0.6),
    draw_tools=lambda _, chance: [chance.lognormvariate(0.0, 1.4) for _ in range(3)],
)


def test_every_trajectory_that_is_admitted_is_in_exactly_one_step() -> None:
    simulation = Simulation(CLUSTER, replace(WORK, num_ahead=0), 1)
    simulation.run()
    assert len(simulation.started) == 4 * 4 * 14
    assert Counter(one for step in simulation.taken for one in step) == Counter(simulation.started)


@pytest.mark.parametrize("max_concurrent", [8, 24, 64])
def test_servers_never_run_more_sequences_than_they_have_seats(max_concurrent: int) -> None:
    simulation = Simulation(replace(CLUSTER, max_concurrent=max_concurrent), WORK, 1)
    result = simulation.run()
    most = max(server.most_running for server in simulation.servers)
    assert most == 4 if max_concurrent > 16 else most <= 4
    assert result.idle + result.frozen + result.seats <= 1


@pytest.mark.parametrize(("max_staleness", "max_age"), [(0, 0), (1, 1), (2, 3), (4, 8)])
def test_no_call_is_trained_on_later_than_the_maximum_age(max_staleness: int, max_age: int) -> None:
    work = replace(WORK, max_staleness=max_staleness, max_age=max_age, num_ahead=max_staleness)
    result = Simulation(CLUSTER, work, 1).run()
    # The tools are slow enough that the bound is reached.
    assert result.max_age == max_age if max_age < 4 else result.max_age <= max_age


def test_the_seed_decides_everything() -> None:
    one, same, other = (Simulation(CLUSTER, WORK, seed) for seed in (1, 1, 2))
    assert one.run() == same.run() != other.run()
    assert one.taken == same.taken != other.taken


@pytest.mark.parametrize("num_servers", [1, 2, 8])
def test_where_nothing_else_takes_time_throughput_is_that_of_the_servers(num_servers: int) -> None:
    cluster = replace(
        CLUSTER,
        num_servers=num_servers,
        prefill_seconds=0.0,
        call_seconds=0.0,
        trajectory_seconds=0.0,
        announce_seconds=0.0,
        transfer_seconds=0.0,
        learn_seconds=0.0,
        max_concurrent=4 * num_servers,
    )
    work = replace(
        WORK, num_groups=num_servers, draw_tokens=lambda _: 100, draw_tools=lambda *_: [0.0] * 3
    )
    result = Simulation(cluster, work, 1).run()
    # Three calls of 100 steps, each of which takes as long as four sequences make it.
    rate = 4 / (3 * 100 * (0.01 + 4 * 0.001))
    assert result.trajectories == pytest.approx(num_servers * rate)
    assert result.sampled == pytest.approx(num_servers * rate * 300)
    assert (result.seats, result.idle) == pytest.approx((1.0, 0.0))


def test_one_server_after_another_freezes_all_that_wait_for_their_turn() -> None:
    cluster = replace(CLUSTER, prefill_seconds=0.0)
    taking_turns = Simulation(cluster, WORK, 1)
    taking_turns.run()
    at_once = Simulation(replace(cluster, transfer="at_once"), WORK, 1)
    at_once.run()
    frozen = [[server.frozen for server in one.servers] for one in (taking_turns, at_once)]
    assert frozen[0] == pytest.approx([frozen[1][0] * turn for turn in (1, 2, 3, 4)])
