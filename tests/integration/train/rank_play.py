"""Runs a list of a learner's methods in a process that is one of several ranks.

Loaded by path where it is needed: by the tests, for one process, and by the ranks that they start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunError
from agentrl_cli.records import Trajectory
from agentrl_cli.train.commands import LeadingLearner, follow
from agentrl_cli.train.learner import Learner
from agentrl_cli.train.process_ranks import open_ranks
from agentrl_cli.train.rank_place import RankLostError, RankPlace
from agentrl_cli.train.ranks import SINGLE, Ranks


@dataclass(frozen=True, kw_only=True)
class Play:
    """What every rank does: ``steps`` are names of functions below, with their arguments."""

    model_folder: str
    config: ExperimentConfig
    steps: Sequence[tuple[Any, ...]]
    reference_folder: str | None = None
    critic_folder: str | None = None
    stored: Mapping[int, Sequence[Trajectory]] | None = None
    """By step. With them the first rank alone plays the steps, and the others follow it."""
    exchange_seconds: float = 60.0
    published: str = "whole"


def play(part: Play, ranks: Ranks = SINGLE) -> list[Any]:
    """What each step gave on this rank."""
    torch.set_num_threads(1)

    def load(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    is_led = part.stored is not None and ranks.count > 1
    kind = partial(LeadingLearner, sign_seconds=0.05) if is_led and ranks.index == 0 else Learner
    learner = kind(
        load(part.model_folder),
        part.config,
        reference_model=load(part.reference_folder) if part.reference_folder else None,
        critic_model=load(part.critic_folder) if part.critic_folder else None,
        published=part.published,
        ranks=ranks,
    )
    if is_led and ranks.index > 0:
        follow(learner, ranks, part.stored.__getitem__)
        return [learner.step]
    with learner if is_led else nullcontext():
        return [globals()[f"do_{name}"](learner, *arguments) for name, *arguments in part.steps]


def do_update(learner: Learner, batch: Sequence[Trajectory]) -> Any:
    """The metrics, or the error's text."""
    try:
        return learner.update(batch, 0)
    except RunError as error:
        return str(error)


def do_gradient(learner: Learner, batch: Sequence[Trajectory]) -> Any:
    """The gradients of a batch's update, unclipped, in float64 by name, and its loss."""
    from agentrl_cli.train.sharding import gather

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


def do_replaced(learner: Learner, ids: Sequence[Sequence[int]], names: Sequence[str]) -> Any:
    """Logprobs with some published tensors doubled, each alone."""
    weights = learner.weights()
    found = []
    for name in names:
        replaced = {name: 2 * weights.get(learner.published_names()[name], torch.zeros(1))}
        found.append(learner.compute_logprobs(ids, replaced=replaced))
    return found


def do_weights(learner: Learner) -> Any:
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


def do_critic_weights(learner: Learner) -> Any:
    """The critic's trained weights, on every rank."""
    from agentrl_cli.train.sharding import gather

    assert learner._critic is not None
    weights = learner._critic.optimizer.master_weights()
    return {name: gather(weight).clone() for name, weight in weights.items()}


def do_save(learner: Learner, folder: str) -> None:
    learner.save(folder)


def do_load(learner: Learner, folder: str) -> int:
    learner.load(folder)
    return learner.step


def do_think(learner: Learner, seconds: float) -> None:
    """Nothing that others are needed for."""
    time.sleep(seconds)


def do_elsewhere(learner: Learner, ids: Sequence[Sequence[int]]) -> Any:
    """Logprobs, computed in another thread, as a publication does."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(learner.compute_logprobs, ids).result(60.0)


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


def run_rank(place: RankPlace, part: dict[str, Any], result_path: str) -> None:
    """The whole life of a rank; what its steps gave, or how it lost another, is left in a file."""

    def leave(result: Any) -> None:
        torch.save(result, result_path + ".partial")
        Path(result_path + ".partial").rename(result_path)

    one = Play(**part)
    try:
        with open_ranks(place, exchange_seconds=one.exchange_seconds) as ranks:
            leave(play(one, ranks))
            ranks.barrier()
    except RankLostError as error:
        leave(str(error))


if __name__ == "<rank>":
    run_rank(*globals()["arguments"])
