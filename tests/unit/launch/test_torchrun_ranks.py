"""Ranks that torchrun starts: which they are, what they may use, and how they meet again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed as dist

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine
from agentrl_cli.errors import NotFiniteError, RunError, UserInputError
from agentrl_cli.launch import torchrun
from agentrl_cli.launch.torchrun import TorchrunRank, place_rank, reported_once
from agentrl_cli.train import ranks
from agentrl_cli.train.rendezvous import RankLostError, Rendezvous


def list_variables(rank: int = 0, local_rank: int = 0, *, count: int = 2) -> dict[str, str]:
    """What torchrun sets."""
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": 2}
    names = {"MASTER_ADDR": "head", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    numbers |= {"GROUP_WORLD_SIZE": 2, "MASTER_PORT": 29500, "TORCHELASTIC_RESTART_COUNT": 1}
    return {**{name: str(number) for name, number in numbers.items()}, **names} | {
        "TORCHELASTIC_RUN_ID": "none"
    }


@pytest.fixture
def make_config() -> Callable[..., ExperimentConfig]:
    def make(**changes: Any) -> ExperimentConfig:
        return ExperimentConfig.model_validate(
            {
                "experiment_name": "exp",
                "model": {"path": "./tiny"},
                "agent_builder_path": "own_agent.py:build",
                "train_dataset": {"path": "rows.jsonl"},
                "launcher": {"kind": "torchrun"},
                **changes,
            }
        )

    return make


@pytest.fixture
def have_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A machine with so many, of which torchrun has hidden none."""

    def have(count: int) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        machine = Machine(gpu_ids=tuple(map(str, range(count))))
        monkeypatch.setattr(torchrun, "Machine", type("Found", (), {"detect": lambda: machine}))

    return have


def test_nothing_is_left_that_an_agents_own_torch_would_take_itself_for_a_rank_by() -> None:
    environment = {**list_variables(3, 1, count=4), "HOME": "/root"}
    rank = TorchrunRank.take(environment)
    assert environment == {"HOME": "/root"}
    assert rank is not None
    assert (rank.local_index, rank.num_local) == (1, 2)
    assert rank.rendezvous == Rendezvous(
        index=3, count=4, address="tcp://head:29500", has_store=True
    )
    assert TorchrunRank.take({"RANK": "0", "WORLD_SIZE": "2"}) is None


@pytest.mark.parametrize(
    ("rank", "local_rank", "expected"), [(0, 0, "2"), (1, 1, "3"), (2, 0, "0"), (3, 1, "1")]
)
def test_a_rank_has_a_gpu_that_no_server_has(
    make_config: Any, have_gpus: Any, rank: int, local_rank: int, expected: str
) -> None:
    have_gpus(4)
    config = make_config(engine={"kind": "vllm", "num_servers": 2})
    run, _ = place_rank(config, TorchrunRank.take(list_variables(rank, local_rank, count=4)))
    assert run.trainers == ((expected,),)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    assert [server.gpus for server in run.servers] == (
        [("0",), ("1",)] if rank < 2 else [("elsewhere",)] * 2
    )


@pytest.mark.parametrize(
    ("changes", "num_gpus", "expected"),
    [
        ({"launcher": {"kind": "local"}}, 0, "Type launcher.kind=torchrun"),
        ({"train": {"num_processes": 3}}, 0, "torchrun has started 2 ranks"),
        ({"engine": {"kind": "vllm", "num_servers": 3}}, 4, "Type --nproc-per-node=1 there"),
    ],
)
def test_what_does_not_fit_is_refused(
    make_config: Any, have_gpus: Any, changes: Any, num_gpus: int, expected: str
) -> None:
    have_gpus(num_gpus)
    with pytest.raises(UserInputError) as caught:
        place_rank(make_config(**changes), TorchrunRank.take(list_variables()))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("error", "rank", "local_rank", "expected"),
    [
        (UserInputError("wrong"), 0, 0, "wrong"),
        (UserInputError("wrong"), 1, 1, None),
        (UserInputError("wrong"), 2, 0, "rank 2 on "),
        (NotFiniteError("loss is nan"), 2, 0, None),
        (RankLostError("another has ended"), 0, 0, "--max-restarts"),
        (RankLostError("another has ended"), 1, 0, None),
        (ValueError("a bug"), 1, 1, None),
    ],
)
def test_an_error_of_all_is_reported_by_one(
    error: Exception, rank: int, local_rank: int, expected: str | None
) -> None:
    this = TorchrunRank.take(list_variables(rank, local_rank))
    kind = SystemExit if expected is None else (UserInputError, RunError)
    with pytest.raises(kind) as caught, reported_once(this):
        raise error
    if expected is None:
        assert caught.value.code == (2 if isinstance(error, UserInputError) else 1)
    else:
        assert expected in str(caught.value)


def test_ranks_meet_those_that_live_in_a_store_that_remembers_the_dead() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found: dict[tuple[int, int], str] = {}

    def meet(turn: int, index: int) -> None:
        address = f"tcp://127.0.0.1:{server.port}"
        rendezvous = Rendezvous(index=index, count=3, address=address, has_store=True)
        store = ranks._meet_in_store(rendezvous, timedelta(seconds=60))
        store.set(f"from {index}", str(turn))
        found[turn, index] = b" ".join(store.get(f"from {other}") for other in range(3)).decode()

    for turn, order in enumerate(((0, 1, 2), (2, 1, 0), (1, 0, 2))):
        threads = [threading.Thread(target=meet, args=(turn, index)) for index in order]
        for thread in threads:
            thread.start()
            # Those that come before rank 0 answer to a start that is over.
            thread.join(0.3)
        for thread in threads:
            thread.join(60)
    expected = {(turn, index): f"{turn} {turn} {turn}" for turn in range(3) for index in range(3)}
    assert found == expected
