"""What a rank that follows does with the first one's commands."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl_cli.errors import NotFiniteError, RunFolderError, StoreError
from agentrl_cli.train.commands import follow


class FakeRanks:
    """Hears the given commands; more than these would be an error."""

    index, count = 1, 2

    def __init__(self, *commands: list[Any]) -> None:
        self._commands = iter(commands)

    def broadcast(self, value: Any) -> Any:
        assert value is None, "who follows has nothing to say"
        return next(self._commands)


class FakeLearner:
    """Notes what is asked of it; an update counts, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.step = 0
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._error = error

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **more: Any) -> None:
            self.calls.append((name, arguments, more))
            if name == "update":
                self.step += 1
            if self._error is not None:
                raise self._error

        return call


def run(learner: FakeLearner, *commands: list[Any]) -> None:
    anything: Any = learner
    ranks: Any = FakeRanks(*commands, ["stop", [], {}])
    follow(anything, ranks, lambda step: [f"of step {step}"])  # type: ignore[list-item]


def test_an_update_learns_from_the_stored_trajectories_of_its_step() -> None:
    learner = FakeLearner()
    run(
        learner,
        ["wait", [], {}],
        ["update", [], {"step": 1, "policy_version": 0}],
        ["save", ["folder"], {}],
        ["update", [], {"step": 2, "policy_version": 1}],
    )
    more = {"save_fault": None}
    assert learner.calls == [
        ("update", (["of step 1"],), {"policy_version": 0, **more}),
        ("save", ("folder",), {}),
        ("update", (["of step 2"],), {"policy_version": 1, **more}),
    ]


def test_tensors_to_replace_are_not_sent_but_known_of() -> None:
    learner = FakeLearner()
    run(
        learner,
        ["compute_logprobs", [[[1, 2]]], {"replaced": ["a"], "starts": None}],
        ["compute_logprobs", [[[1, 2]]], {"replaced": [], "starts": None}],
    )
    assert [call[2]["replaced"] for call in learner.calls] == [{"a": None}, None]


def test_a_step_that_is_not_the_next_ends_the_rank() -> None:
    with pytest.raises(RunFolderError, match="done 0 steps, and the first one begins step 2"):
        run(FakeLearner(), ["update", [], {"step": 2, "policy_version": 1}])


def test_what_fails_on_all_ranks_is_left_to_the_first() -> None:
    learner = FakeLearner(NotFiniteError("the loss is nan"))
    run(learner, ["update", [], {"step": 1, "policy_version": 0}])
    assert len(learner.calls) == 1


@pytest.mark.parametrize(
    "command", [["load", ["folder"], {}], ["update", [], {"step": 1, "policy_version": 0}]]
)
def test_what_fails_on_this_rank_alone_ends_it(command: list[Any]) -> None:
    with pytest.raises(StoreError, match="damaged"):
        run(FakeLearner(StoreError("damaged")), command)
