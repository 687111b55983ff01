from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentrl_cli.errors import ModelError, StoppedError
from agentrl_cli.log import SilentObserver
from agentrl_cli.models.cache import make_once, resolve_cache_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fill(folder: Path) -> None:
    folder.mkdir()
    (folder / "file").write_text("whole")


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("AGENTRL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve_cache_folder() == tmp_path / "agentrl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_cache_folder() == tmp_path / ".cache" / "agentrl"


def test_made_once(cache: Path) -> None:
    calls: list[Path] = []

    def make(folder: Path) -> None:
        calls.append(folder)
        fill(folder)

    first = make_once("thing", make, SilentObserver())
    assert first == make_once("thing", make, SilentObserver()) == cache / "thing"
    assert (first / "file").read_text() == "whole"
    assert len(calls) == 1
    assert calls[0] != first


def test_a_failure_leaves_nothing_and_is_not_remembered(cache: Path) -> None:
    def fail(folder: Path) -> None:
        fill(folder)
        raise RuntimeError("died")

    with pytest.raises(RuntimeError, match="died"):
        make_once("thing", fail, SilentObserver())
    assert not [path for path in cache.iterdir() if path.is_dir()]
    assert make_once("thing", fill, SilentObserver()).is_dir()


def test_what_a_killed_process_left_is_removed(cache: Path) -> None:
    fill_killed = cache / "thing.12345.tmp"
    fill_killed.mkdir(parents=True)
    other = cache / "other.1.tmp"
    other.mkdir()
    make_once("thing", fill, SilentObserver())
    assert not fill_killed.exists()
    assert other.exists()


def test_two_at_once_make_it_once(cache: Path) -> None:
    started, go_on = threading.Event(), threading.Event()
    messages: list[str] = []
    calls: list[str] = []

    class Listener(SilentObserver):
        def on_message(self, text: str) -> None:
            messages.append(text)
            go_on.set()

    def slowly(folder: Path) -> None:
        calls.append("slowly")
        started.set()
        assert go_on.wait(20)
        fill(folder)

    def again(folder: Path) -> None:
        calls.append("again")
        fill(folder)

    first = threading.Thread(target=make_once, args=("thing", slowly, SilentObserver()))
    first.start()
    assert started.wait(20)
    make_once("thing", again, Listener())
    first.join(20)
    assert calls == ["slowly"]
    assert "another process is making thing" in messages[0]


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.write_text("a file, not a folder")
    with pytest.raises(ModelError, match="AGENTRL_CACHE=SOME_FOLDER"):
        make_once("thing", fill, SilentObserver())


def test_a_killed_process_does_not_hold_the_lock(cache: Path) -> None:
    code = (
        "import os, sys\n"
        "from agentrl_cli.models.cache import make_once\n"
        "from agentrl_cli.log import SilentObserver\n"
        "def make(folder):\n    folder.mkdir()\n    os._exit(9)\n"
        "make_once('thing', make, SilentObserver())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert ended.returncode == 9
    assert not (cache / "thing").exists()
    assert make_once("thing", fill, SilentObserver()).is_dir()


def test_who_waits_for_another_process_can_be_stopped(cache: Path) -> None:
    def stop() -> None:
        raise StoppedError

    def make(folder: Path) -> None:
        with pytest.raises(StoppedError):
            make_once("thing", fill, SilentObserver(), stop)
        fill(folder)

    assert make_once("thing", make, SilentObserver()).is_dir()
