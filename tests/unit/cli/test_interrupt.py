from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from agentrl_cli.cli.interrupt import stop_on_signals


def test_the_first_signal_asks_and_the_second_stops() -> None:
    said: list[str] = []
    heard = threading.Event()

    def hear(text: str) -> None:
        said.append(text)
        heard.set()

    before = signal.getsignal(signal.SIGINT)
    with stop_on_signals(hear) as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set()
        assert heard.wait(5)
        assert "Ctrl-C again stops at once" in said[0]
        with pytest.raises(KeyboardInterrupt):
            _signal_and_wait()
    assert signal.getsignal(signal.SIGINT) is before
    assert len(said) == 1


def _signal_and_wait() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)


def test_terminate_drains_as_well() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals(print) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_display_that_is_busy_does_not_block_the_signal() -> None:
    """The handler runs in the main thread, which may hold the lock that showing needs."""
    lock = threading.Lock()

    def show(text: str) -> None:
        with lock:
            pass

    with stop_on_signals(show) as stop, lock:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set()


def test_outside_the_main_thread_nothing_is_installed() -> None:
    seen: list[bool] = []

    def work() -> None:
        with stop_on_signals(print) as stop:
            seen.append(stop.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(5)
    assert seen == [False]
