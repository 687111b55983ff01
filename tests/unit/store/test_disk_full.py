"""A full disk: the run stops with a message, and everything before it is intact."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from safetensors import SafetensorError

from agentrl_cli.errors import StoreError
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.store import files
from agentrl_cli.store.files import store_errors
from agentrl_cli.store.run_folder import RunFolder


def large(step: int) -> list[Trajectory]:
    """Trajectories that do not compress."""
    return [
        Trajectory(
            id=f"{step}/{i}",
            group_id=str(step),
            task_id="0",
            interactions=(
                Interaction(
                    id="c",
                    completion_ids=tuple(range(2000)),
                    rollout_logprobs=tuple(random.random() for _ in range(2000)),
                    versions=(0,) * 2000,
                ),
            ),
        )
        for i in range(200)
    ]


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def append_many(run: RunFolder) -> None:
    for step in range(2, 200):
        run.append_metrics({"step": step, "x" * 100: 0.5})


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
        kept = large(1)[:5]
        run.write_trajectories(1, kept)
        run.append_metrics({"step": 1, "reward_mean": 0.5})
        with run.new_checkpoint(1) as path:
            (path / "weights").write_bytes(b"w" * 1000)

        with pytest.raises(StoreError, match=r"step-000002\.parquet: cannot be written") as caught:
            run.write_trajectories(2, large(2))
        assert "Everything written before is intact" in str(caught.value)
        assert "type the same command again" in str(caught.value)

        with (
            pytest.raises(StoreError, match="step-000002: cannot be written"),
            run.new_checkpoint(2) as path,
        ):
            (path / "weights").write_bytes(os.urandom(4_000_000))

        filler = small_disk / "filler"
        with pytest.raises(OSError, match="No space"):
            fill(filler)
        with pytest.raises(StoreError, match=r"metrics\.jsonl"):
            append_many(run)
        lines = [m["step"] for m in run.read_metrics()]
        assert lines == list(range(1, len(lines) + 1))

        assert run.trajectory_steps() == [1]
        assert run.read_trajectories(1) == kept
        assert [step for step, _ in run.list_checkpoints()] == [1]
        hidden = [p.name for p in run.path.rglob(".*") if p.name != ".lock"]
        assert hidden == []
        filler.unlink()
        run.write_trajectories(2, kept)


def test_a_file_size_limit_is_reported_alike(tmp_path) -> None:
    """The fallback for systems without mounts: the kernel refuses the write all the same."""
    code = textwrap.dedent("""
        import resource, signal, sys
        from pathlib import Path
        from agentrl_cli.errors import StoreError
        from agentrl_cli.store.files import atomic_file
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        path = Path(sys.argv[1])
        path.write_text("before")
        try:
            with atomic_file(path) as file:
                file.write(b"x" * 1_000_000)
        except StoreError as error:
            print(error)
            assert path.read_text() == "before"
            assert len(list(path.parent.iterdir())) == 1
            sys.exit(7)
    """)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "file")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert "is full" in done.stdout


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_library_s_own_exception_for_a_full_disk_is_recognised(number: int) -> None:
    """safetensors and tokenizers wrap the system's error in classes that are no OSError."""
    text = f"{os.strerror(number)} (os error {number})"
    for kind in (SafetensorError, Exception):
        with pytest.raises(StoreError, match="is full"), store_errors(Path("model.safetensors")):
            raise kind(f"Error while serializing: I/O error: {text}")
    with pytest.raises(ValueError, match="mine"), store_errors(Path("x")):
        raise ValueError("mine")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_library_s_own_exception_for_a_refusal_is_recognised(number: int) -> None:
    text = f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})"
    for kind in (SafetensorError, Exception):
        with (
            pytest.raises(StoreError, match=r"x: cannot be written.*output_dir=FOLDER"),
            store_errors(Path("x")),
        ):
            raise kind(text)


def test_a_folder_that_may_not_be_written_to(tmp_path, monkeypatch) -> None:
    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(StoreError, match="output_dir="):
        files.write_text(tmp_path / "x", "text")
    assert list(tmp_path.iterdir()) == []
