from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from agentrl_cli.cli.command_exit import crashes_logged, run_reporting_failures, stop_on_signals
from agentrl_cli.errors import ConfigError, EngineError, StoreError


def fail(error: BaseException | None):
    def command() -> None:
        if error is not None:
            raise error

    return command


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (ConfigError("bad key"), 2),
        (EngineError("it died"), 1),
        (SystemExit(), 0),
        (SystemExit(2), 2),
        (SystemExit("text"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(130), 130),
        (ZeroDivisionError("x"), 1),
    ],
)
def test_exit_codes(error: BaseException | None, code: int, capsys) -> None:
    assert run_reporting_failures(fail(error)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_messages_go_to_stderr_whole(capsys) -> None:
    run_reporting_failures(fail(ConfigError("c.yaml:3: line one\n  line [two]")))
    assert capsys.readouterr().err == "error: c.yaml:3: line one\n  line [two]\n"


def test_the_unexpected_says_where_to_look(capsys, monkeypatch) -> None:
    run_reporting_failures(fail(ZeroDivisionError("division by zero")))
    text = capsys.readouterr().err
    assert "unexpected ZeroDivisionError: division by zero (test_command_exit.py:" in text
    assert "AGENTRL_DEBUG=1" in text
    monkeypatch.setenv("AGENTRL_DEBUG", "1")
    run_reporting_failures(fail(ZeroDivisionError("division by zero")))
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_crashes_are_written_to_the_run_s_log_without_secrets(tmp_path: Path, capsys) -> None:
    log = tmp_path / "command.log"

    def command() -> None:
        with crashes_logged(lambda: nullcontext(log)):
            raise ZeroDivisionError("key sk-verysecretkey123")

    assert run_reporting_failures(command) == 1
    written = log.read_text()
    assert "Traceback (most recent call last)" in written
    assert "sk-verysecretkey123" not in written
    assert f"The full traceback is in {log}" in capsys.readouterr().err


def test_expected_errors_leave_no_log_and_what_cannot_be_logged_is_raised(tmp_path: Path) -> None:
    log = tmp_path / "command.log"
    with pytest.raises(ConfigError), crashes_logged(lambda: nullcontext(log)):
        raise ConfigError("x")
    assert not log.exists()
    with pytest.raises(ZeroDivisionError) as caught, crashes_logged(fail(StoreError("no room"))):
        raise ZeroDivisionError
    assert "no room" in caught.value.__notes__[0]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_work_goes_on_when_nobody_reads_it(tmp_path: Path, stream: str) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from agentrl_cli.cli.command_exit import outlive_readers\n"
        "outlive_readers()\n"
        f"for _ in range(20000): print('a line', file=sys.{stream})\n"
        f"sys.{stream}.flush()\n"
        "Path('done').touch()\n"
    )
    command = [sys.executable, "-c", code]
    pipe = {stream: subprocess.PIPE}
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(command, cwd=tmp_path, env=env, text=True, **pipe) as process:
        pipe_end = getattr(process, stream)
        assert pipe_end.readline() == "a line\n"
        pipe_end.close()
        assert process.wait(60) == 0
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_stops(number: int) -> None:
    said: list[str] = []
    heard = threading.Event()

    def hear(text: str) -> None:
        said.append(text)
        heard.set()

    before = signal.getsignal(number)
    with stop_on_signals(hear) as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.is_set()
        assert stop.exit_code == 128 + number
        assert heard.wait(5)
        assert "Ctrl-C again stops at once" in said[0]
        with pytest.raises(KeyboardInterrupt):
            _signal_and_wait(number)
    assert signal.getsignal(number) is before
    assert len(said) == 1


def _signal_and_wait(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(1)


def test_a_display_that_is_busy_does_not_block_the_signal() -> None:
    """The handler runs in the main thread, which may hold the lock that showing needs."""
    lock = threading.Lock()

    def show(text: str) -> None:
        with lock:
            pass

    with stop_on_signals(show) as stop, lock:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set()
