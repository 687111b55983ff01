"""Weights on real vLLM: what the trainer computes is what the server computes, or the run stops."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine import weight_transfer_nccl
from agentrl_cli.engine.protocol import Generation, Sampling
from agentrl_cli.engine.router import EngineRouter
from agentrl_cli.engine.server import ServerEndpoint, WeightTransfer, WeightUpdate
from agentrl_cli.engine.vllm import VllmServer
from agentrl_cli.engine.weight_transfer import build_weight_transfer, resolve_transfer_kind
from agentrl_cli.errors import WeightMismatchError
from agentrl_cli.launch import servers
from agentrl_cli.launch.servers import ServerFleet
from agentrl_cli.train.learner import Learner
from agentrl_cli.train.publish import publish_and_verify

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
        kind = resolve_transfer_kind(config, num_gpus=0)
        return Learner(model, config, published="adapter" if kind == "lora" else "whole")

    return make


@pytest.fixture
async def lent_fleet(
    untied_fleet: ServerFleet, untied_folder: Path, make_vllm_config: Callable[..., Any]
) -> AsyncIterator[ServerFleet]:
    """The session's untied server, which gets its own weights and no version afterwards."""
    yield untied_fleet
    (endpoint,) = untied_fleet.endpoints
    server = VllmServer(endpoint, make_vllm_config(untied_folder).engine, model_name="untied")
    await server.pause()
    await server.load_weights(untied_folder)
    await server.resume()
    await server.close()
    await set_version(endpoint, "default")


async def set_version(endpoint: ServerEndpoint, version: str) -> None:
    """As anybody may who knows the server's key."""
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    url = f"{endpoint.base_url}/update_weight_version"
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(url, json={"new_version": version}) as response,
    ):
        assert response.status == 200


def move(learner: Learner, seed: int) -> None:
    """As a long training would: every trained weight is another one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            if parameter.requires_grad:
                size = 0.3 * parameter.std().clamp(min=0.1)
                parameter += size * torch.randn(parameter.shape, generator=generator)


def find_tied_names(learner: Learner) -> dict[str, str]:
    return {name: source for name, source in learner.published_names().items() if name != source}


@asynccontextmanager
async def open_engine(
    config: ExperimentConfig,
    fleet: ServerFleet,
    learner: Learner,
    transfer: Callable[[WeightTransfer], WeightTransfer] = lambda same: same,
) -> AsyncIterator[EngineRouter]:
    tied_names = find_tied_names(learner) if fleet.untied_head else {}
    built = build_weight_transfer(
        config, model_folder=config.model.path, tied_names=tied_names, num_gpus=0
    )
    engine = EngineRouter(
        [VllmServer(e, config.engine, model_name=config.model.path) for e in fleet.endpoints],
        config.engine,
        model_name=config.model.path,
        transfer=transfer(built),
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


async def publish_and_check(config: Any, fleet: ServerFleet, learner: Learner) -> None:
    async with open_engine(config, fleet, learner) as engine:
        for version in range(NUM_PUBLICATIONS + 1):
            if version:
                move(learner, version)
            metrics = await publish_and_verify(engine, learner, version, PROBES, TOLERANCE)
            assert metrics["probe_gap_max"] < TOLERANCE
            await check_completions(engine, learner, version)


async def test_untied_weights_are_the_trainers_after_every_publication(
    lent_fleet, untied_folder, make_vllm_config, make_learner
):
    config = make_vllm_config(untied_folder)
    await publish_and_check(config, lent_fleet, make_learner(config))


async def test_tied_weights_are_the_trainers_after_every_publication(
    tied_fleet, tied_folder, make_vllm_config, make_learner
):
    assert tied_fleet.untied_head
    config = make_vllm_config(tied_folder)
    await publish_and_check(config, tied_fleet, make_learner(config))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
async def test_an_adapter_is_the_trainers_after_every_publication(
    tied, request, start_fleet, make_vllm_config, make_learner
):
    pytest.importorskip("peft", reason="needs peft (extra lora)")
    folder = request.getfixturevalue("tied_folder" if tied else "untied_folder")
    config = make_vllm_config(
        folder, model={"path": str(folder), "dtype": "float32", "lora": {"rank": 8, "alpha": 16.0}}
    )
    fleet = start_fleet(config)
    await publish_and_check(config, fleet, make_learner(config))


async def test_an_adapter_may_travel_in_whole_weights(
    lent_fleet, untied_folder, make_vllm_config, make_learner
):
    pytest.importorskip("peft", reason="needs peft (extra lora)")
    path = str(untied_folder)
    config = make_vllm_config(
        untied_folder,
        {"weight_transfer": {"kind": "disk"}},
        model={"path": path, "dtype": "float32", "lora": {"rank": 8, "alpha": 16.0}},
    )
    learner = make_learner(config)
    async with open_engine(config, lent_fleet, learner) as engine:
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
    lent_fleet, untied_folder, make_vllm_config, make_learner, monkeypatch, caplog
):
    monkeypatch.setattr(weight_transfer_nccl, "NcclGroup", WaitingGroup)
    monkeypatch.setattr(weight_transfer_nccl, "_copy_on_gpu", dict)
    config = make_vllm_config(untied_folder, {"weight_transfer": {"kind": "nccl"}})
    learner = make_learner(config)
    async with open_engine(config, lent_fleet, learner) as engine:
        with caplog.at_level(logging.WARNING, logger="agentrl_cli"):
            for version in (1, 2):
                move(learner, version)
                await publish_and_verify(engine, learner, version, PROBES, TOLERANCE)
    (message,) = [r.getMessage() for r in caplog.records if "nccl" in r.getMessage()]
    assert "entering the NCCL group" in message
    assert "go through files from now on" in message


async def test_a_stale_head_stops_the_run_and_is_named(
    tied_folder, make_vllm_config, make_learner, start_fleet, monkeypatch
):
    """vLLM's own fault, without our mend: a reload on CPU leaves a tied head as it was."""
    monkeypatch.setattr(servers, "needs_untied_head", lambda *_, **__: False)
    config = make_vllm_config(tied_folder)
    fleet = start_fleet(config)
    learner = make_learner(config)
    async with open_engine(config, fleet, learner) as engine:
        # The weights that it loaded: there is nothing to keep.
        await publish_and_verify(engine, learner, 0, PROBES, TOLERANCE)
        for version in (1, 2):
            # Kept is the head that was loaded; the second time that is not the one before.
            move(learner, version)
            with pytest.raises(WeightMismatchError) as caught:
                await publish_and_verify(engine, learner, version, PROBES, TOLERANCE)
            assert "vllm-0 does not hold the trainer's weights" in str(caught.value)
            if version == 1:
                assert "when lm_head.weight is that of the version before" in str(caught.value)


async def test_a_version_that_somebody_else_sets_stops_the_run(
    lent_fleet, untied_folder, make_vllm_config, make_learner
):
    config = make_vllm_config(untied_folder)
    learner = make_learner(config)
    async with open_engine(config, lent_fleet, learner) as engine:
        await publish_and_verify(engine, learner, 1, PROBES, TOLERANCE)
        published = engine.publish_weights

        async def publish_and_meddle(version: int, weights: Mapping[str, torch.Tensor]) -> None:
            await published(version, weights)
            await set_version(lent_fleet.endpoints[0], "9")

        engine.publish_weights = publish_and_meddle
        with pytest.raises(WeightMismatchError, match=r"version 2 was published.*vllm-0 reports 9"):
            await publish_and_verify(engine, learner, 2, PROBES, TOLERANCE)


class Meddling:
    """A transfer in whose folder somebody overwrites the file before the servers read it."""

    def __init__(self, transfer: WeightTransfer) -> None:
        self.transfer = transfer
        self.meddle: Callable[[Path], None] | None = None

    async def prepare(self, version: int, weights: Mapping[str, torch.Tensor]) -> WeightUpdate:
        update = await self.transfer.prepare(version, weights)
        if self.meddle is not None:
            self.meddle(update.folder)  # type: ignore[attr-defined]
        return update

    @property
    def previous_folder(self) -> Path | None:
        return self.transfer.previous_folder

    async def close(self) -> None:
        await self.transfer.close()


NAME = "model.layers.1.mlp.down_proj.weight"


def write_noise(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    tensors[NAME] = torch.randn(tensors[NAME].shape)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["noise", "one old layer"])
async def test_a_wrong_file_stops_the_run_with_both_numbers(
    kind, lent_fleet, untied_folder, make_vllm_config, make_learner
):
    config = make_vllm_config(untied_folder)
    learner = make_learner(config)
    transfers: list[Meddling] = []

    def wrap(transfer: WeightTransfer) -> Meddling:
        transfers.append(Meddling(transfer))
        return transfers[0]

    def write_old_layer(folder: Path) -> None:
        (path,) = folder.glob("*.safetensors")
        tensors = load_file(path) | {NAME: old}
        save_file(tensors, path, metadata={"format": "pt"})

    async with open_engine(config, lent_fleet, learner, wrap) as engine:
        await publish_and_verify(engine, learner, 1, PROBES, TOLERANCE)
        old = learner.weights()[NAME].clone()
        move(learner, 1)
        transfers[0].meddle = write_noise if kind == "noise" else write_old_layer
        with pytest.raises(WeightMismatchError) as caught:
            await publish_and_verify(engine, learner, 2, PROBES, TOLERANCE)
        message = str(caught.value)
        assert "vllm-0 does not hold the trainer's weights" in message
        assert "engine logprob -" in message
        assert "trainer -" in message
        if kind == "noise":
            assert "No group of parameters from the version before explains it" in message
        else:
            assert f"when {NAME} is that of the version before" in message
        transfers[0].meddle = None
        await publish_and_verify(engine, learner, 3, PROBES, TOLERANCE)
