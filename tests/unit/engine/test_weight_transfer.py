"""Weights in files: what is in them, what stays of them, and what dead runs leave behind."""

from __future__ import annotations

import asyncio
import logging
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import ServerEndpoint, WeightUpdate
from agentrl_cli.engine.weights import nccl_transfer, weight_folders
from agentrl_cli.engine.weights.nccl_transfer import NcclTransfer
from agentrl_cli.engine.weights.weight_folders import VersionFolders
from agentrl_cli.engine.weights.weight_transfer import FolderTransfer, build_weight_transfer
from agentrl_cli.errors import EngineError, EngineTimeoutError, ServerDownError

FILE_NAME = "model.safetensors"


def make_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Odd sizes of several types, so that places would overlap or be misaligned if they could."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "b": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
        "a": torch.randn(5, generator=generator),
        "c": torch.randint(0, 9, (3,), generator=generator),
        "transposed": torch.randn(4, 6, generator=generator).T,
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
    }


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


class Reader:
    """A server that only says which folder it was told to read, and refuses broadcasts."""

    endpoint = ServerEndpoint(name="vllm-0", base_url="", api_key="")

    def __init__(self) -> None:
        self.folders: list[Path] = []

    async def load_weights(self, folder: Path) -> None:
        self.folders.append(folder)

    async def join_broadcast(self, unique_id: bytes, world_size: int) -> None:
        raise EngineError("no NCCL here")

    receive_broadcast = join_broadcast


@pytest.fixture
async def transfer(tmp_path: Path) -> AsyncIterator[FolderTransfer]:
    transfer = make_transfer(tmp_path)
    yield transfer
    await transfer.close()


def make_transfer(parent: Path, timeout_seconds: float = 30.0) -> FolderTransfer:
    folders = VersionFolders(str(parent), FILE_NAME, timeout_seconds=timeout_seconds)
    return FolderTransfer(folders, tied_names={"head": "a"})


async def read_update(update: WeightUpdate) -> dict[str, torch.Tensor]:
    reader = Reader()
    await update.apply(reader)
    return load_file(reader.folders[0] / FILE_NAME)


async def test_a_file_holds_what_was_written_last_as_it_was_then_with_tied_names(transfer):
    large = make_weights(3) | {"d": torch.ones(1000)}
    for version, weights in enumerate((make_weights(1), large, {"a": torch.ones(2)})):
        expected = {name: tensor.clone() for name, tensor in weights.items()}
        update = await transfer.prepare(version, weights)
        weights["a"].zero_()
        assert update.version == version
        assert_equal(await read_update(update), expected | {"head": expected["a"]})


async def test_the_last_versions_are_kept_and_older_ones_are_not(tmp_path):
    folders = VersionFolders(str(tmp_path), FILE_NAME, timeout_seconds=30.0, num_kept=2)
    # A version that is written again, as after a resume, is a new folder too.
    paths = [await folders.write(version, make_weights(version)) for version in (0, 1, 2, 2)]
    assert [path.exists() for path in paths] == [False, False, True, True]
    for path in paths[2:]:
        assert_equal(load_file(path / FILE_NAME), make_weights(2))
    (root,) = tmp_path.iterdir()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    folders.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_deadline_that_passes_names_the_key(tmp_path):
    transfer = make_transfer(tmp_path, timeout_seconds=1e-9)
    with pytest.raises(
        EngineTimeoutError, match=r"version 3 .*Type engine.publish_timeout_seconds="
    ):
        await transfer.prepare(3, make_weights())
    await transfer.close()


async def test_a_full_folder_says_which_and_what_to_type(transfer, tmp_path):
    """The kernel's own refusal: the process may write no file larger than its limit."""
    await transfer.prepare(1, make_weights())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(EngineError) as caught:
            await transfer.prepare(2, {"a": torch.zeros(2**19)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(tmp_path) in str(caught.value)
    assert "engine.weight_transfer.dir=FOLDER" in str(caught.value)
    assert (await read_update(await transfer.prepare(2, make_weights(2)))).keys() > {"a", "head"}


HOLDER = """
import asyncio, sys, torch
from agentrl_cli.engine.weights.weight_folders import VersionFolders
folders = VersionFolders(sys.argv[1], "x.safetensors", timeout_seconds=30)
print(asyncio.run(folders.write(1, {"a": torch.ones(9)})), flush=True)
sys.stdin.read()
"""


def start_holder(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.slow
async def test_a_killed_run_is_cleaned_up_after_and_a_living_one_is_left_alone(tmp_path):
    (killed, its_folder), (living, other_folder) = start_holder(tmp_path), start_holder(tmp_path)
    try:
        killed.kill()
        killed.wait()
        assert its_folder.is_dir()
        transfer = make_transfer(tmp_path)
        await transfer.prepare(1, make_weights())
        assert not its_folder.parent.exists()
        assert (other_folder / "x.safetensors").is_file()
        await transfer.close()
        living.communicate("", timeout=30)
        assert list(tmp_path.iterdir()) == []
    finally:
        for process in (killed, living):
            process.kill()
            process.communicate()


@pytest.mark.parametrize("free", [10, 10**12])
async def test_memory_is_taken_only_where_a_version_fits(tmp_path, monkeypatch, free):
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr(weight_folders, "MEMORY_FOLDER", memory)
    memory_state = SimpleNamespace(available=free)
    monkeypatch.setattr(weight_folders.psutil, "virtual_memory", lambda: memory_state)
    monkeypatch.setattr(weight_folders.tempfile, "gettempdir", lambda: str(disk))
    folders = VersionFolders(None, FILE_NAME, timeout_seconds=30)
    folder = await folders.write(1, make_weights())
    assert folder.is_relative_to(memory if free > 10 else disk)
    folders.close()


async def test_without_a_gpu_nccl_falls_back_to_files_and_says_so_once(tmp_path, caplog):
    config = ExperimentConfig.model_validate(
        {
            "experiment_name": "t",
            "model": {"path": "m"},
            "workflow_path": "none.none",
            "train_dataset": {"path": "none"},
            "engine": {"kind": "vllm", "weight_transfer": {"dir": str(tmp_path)}},
        }
    )
    transfer = build_weight_transfer(config, model_folder=str(tmp_path), kind="nccl", tied_names={})
    server = Reader()
    with caplog.at_level(logging.WARNING, logger="agentrl_cli"):
        for version in (1, 2):
            await (await transfer.prepare(version, make_weights(version))).apply(server)
    assert len(server.folders) == 2
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 1
    assert "must lie on one GPU, found: cpu" in messages[0]
    await transfer.close()


@pytest.fixture
async def nccl(tmp_path, monkeypatch) -> AsyncIterator[NcclTransfer]:
    """A transfer that takes the CPU for a GPU."""
    monkeypatch.setattr(nccl_transfer, "_copy_on_gpu", dict)
    disk = make_transfer(tmp_path)
    transfer = NcclTransfer(disk, num_gpus_per_server=1, timeout_seconds=30.0, on_message=print)
    yield transfer
    await transfer.close()


async def test_servers_that_fail_get_the_same_file(nccl, capsys):
    """What is missing here (a GPU, the NCCL library) is missing for real."""
    servers = [Reader(), Reader()]
    update = await nccl.prepare(3, make_weights(3))
    await asyncio.gather(*(update.apply(server) for server in servers))
    assert servers[0].folders == servers[1].folders != []
    assert nccl.failure is not None
    assert capsys.readouterr().out.count("go through files from now on (disk)") == 1


class FakeGroup:
    """Stands for a GPU's group, to make the faults of its other side."""

    made: ClassVar[list[FakeGroup]] = []
    unique_id = b"id"

    def __init__(self) -> None:
        self.released = threading.Event()
        self.aborted = False
        self.made.append(self)

    def enter(self, world_size: int, device: torch.device) -> None:
        assert world_size == 2

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        # As NCCL does: waits for a receiver, until somebody aborts.
        if not self.released.wait(10.0):
            raise AssertionError("nobody came")

    def abort(self) -> None:
        self.aborted = True
        self.released.set()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[FakeGroup]:
    monkeypatch.setattr(nccl_transfer, "NcclGroup", FakeGroup)
    monkeypatch.setattr(FakeGroup, "made", [])
    return FakeGroup.made


class Receiving(Reader):
    """Takes broadcasts, but for those numbered in ``faults``."""

    def __init__(self, groups: list[FakeGroup], faults: dict[int, Exception]) -> None:
        super().__init__()
        self.groups = groups
        self.faults = faults
        self.num_joined = self.num_broadcasts = 0

    async def join_broadcast(self, unique_id: bytes, world_size: int) -> None:
        self.num_joined += 1

    async def receive_broadcast(self, *parts: Any) -> None:
        self.num_broadcasts += 1
        if self.num_broadcasts in self.faults:
            raise self.faults[self.num_broadcasts]
        assert parts[0] == list(make_weights())
        assert parts[1][0] == "bfloat16"
        self.groups[-1].released.set()


async def test_a_server_that_was_started_again_gets_a_new_group(nccl, groups):
    server = Receiving(groups, {2: EngineError("not initialized")})
    update = await nccl.prepare(3, make_weights(3))
    await update.apply(server)
    groups[0].released.clear()
    await update.apply(server)
    assert (server.num_joined, server.num_broadcasts, len(groups)) == (2, 3, 2)
    assert groups[0].aborted
    assert nccl.failure is None
    assert server.folders == []
    await nccl.close()
    assert groups[1].aborted


async def test_a_server_that_dies_is_no_reason_to_give_nccl_up(nccl, groups):
    server = Receiving(groups, {1: ServerDownError("vllm-0 died")})
    update = await nccl.prepare(3, make_weights(3))
    with pytest.raises(ServerDownError):
        await update.apply(server)
    assert groups[0].aborted
    await update.apply(server)
    assert nccl.failure is None


async def test_a_new_group_that_fails_too_means_files(nccl, groups):
    server = Receiving(groups, {1: EngineError("broken pipe")})
    await (await nccl.prepare(3, make_weights(3))).apply(server)
    assert "broken pipe" in str(nccl.failure)
    assert (len(server.folders), groups[0].aborted) == (1, True)


def test_an_aborted_call_that_ends_after_its_event_loop_disturbs_nobody(caplog):
    """An exception in the thread would be an error of this test."""
    started, released = threading.Event(), threading.Event()

    def call() -> None:
        started.set()
        released.wait(10.0)

    async def leave() -> None:
        future = nccl_transfer._run_on_daemon_thread(call)
        assert started.wait(5.0)
        future.cancel()

    asyncio.run(leave())
    [thread] = [one for one in threading.enumerate() if one.name == "agentrl-nccl"]
    released.set()
    thread.join(5.0)
    assert not thread.is_alive()
    assert caplog.records == []
