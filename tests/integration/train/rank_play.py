"""Runs a list of a learner's methods in a process that is one of several ranks.

Loaded by path where it is needed: by the tests, for one process, and by the ranks that they start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunError
from agentrl_cli.records import Trajectory
from agentrl_cli.train.learner import Learner
from agentrl_cli.train.loop import TrainingLoop
from agentrl_cli.train.ranks import SINGLE, Ranks, open_ranks
from agentrl_cli.train.rendezvous import RankLostError, Rendezvous


@dataclass(frozen=True, kw_only=True)
class Play:
    """What every rank does: ``steps`` are names of functions below, with their arguments."""

    model_folder: str
    config: ExperimentConfig
    steps: Sequence[tuple[Any, ...]]
    reference_folder: str | None = None
    critic_folder: str | None = None
    exchange_seconds: float = 60.0
    published: str = "whole"


def play(part: Play, ranks: Ranks = SINGLE) -> list[Any]:
    """What each step gave on this rank."""
    torch.set_num_threads(1)

    def load(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    learner = Learner(
        load(part.model_folder),
        part.config,
        reference_model=load(part.reference_folder) if part.reference_folder else None,
        critic_model=load(part.critic_folder) if part.critic_folder else None,
        published=part.published,
        ranks=ranks,
    )
    return [globals()[f"do_{name}"](learner, *arguments) for name, *arguments in part.steps]


def do_update(learner: Learner, batch: Sequence[Trajectory]) -> Any:
    """The metrics, or the error's text."""
    try:
        return learner.update(batch, 0)
    except RunError as error:
        return str(error)


def do_gradient(learner: Learner, batch: Sequence[Trajectory]) -> Any:
    """The gradients of a batch's update, unclipped, in float64 by name, and its loss."""
    from agentrl_cli.train.model.sharding import gather

    found: dict[str, torch.Tensor] = {}
    optimizer = learner._policy.optimizer
    clip = optimizer.clip_gradients

    def keep() -> float:
        for name, weight in optimizer._masters.items():
            found[name] = gather(weight.grad).clone()
        return clip()

    optimizer.clip_gradients = keep
    metrics = learner.update(batch, 0)
    optimizer.clip_gradients = clip
    return found, metrics


def do_spoil(learner: Learner, index: int, trajectory_id: str) -> None:
    """Makes the loss of a trajectory NaN on rank ``index`` alone, in every later update."""
    if learner._ranks.index != index:
        return
    policy = learner._policy
    forward = policy.forward

    def spoiled(batch: Any) -> Any:
        scored = forward(batch)
        hit = any(s.trajectory_id == trajectory_id for s in batch.samples)
        return replace(scored, logprobs=scored.logprobs * float("nan")) if hit else scored

    policy.forward = spoiled


def do_logprobs(learner: Learner, ids: Sequence[Sequence[int]], **more: Any) -> Any:
    return learner.compute_logprobs(ids, **more)


def do_proximal(learner: Learner) -> Any:
    """Those of the last update, by interaction."""
    return {name: values.tolist() for name, values in learner.proximal_logprobs.items()}


def do_weights(learner: Learner) -> Any:
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


def do_critic_weights(learner: Learner) -> Any:
    """The critic's trained weights, on every rank."""
    from agentrl_cli.train.model.sharding import gather

    assert learner._critic is not None
    weights = learner._critic.optimizer.master_weights()
    return {name: gather(weight).clone() for name, weight in weights.items()}


def do_save(learner: Learner, folder: str) -> None:
    learner.save(folder)


def do_load(learner: Learner, folder: str) -> int:
    learner.load(folder)
    return learner.step


def do_run(learner: Learner, batches: Sequence[Sequence[Trajectory]], folder: str) -> list[Any]:
    """A whole run by the training loop, which saves after its first step; what rank 0 saw of it."""
    coordinator = FakeCoordinator(learner, batches, folder) if learner._ranks.index == 0 else None
    loop = TrainingLoop(
        config=learner._config, learner=learner, ranks=learner._ranks, coordinator=coordinator
    )
    is_complete = loop.run()
    return [is_complete, learner.step, coordinator and coordinator.seen]


class FakeCoordinator:
    """Has the batches already, and nobody to publish to; asks to stop when none is left."""

    def __init__(
        self, learner: Learner, batches: Sequence[Sequence[Trajectory]], folder: str
    ) -> None:
        self.seen: list[Any] = []
        self._learner = learner
        self._batches = list(batches)
        self._folder = folder

    def begin(self, first_step: int) -> None:
        self.seen.append(first_step)

    def collect(self, step: int) -> Sequence[Trajectory] | None:
        time.sleep(0.2)
        return self._batches.pop(0) if self._batches else None

    def released_engine(self) -> Any:
        return nullcontext()

    def publish(self, version: int) -> dict[str, float]:
        """In another thread, as a publication does."""
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self._learner.weights).result(60.0)
            found, _ = pool.submit(self._learner.score_probes, [[1, 2]], [[[3]]]).result(60.0)
        self.seen.append(found[0][0])
        return {"version": version}

    def finish_step(self, step: int, batch: Any, metrics: dict[str, float]) -> bool:
        self.seen.append(metrics)
        return step == 1

    def save(self, step: int) -> None:
        self._learner.save(self._folder)

    def evaluate_if_due(self, step: int) -> None: ...

    def stop_if_alarmed(self, step: int) -> None: ...


def do_die(learner: Learner, index: int) -> None:
    """Ends rank ``index`` without a word."""
    if learner._ranks.index == index:
        os._exit(9)


def do_hang(learner: Learner, index: int, where: str, seconds: float) -> None:
    """Lets rank ``index`` sleep once: here, or in its next pass ("in a pass")."""
    if learner._ranks.index != index:
        return
    if where == "here":
        time.sleep(seconds)
        return
    policy = learner._policy
    forward = policy.forward

    def sleep_and_go_on(batch: Any) -> Any:
        policy.forward = forward
        time.sleep(seconds)
        return forward(batch)

    policy.forward = sleep_and_go_on


def run_rank(rendezvous: Rendezvous, part: dict[str, Any], result_path: str) -> None:
    """The whole life of a rank; what its steps gave, or how it lost another, is left in a file."""

    def leave(result: Any) -> None:
        torch.save(result, result_path + ".partial")
        Path(result_path + ".partial").rename(result_path)

    one = Play(**part)
    try:
        with open_ranks(rendezvous, exchange_seconds=one.exchange_seconds) as ranks:
            leave(play(one, ranks))
    except RankLostError as error:
        leave(str(error))


if __name__ == "<rank>":
    run_rank(*globals()["arguments"])
