"""One run at a time writes into a run folder that several machines reach."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl_cli.errors import RunFolderError, StoreError
from agentrl_cli.records import Trajectory
from agentrl_cli.store.remote import lease, remote_files
from agentrl_cli.store.remote.lease import Lease
from agentrl_cli.store.remote.object_store import ObjectStore
from agentrl_cli.store.remote.remote_files import UnreachableError
from agentrl_cli.store.run_folder import RunFolder

HOLD = """
import sys, time
from agentrl_cli.store.remote import lease
from agentrl_cli.store.remote.object_store import ObjectStore
lease.RENEW_SECONDS = 0.2
held = lease.Lease.take(ObjectStore(sys.argv[1]))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _seconds_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.2)
    monkeypatch.setattr(lease, "TRUST_SECONDS", 2.0)
    monkeypatch.setattr(lease, "TAKEOVER_SECONDS", 3.0)
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.5)


@pytest.fixture
def url(s3_bucket: str) -> str:
    return f"{s3_bucket}/runs/exp/t0"


@pytest.fixture
def holder(url: str):
    """Another process that has the lease."""
    with subprocess.Popen([sys.executable, "-c", HOLD, url], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_lost(held: Lease) -> bool:
    try:
        held.check()
    except UnreachableError:
        return False
    except StoreError:
        return True
    return False


def test_a_second_owner_is_refused_and_a_dead_one_s_lease_is_taken_over(
    url: str, holder: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(RunFolderError, match=f"process {holder.pid} on .* is training") as caught:
        Lease.take(ObjectStore(url))
    assert "trial_name=" in str(caught.value)
    holder.kill()
    held = Lease.take(ObjectStore(url))
    held.check()
    held.release()
    held.release()
    assert ObjectStore(url).list_names() == {}
    Lease.take(ObjectStore(url)).release()


@pytest.mark.slow
def test_an_owner_that_was_paused_stops_writing(
    url: str, holder: subprocess.Popen[bytes], make_config: Callable[..., object]
) -> None:
    """Its run ends; the one that took over goes on."""
    holder.send_signal(signal.SIGSTOP)
    config = make_config(output_dir=url.removesuffix("/exp/t0"))
    run = RunFolder.create_or_resume(config)
    first = run._place._lease
    assert first is not None
    # What a third does to it, as this run did to the paused process.
    stolen = ObjectStore(url)
    found = stolen.read(".lock")
    while found is None or stolen.replace(".lock", b'{"owner": "a third"}', found.tag) is None:
        found = stolen.read(".lock")
    wait_until(lambda: is_lost(first))
    batch = [Trajectory(id="a", group_id="a", task_id="0")]
    for write in (
        lambda: run.append_metrics({"step": 1}),
        lambda: run.write_trajectories(1, batch),
    ):
        with pytest.raises(StoreError, match="a third has the run folder now"):
            write()
    with pytest.raises(StoreError, match="a third"):
        run.close()
    assert {*stolen.list_names()} == {".lock", "config.yaml", "manifest.json"}


def test_nothing_is_written_while_the_lease_is_in_doubt_and_all_when_it_is_not(
    url: str, s3_server, make_config: Callable[..., object]
) -> None:
    with RunFolder.create_or_resume(make_config(output_dir=url.removesuffix("/exp/t0"))) as run:
        held = run._place._lease
        s3_server.stop()
        try:
            with pytest.raises(UnreachableError, match="could not be renewed"):
                wait_until(held.check)  # None until it raises.
        finally:
            s3_server.start()
        run.append_metrics({"step": 1})
    assert [line["step"] for line in RunFolder.open(url).read_metrics()] == [1]


def test_a_trainer_writes_under_the_lease_of_its_command_alone(
    url: str, make_config: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "PATIENCE_SECONDS", 1.0)
    with RunFolder.create_or_resume(make_config(output_dir=url.removesuffix("/exp/t0"))) as run:
        owner = run.owner
        assert owner.pid == os.getpid()
        with RunFolder.join(owner) as trainer:
            assert trainer.path == Path(owner.copy_dir)
            trainer.append_metrics({"step": 1})
        with pytest.raises(StoreError, match=f"process {os.getpid()} on .* has the run folder"):  # noqa: PT012
            stranger = RunFolder.join(owner._replace(lease_id="another", copy_dir=""))
            wait_until(lambda: is_lost(stranger._place._lease))
            stranger.append_metrics({"step": 2})
        orphan = RunFolder.join(owner._replace(copy_dir=""))
    wait_until(lambda: is_lost(orphan._place._lease))
    with pytest.raises(StoreError, match="nobody has the run folder"):
        orphan.append_metrics({"step": 2})
    orphan.close()
    assert [line["step"] for line in RunFolder.open(url).read_metrics()] == [1]


@pytest.mark.slow
def test_a_trainer_that_was_replaced_writes_nothing_any_more(
    url: str, make_config: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its command goes on, and it may not have heard of it."""
    monkeypatch.setattr(remote_files, "PATIENCE_SECONDS", 1.0)
    with RunFolder.create_or_resume(make_config(output_dir=url.removesuffix("/exp/t0"))) as run:
        first = RunFolder.join(run.admit_trainer()._replace(copy_dir=""))
        first.append_metrics({"step": 1})
        cut_off = RunFolder.join(run.admit_trainer()._replace(copy_dir=""))
        monkeypatch.setattr(cut_off._place._lease, "_watch", lambda: False)
        with RunFolder.join(run.admit_trainer()._replace(copy_dir="")) as second:
            for replaced in (first, cut_off):
                with pytest.raises(StoreError):
                    replaced.append_metrics({"step": 2})
                replaced.close()
            second.append_metrics({"step": 2})
    assert [line["step"] for line in RunFolder.open(url).read_metrics()] == [1, 2]
