from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl_cli.errors import EngineError
from agentrl_cli.launch.processes.managed_process import ManagedProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

#: Starts a child and a grandchild of which one leaves the process group, as servers' workers may;
#: writes the three ids, then waits.
FAMILY = """
import os, subprocess, sys, time
grandchild = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
child = (
    "import subprocess, sys, time, os;"
    "open(sys.argv[2], 'w').write(str(os.getpid()));"
    "subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[3]], start_new_session=True);"
    "time.sleep(600)"
)
folder = sys.argv[1]
subprocess.Popen([sys.executable, "-c", child, grandchild, folder + "/child", folder + "/grand"])
open(folder + "/top", "w").write(str(os.getpid()))
time.sleep(600)
"""


def start_python(
    code: str, folder: Path, *args: str, env: dict[str, str] | None = None
) -> ManagedProcess:
    argv = (sys.executable, "-c", textwrap.dedent(code), *args)
    process = ManagedProcess("thing", argv, env or {}, folder / "thing.log")
    process.start()
    return process


def wait_for(condition: Callable[[], object], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def read_pids(folder: Path) -> dict[str, int]:
    names = ("top", "child", "grand")
    wait_for(lambda: all((folder / n).is_file() and (folder / n).read_text() for n in names))
    return {name: int((folder / name).read_text()) for name in names}


def is_alive(pid: int) -> bool:
    """False also for a zombie, whose parent is not ours to teach."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@pytest.fixture
def family(tmp_path: Path) -> Iterator[tuple[ManagedProcess, dict[str, int]]]:
    process = start_python(FAMILY, tmp_path, str(tmp_path))
    yield process, read_pids(tmp_path)
    process.stop(term_seconds=0)


@pytest.mark.parametrize(
    ("code", "status"),
    [("raise SystemExit(7)", 7), ("pass", 0), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_the_exit_status_is_the_commands(code: str, status: int, tmp_path: Path) -> None:
    process = start_python(code, tmp_path)
    assert process.wait(10) == status
    assert process.poll() == status
    assert not Path(f"/proc/{process.pid}").exists(), "no zombie is left"


def test_what_cannot_be_started_says_so(tmp_path: Path) -> None:
    process = ManagedProcess("thing", ("/no/such/program",), {}, tmp_path / "log")
    process.start()
    assert process.wait(10) == 127
    assert process.read_log().endswith("\n/no/such/program: No such file or directory\n")
    with pytest.raises(EngineError, match="thing cannot be started"):
        ManagedProcess("thing", ("true",), {}, tmp_path / "none" / "log").start()


def test_the_log_is_appended_to_and_what_is_read_is_of_the_last_start(tmp_path: Path) -> None:
    process = start_python("print(*range(50), sep='\\n')", tmp_path)
    for number in (1, 2):
        process.wait(10)
        assert process.log_path.read_text().count("=== thing starts, 20") == number
        header, *lines = process.read_log().splitlines()
        assert header.startswith("=== thing starts, 20")
        assert lines == [str(line) for line in range(50)]
        if number == 1:
            process.start()


def test_the_command_gets_environment_and_descriptors_and_no_terminal(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    code = """
        import os, sys
        print(os.environ["MINE"], "HOME" in os.environ, sys.stdin.read() == "")
        os.write(int(sys.argv[1]), b"hello")
    """
    process = ManagedProcess(
        "thing",
        (sys.executable, "-c", textwrap.dedent(code), str(write_end)),
        {"MINE": "yes"},
        tmp_path / "log",
        base_env={"PATH": os.environ["PATH"]},
        pass_fds=[write_end],
    )
    process.start()
    os.close(write_end)
    assert process.wait(10) == 0
    assert process.read_log().endswith("\nyes False True\n")
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read() == b"hello", "the reaper must not hold the other end"


@pytest.mark.parametrize(
    ("handler", "term_seconds", "status"),
    [("lambda *_: sys.exit(3)", 10.0, 3), ("signal.SIG_IGN", 0.3, 137)],
    ids=["ends in its own way", "is killed"],
)
def test_stop_asks_first_and_kills_what_does_not_listen(
    handler: str, term_seconds: float, status: int, tmp_path: Path
) -> None:
    code = f"""
        import signal, sys, time
        signal.signal(signal.SIGTERM, {handler})
        print("ready", flush=True)
        time.sleep(600)
    """
    process = start_python(code, tmp_path)
    wait_for(lambda: "ready" in process.read_log())
    started = time.monotonic()
    assert process.stop(term_seconds=term_seconds) == status
    assert time.monotonic() - started < 5


def test_stop_of_a_process_that_never_started_is_nothing(tmp_path: Path) -> None:
    assert ManagedProcess("thing", ("true",), {}, tmp_path / "log").stop() is None


@pytest.mark.parametrize("is_killed", [True, False])
def test_nothing_outlives_the_command_not_even_what_has_left_its_group(
    family: tuple[ManagedProcess, dict[str, int]], is_killed: bool
) -> None:
    process, pids = family
    assert os.getsid(pids["grand"]) != os.getsid(pids["top"])
    if is_killed:
        os.kill(pids["top"], signal.SIGKILL)
        assert process.wait(10) == 137
    else:
        process.stop()
    assert not [name for name, pid in pids.items() if is_alive(pid)]


def test_a_killed_reaper_takes_the_group_along(
    family: tuple[ManagedProcess, dict[str, int]],
) -> None:
    process, pids = family
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == 137
    wait_for(lambda: not is_alive(pids["top"]) and not is_alive(pids["child"]))
    # It has a session of its own, and nobody is left who knows it.
    os.kill(pids["grand"], signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_killed_parent(number: int, tmp_path: Path) -> None:
    parent = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from agentrl_cli.launch.processes.managed_process import ManagedProcess
        folder = Path(sys.argv[1])
        argv = (sys.executable, "-c", sys.argv[2], str(folder))
        process = ManagedProcess("thing", argv, {}, folder / "thing.log")
        process.start()
        (folder / "reaper").write_text(str(process.pid))
        time.sleep(600)
        """
    )
    running = subprocess.Popen([sys.executable, "-c", parent, str(tmp_path), FAMILY])
    try:
        pids = read_pids(tmp_path)
        wait_for(lambda: (tmp_path / "reaper").is_file() and (tmp_path / "reaper").read_text())
        pids["reaper"] = int((tmp_path / "reaper").read_text())
        assert all(is_alive(pid) for pid in pids.values())
    finally:
        running.send_signal(number)
        running.wait(10)
    wait_for(lambda: not any(is_alive(pid) for pid in pids.values()))


def test_the_end_of_the_thread_that_started_it_is_not_the_parents(tmp_path: Path) -> None:
    # Linux sends the signal of a parent's death when the starting thread ends.
    started: list[ManagedProcess] = []
    code = "import time; print('ready', flush=True); time.sleep(600)"
    thread = threading.Thread(target=lambda: started.append(start_python(code, tmp_path)))
    thread.start()
    thread.join()
    wait_for(lambda: "ready" in started[0].read_log())
    assert started[0].wait(0.5) is None
    assert started[0].stop() == 128 + signal.SIGTERM


def test_without_linux_the_process_group_is_what_is_killed(tmp_path: Path) -> None:
    # As on macOS, where there is no /proc and no prctl.
    code = """
        import sys
        from agentrl_cli import process_reaper
        process_reaper._IS_LINUX = False
        sys.exit(process_reaper.main(sys.argv[1:]))
    """
    family = """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(sys.argv[1], "w").write(str(child.pid))
        sys.exit(5)
    """
    left = tmp_path / "left"
    argv = [sys.executable, "-c", textwrap.dedent(code), str(os.getpid())]
    argv += [sys.executable, "-c", textwrap.dedent(family), str(left)]
    assert subprocess.run(argv, timeout=30, start_new_session=True, check=False).returncode == 5
    assert not is_alive(int(left.read_text()))
