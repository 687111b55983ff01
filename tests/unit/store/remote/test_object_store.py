"""Object storage as the run folder sees it, on a real S3 server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrl_cli.errors import MissingExtraError, RunFolderError
from agentrl_cli.store.remote import object_store
from agentrl_cli.store.remote.object_store import ObjectStore
from agentrl_cli.store.remote.remote_files import UnreachableError
from agentrl_cli.store.working_copy import open_location


@pytest.fixture
def files(s3_bucket: str) -> ObjectStore:
    return ObjectStore(f"{s3_bucket}/runs/exp/t0")


def test_files_come_back_whole(files: ObjectStore, tmp_path: Path) -> None:
    large = os.urandom(2 * object_store._PART_BYTES + 12345)
    contents = {"empty": b"", "pending/a%2Fb~ c.jsonl": b"x\n" * 9, "checkpoints/s/deep/w": large}
    for number, (name, content) in enumerate(contents.items()):
        path = tmp_path / str(number)
        path.write_bytes(content)
        files.put(name, path)
    assert files.list_names() == {name: len(content) for name, content in contents.items()}
    assert [*files.list_names("checkpoints")] == ["checkpoints/s/deep/w"]
    assert files.list_names("check") == {}
    for name, content in contents.items():
        assert files.get(name, tmp_path / "back" / name)
        assert (tmp_path / "back" / name).read_bytes() == content
    assert not files.get("none", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    files.delete(["none", "pending/a%2Fb~ c.jsonl"])
    assert [*files.list_names()] == ["checkpoints/s/deep/w", "empty"]


def test_of_two_who_create_or_replace_one_wins(files: ObjectStore) -> None:
    first = files.create("lock", b"1")
    assert first is not None
    assert files.create("lock", b"2") is None
    assert files.read("lock") == (b"1", first)
    second = files.replace("lock", b"3", first)
    assert second not in (None, first)
    assert files.replace("lock", b"4", first) is None
    assert files.read("lock") == (b"3", second)
    assert files.replace("none", b"5", first) is None
    assert files.read("none") is None


def test_a_file_that_changes_while_it_is_read_is_never_a_mixture(
    files: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_PART_BYTES", 4)
    files._obs.put(files._store, "name", b"old-old-old-")
    get, parts = files._obs.get, []

    def get_and_change(*given: object, **options: object) -> object:
        parts.append(options)
        if len(parts) == 2:
            files._obs.put(files._store, "name", b"new-new-new-")
        return get(*given, **options)

    monkeypatch.setattr(files._obs, "get", get_and_change)
    with pytest.raises(UnreachableError):
        files.get("name", tmp_path / "here")
    assert not (tmp_path / "here").exists()
    assert files.get("name", tmp_path / "here")
    assert (tmp_path / "here").read_bytes() == b"new-new-new-"


@pytest.mark.parametrize(
    ("url", "environment", "words"),
    [
        ("s3://no-such-bucket/runs/e/t", {}, ["there is no such bucket", "output_dir=s3://"]),
        ("s3n://bucket/runs/e/t", {}, ["did you mean 's3'?", "gs", "a folder of this machine"]),
        ("s3://bucket/e/t", {"AWS_ACCESS_KEY_ID": ""}, ["AccessKeyId", "export NAME=VALUE"]),
        ("s3://bucket/e/t", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, ["error sending request"]),
        ("s3://bucket/e/t", {"AWS_ENDPOINT_URL": "nonsense"}, ["AWS_ENDPOINT_URL for a server"]),
    ],
)
def test_what_cannot_be_used_is_refused(
    s3_bucket: str, monkeypatch, url: str, environment: dict[str, str], words: list[str]
) -> None:
    monkeypatch.setattr(object_store, "_START_SECONDS", 0.0)
    for name, value in environment.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(RunFolderError) as caught:
        open_location(url)
    assert url in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentrl-cli\[object-storage\]'"):
        open_location("s3://bucket/runs/e/t")
