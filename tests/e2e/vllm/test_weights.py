"""Weights on real vLLM: what the trainer computes is what the server computes, or the run stops."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from transformers import PreTrainedModel

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.engine.engine_server import EngineServer
from agentrl_cli.engine.protocol import (
    Generation,
    Sampling,
    WeightUpdate,
)
from agentrl_cli.engine.router.engine_router import EngineRouter
from agentrl_cli.engine.vllm.vllm_server import VllmServer
from agentrl_cli.engine.weights import nccl_transfer
from agentrl_cli.engine.weights.weight_transfer import build_weight_transfer
from agentrl_cli.errors import WeightMismatchError
from agentrl_cli.launch.run_models import find_tied_names
from agentrl_cli.launch.servers.server_group import ServerGroup
from agentrl_cli.models.model_files import load_tokenizer
from agentrl_cli.models.pretrained import load_model
from agentrl_cli.train.learner import Learner
from agentrl_cli.train.publish import build_probes, publish_and_verify

NUM_COMPLETIONS = 200
NUM_PUBLICATIONS = 5
TOLERANCE = 1e-4
PROBES = [[5, 6, 7, 8], [9, 10], [11] * 20]

Trainer = Callable[[ExperimentConfig], Learner]


@pytest.fixture
def make_learner(build_tiny_model: Callable[..., PreTrainedModel]) -> Trainer:
    """A learner on the tiny model that a configuration's servers loaded."""

    def make(config: ExperimentConfig) -> Learner:
        model = build_tiny_model(tied="/tied" in config.model.path)
        model.name_or_path = config.model.path
        kind = resolve_run(config, Machine(), purpose="train").weight_transfer
        return Learner(model, config, published="adapter" if kind == "lora" else "whole")

    return make


@pytest.fixture
async def lent_server_group(
    untied_server_group: ServerGroup, untied_folder: Path, open_server: Callable[..., Any]
) -> AsyncIterator[ServerGroup]:
    """The session's untied server, which gets its own weights and no version afterwards."""
    yield untied_server_group
    server = open_server(untied_server_group.endpoints[0])
    await server.pause()
    await server.load_weights(untied_folder)
    await server.resume()
    await server.forget_version()


def move(learner: Learner, seed: int) -> None:
    """As a long training would: every trained weight is another one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            if parameter.requires_grad:
                size = 0.3 * parameter.std().clamp(min=0.1)
                parameter += size * torch.randn(parameter.shape, generator=generator)


@asynccontextmanager
async def open_engine(
    config: ExperimentConfig,
    server_group: ServerGroup,
    learner: Learner,
    meddling: Meddling | None = None,
) -> AsyncIterator[EngineRouter]:
    tied_names = find_tied_names(learner.model) if server_group.run.untied_head else {}
    built = build_weight_transfer(
        config,
        model_folder=config.model.path,
        kind=resolve_run(config, Machine(), purpose="train").weight_transfer,
        tied_names=tied_names,
    )
    if meddling is not None:
        meddling.transfer = built
    engine = EngineRouter(
        [VllmServer(e, config.engine) for e in server_group.endpoints],
        config.engine,
        model_name=config.model.path,
        transfer=meddling or built,
    )
    try:
        await engine.start(None)
        yield engine
    finally:
        await engine.close()


async def check_completions(engine: EngineRouter, learner: Learner, version: int) -> None:
    """Many completions of the engine against the trainer's forward pass."""
    source = random.Random(version)
    prompts = [
        [source.randrange(100) for _ in range(source.randint(1, 40))]
        for _ in range(NUM_COMPLETIONS)
    ]
    sampled: list[Generation] = await asyncio.gather(
        *(
            engine.generate(prompt, Sampling(max_tokens=source.randint(1, 24), seed=index))
            for index, prompt in enumerate(prompts)
        )
    )
    expected = learner.compute_logprobs(
        [[*prompt, *one.completion_ids] for prompt, one in zip(prompts, sampled, strict=True)],
        starts=[len(prompt) for prompt in prompts],
    )
    for one, logprobs in zip(sampled, expected, strict=True):
        assert set(one.versions) == {version}
        assert one.rollout_logprobs == pytest.approx(logprobs, abs=TOLERANCE)


async def publish_and_check(config: Any, server_group: ServerGroup, learner: Learner) -> None:
    transfer = Meddling()
    async with open_engine(config, server_group, learner, transfer) as engine:
        for version in range(NUM_PUBLICATIONS + 1):
            if version:
                move(learner, version)
            metrics = await publish_and_verify(engine, learner, version, PROBES, TOLERANCE)
            assert metrics["probe_gap_max"] < TOLERANCE
            await check_completions(engine, learner, version)
        # The next file takes this one's place: the servers must have copied what they hold.
        zeros = {name: torch.zeros_like(tensor) for name, tensor in learner.weights().items()}
        await transfer.prepare(NUM_PUBLICATIONS + 1, zeros)
        await check_completions(engine, learner, NUM_PUBLICATIONS)


async def test_untied_weights_are_the_trainers_after_every_publication(
    lent_server_group, untied_folder, make_vllm_config, make_learner
):
    config = make_vllm_config(untied_folder)
    await publish_and_check(config, lent_server_group, make_learner(config))


async def test_tied_weights_are_the_trainers_after_every_publication(
    tied_server_group, tied_folder, make_vllm_config, make_learner
):
    assert tied_server_group.run.untied_head
    config = make_vllm_config(tied_folder)
    await publish_and_check(config, tied_server_group, make_learner(config))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
async def test_an_adapter_is_the_trainers_after_every_publication(
    tied, request, start_server_group, make_vllm_config, make_learner
):
    pytest.importorskip("peft", reason="needs peft (extra lora)")
    folder = request.getfixturevalue("tied_folder" if tied else "untied_folder")
    config = make_vllm_config(
        folder, model={"path": str(folder), "dtype": "float32", "lora": {"rank": 8, "alpha": 16.0}}
    )
    server_group = start_server_group(config)
    await publish_and_check(config, server_group, make_learner(config))


async def test_an_adapter_may_travel_in_whole_weights(
    lent_server_group, untied_folder, make_vllm_config, make_learner
):
    pytest.importorskip("peft", reason="needs peft (extra lora)")
    path = str(untied_folder)
    config = make_vllm_config(
        untied_folder,
        {"weight_transfer": {"kind": "disk"}},
        model={"path": path, "dtype": "float32", "lora": {"rank": 8, "alpha": 16.0}},
    )
    learner = make_learner(config)
    async with open_engine(config, lent_server_group, learner) as engine:
        for version in (1, 2):
            move(learner, version)
            await publish_and_verify(engine, learner, version, PROBES, TOLERANCE)


class WaitingGroup:
    """Stands for the trainer's end of an NCCL group, which needs a GPU; the server is real."""

    unique_id = bytes(128)

    def __init__(self) -> None:
        self.ended = threading.Event()

    def enter(self, world_size: int, device: torch.device) -> None:
        assert self.ended.wait(60.0)

    def abort(self) -> None:
        self.ended.set()


async def test_a_server_that_refuses_nccl_gets_a_file(
    lent_server_group, untied_folder, make_vllm_config, make_learner, monkeypatch, caplog
):
    monkeypatch.setattr(nccl_transfer, "NcclGroup", WaitingGroup)
    monkeypatch.setattr(nccl_transfer, "_copy_on_gpu", dict)
    config = make_vllm_config(untied_folder, {"weight_transfer": {"kind": "nccl"}})
    learner = make_learner(config)
    async with open_engine(config, lent_server_group, learner) as engine:
        with caplog.at_level(logging.WARNING, logger="agentrl_cli"):
            for version in (1, 2):
                move(learner, version)
                await publish_and_verify(engine, learner, version, PROBES, TOLERANCE)
    (message,) = [r.getMessage() for r in caplog.records if "nccl" in r.getMessage()]
    assert "entering the NCCL group" in message
    assert "go through files from now on" in message


async def test_a_stale_head_stops_the_run(
    tied_folder, make_vllm_config, make_learner, start_server_group
):
    """vLLM's own fault, without our mend: a reload on CPU leaves a tied head as it was."""
    config = make_vllm_config(tied_folder)
    server_group = start_server_group(config, untied_head=False)
    learner = make_learner(config)
    async with open_engine(config, server_group, learner) as engine:
        await publish_and_verify(engine, learner, 0, PROBES, TOLERANCE)
        # Before the first step nothing has moved, but for this.
        with learner.visibly_changed(), pytest.raises(WeightMismatchError, match="does not hold"):
            await publish_and_verify(engine, learner, 0, PROBES)
        for version in (1, 2):
            move(learner, version)
            with pytest.raises(WeightMismatchError) as caught:
                await publish_and_verify(engine, learner, version, PROBES, TOLERANCE)
            assert "vllm-0 does not hold the trainer's weights" in str(caught.value)


async def test_a_real_model_in_bfloat16_is_verified(
    real_model, make_vllm_config, start_server_group
):
    model = {"path": str(real_model), "dtype": "bfloat16"}
    config = make_vllm_config(real_model, model=model)
    server_group = start_server_group(config)
    learner = Learner(load_model(str(real_model), "float32", "cpu"), config)
    prompts = build_probes(load_tokenizer(real_model), 512)
    transfer = Meddling()
    async with open_engine(config, server_group, learner, transfer) as engine:
        for version in (1, 2):
            metrics = await publish_and_verify(engine, learner, version, prompts)
            assert metrics["probe_gap_mean"] < metrics["probe_tolerance"] < 0.2
        layer = NAME.removesuffix("mlp.down_proj.weight")
        old = {n: t.clone() for n, t in learner.weights().items() if n.startswith(layer)}
        with learner.visibly_changed():
            await publish_and_verify(engine, learner, 3, prompts)
            transfer.meddle = lambda folder: write_tensors(folder, old)
            with pytest.raises(WeightMismatchError, match="weighted by probability"):
                await publish_and_verify(engine, learner, 3, prompts)


async def test_a_version_that_somebody_else_sets_stops_the_run(
    lent_server_group, untied_folder, make_vllm_config, make_learner, open_server
):
    config = make_vllm_config(untied_folder)
    learner = make_learner(config)
    async with open_engine(config, lent_server_group, learner) as engine:
        await publish_and_verify(engine, learner, 1, PROBES, TOLERANCE)
        published = engine.publish_weights

        async def publish_and_meddle(version: int, weights: Mapping[str, torch.Tensor]) -> None:
            await published(version, weights)
            await open_server(lent_server_group.endpoints[0]).set_policy_version(9)

        engine.publish_weights = publish_and_meddle
        with pytest.raises(WeightMismatchError, match=r"version 2 was published.*vllm-0 reports 9"):
            await publish_and_verify(engine, learner, 2, PROBES, TOLERANCE)


class Meddling:
    """A transfer in whose folder somebody overwrites the file before the servers read it."""

    transfer: Any = None
    meddle: Callable[[Path], None] | None = None

    async def prepare(self, version: int, weights: Mapping[str, torch.Tensor]) -> WeightUpdate:
        update = await self.transfer.prepare(version, weights)

        async def apply(server: EngineServer) -> None:
            async def load_weights(folder: Path) -> None:
                if self.meddle is not None:
                    self.meddle(folder)
                await server.load_weights(folder)

            served = SimpleNamespace(
                endpoint=server.endpoint,
                load_weights=load_weights,
                load_adapter=server.load_adapter,
            )
            await update.apply(served)  # type: ignore[arg-type]

        return WeightUpdate(version, apply)

    async def close(self) -> None:
        await self.transfer.close()


NAME = "model.layers.1.mlp.down_proj.weight"


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(save(load_file(path) | dict(tensors), metadata={"format": "pt"}))


@pytest.mark.parametrize("kind", ["noise", "one old layer"])
async def test_a_wrong_file_stops_the_run_with_both_numbers(
    kind, lent_server_group, untied_folder, make_vllm_config, make_learner
):
    config = make_vllm_config(untied_folder)
    learner = make_learner(config)
    transfer = Meddling()
    async with open_engine(config, lent_server_group, learner, transfer) as engine:
        await publish_and_verify(engine, learner, 1, PROBES, TOLERANCE)
        old = learner.weights()[NAME].clone()
        move(learner, 1)
        wrong = torch.randn(old.shape) if kind == "noise" else old
        transfer.meddle = lambda folder: write_tensors(folder, {NAME: wrong})
        with pytest.raises(WeightMismatchError) as caught:
            await publish_and_verify(engine, learner, 2, PROBES, TOLERANCE)
        message = str(caught.value)
        assert "vllm-0 does not hold the trainer's weights" in message
        assert "engine logprob -" in message
        assert "trainer -" in message
        transfer.meddle = None
        await publish_and_verify(engine, learner, 3, PROBES, TOLERANCE)
