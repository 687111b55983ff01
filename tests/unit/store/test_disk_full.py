"""A full disk: the run stops with a message, and everything before it is intact."""

from __future__ import annotations

import errno
import itertools
import os
import random
import subprocess
from pathlib import Path

import pytest
from safetensors import SafetensorError

from agentrl_cli.errors import StoreError
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.store.atomic_files import atomic_file, store_errors
from agentrl_cli.store.run_folder import RunFolder


def large(step: int, count: int = 200) -> list[Trajectory]:
    """Trajectories that do not compress."""

    def make(index: int) -> Trajectory:
        noise = tuple(random.random() for _ in range(2000))
        call = Interaction(id="c", rollout_logprobs=noise)
        return Trajectory(id=f"{step}/{index}", group_id="g", task_id="0", interactions=(call,))

    return [make(index) for index in range(count)]


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of two megabytes, where the system allows mounting one."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    try:
        allowed = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        allowed = False
    if not allowed:
        pytest.skip("mounting is not permitted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_really_full_disk_loses_nothing(small_disk: Path, make_config) -> None:
    with RunFolder.create_or_resume(make_config(output_dir=str(small_disk))) as run:
        kept = large(1, 5)
        run.write_trajectories(1, kept)
        run.append_metrics({"step": 1, "reward_mean": 0.5})
        with run.new_checkpoint(1) as path:
            (path / "weights").write_bytes(b"w" * 1000)

        with pytest.raises(StoreError, match=r"g\.jsonl: cannot be written") as caught:
            run.write_trajectories(2, large(2))
        assert "Everything written before is intact" in str(caught.value)
        assert "type the same command again" in str(caught.value)

        with (
            pytest.raises(StoreError, match="step-000002: cannot be written"),
            run.new_checkpoint(2) as path,
        ):
            (path / "weights").write_bytes(os.urandom(4_000_000))

        filler = small_disk / "filler"
        with (
            pytest.raises(OSError, match="No space"),
            filler.open("wb", buffering=0) as file,
        ):
            file.writelines(itertools.repeat(b"x" * 4096))
        with pytest.raises(StoreError, match=r"metrics\.jsonl"):  # noqa: PT012
            for step in range(2, 200):
                run.append_metrics({"step": step, "x" * 100: 0.5})
        lines = [m["step"] for m in run.read_metrics()]
        assert lines == list(range(1, len(lines) + 1))

        assert run.trajectory_steps() == [1]
        assert run.read_trajectories(1) == kept
        assert [step for step, _ in run.list_checkpoints()] == [1]
        hidden = [p.name for p in run.path.rglob(".*") if p.name != ".lock"]
        assert hidden == []
        filler.unlink()
        # Those of the second step that found room are not made again.
        assert 0 < len(run.read_pending()) < 200
        run.discard_pending()
        run.write_trajectories(2, kept)


def test_a_file_size_limit_is_reported_alike(tmp_path: Path, limited_file_size) -> None:
    """The fallback for systems without mounts: the kernel refuses the write all the same."""
    path = tmp_path / "file"
    path.write_text("before")
    with (
        limited_file_size(100_000),
        pytest.raises(StoreError, match="is full"),
        atomic_file(path) as file,
    ):
        file.write(b"x" * 1_000_000)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", [SafetensorError, Exception])
@pytest.mark.parametrize(
    ("number", "message"),
    [
        *((number, "is full") for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
        *(
            (number, r"x: cannot be written.*output_dir=FOLDER")
            for number in (errno.EACCES, errno.EPERM, errno.EROFS)
        ),
    ],
)
def test_a_library_s_own_exception_is_recognised(number: int, message: str, kind: type) -> None:
    """safetensors and tokenizers wrap the system's error in classes that are no OSError."""
    text = f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})"
    with pytest.raises(StoreError, match=message), store_errors(Path("x")):
        raise kind(text)
    with pytest.raises(ValueError, match="mine"), store_errors(Path("x")):
        raise ValueError("mine")
