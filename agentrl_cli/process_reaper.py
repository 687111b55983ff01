"""Runs one command so that nothing of it outlives its parent, and ends with its exit status.

    python -I -S process_reaper.py PARENT_PID COMMAND [ARGUMENT ...]

A process that is killed takes none of its children along: vLLM's engine, for one, goes on for
ever when its API server or its launcher dies. This small process stands between the two. It
leads a session and process group of its own and ends everything below it when the command has
ended or the parent has died, also what has left the group. The standard library only: it must
start in milliseconds and work in any interpreter. (Where there is no Linux, a process that has
left the group is not found.)

All of agentrl's prctl and /proc handling is in this file: other processes use its public
functions.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

#: This program.
REAPER_PATH = Path(__file__)
#: From <sys/prctl.h>: a signal when the parent's thread dies, and: orphans become mine.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

#: The parent's death is looked for this often where no signal tells of it.
_CHECK_SECONDS = 1.0
#: SIGKILL takes effect at once, save in a process that waits for a disk or a driver.
_KILL_SECONDS = 20.0
#: What a shell answers for a command that does not exist.
_NOT_FOUND = 127
#: What the parent sends to have everything killed now; other signals go on to the command.
KILL_SIGNAL = signal.SIGUSR2
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: A child has ended; the parent may have.
_WAKING = (signal.SIGCHLD, signal.SIGUSR1)
_IS_LINUX = sys.platform.startswith("linux")


def build_reaper_command(command: Sequence[str]) -> list[str]:
    """The command line that runs ``command`` under a reaper, as a child of this process."""
    return [sys.executable, "-I", "-S", str(REAPER_PATH), str(os.getpid()), *command]


def end_with_parent(parent: int) -> None:
    """Lets the kernel kill this process when the thread that started it ends (Linux).

    Exits at once if ``parent``, the process id, has ended already.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def kill_group(pid: int) -> None:
    """SIGKILL for the process group that ``pid`` leads, if there is one."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # It is empty; macOS says "not permitted" of a group of zombies.


def main(argv: list[str]) -> int:
    """The exit status of the command; 128 + the signal's number when one ended it."""
    parent, command = int(argv[0]), argv[1:]
    if os.getpid() != os.getsid(0):
        os.setsid()
    received: list[int] = []
    wakeup, wakeup_write = os.pipe()
    for end in (wakeup, wakeup_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    for number in (*_FORWARDED, KILL_SIGNAL):
        signal.signal(number, lambda number, _frame: received.append(number))
    for number in _WAKING:
        signal.signal(number, lambda _number, _frame: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    # The parent may have died before this process asked to be told of it.
    if os.getppid() != parent:
        return 128 + signal.SIGKILL
    child = _start(command)
    if child is None:
        return _NOT_FOUND
    _close_inherited(kept=sorted((wakeup, wakeup_write)))
    try:
        return _wait(child, parent, received, wakeup)
    finally:
        _kill_everything_below()


def _start(command: list[str]) -> int | None:
    """The process id of the command; None, said to the log, where it cannot be started."""
    reaper = os.getpid()
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            # What was passed on to the reaper is meant for the command.
            close_fds=False,
            # There are no threads here, which would make this unsafe.
            preexec_fn=lambda: end_with_parent(reaper),
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return None
    return child.pid


def _close_inherited(kept: list[int]) -> None:
    """Closes what the command has inherited: when the command closes it, it is to be closed."""
    first = 3
    for descriptor in kept:
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _wait(child: int, parent: int, received: list[int], wakeup: int) -> int:
    while True:
        while received:
            number = received.pop(0)
            if number == KILL_SIGNAL:
                return 128 + signal.SIGKILL
            _send(child, number)
        status = _reap(child)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        # The signal of a parent's death comes when the thread that started this process ends;
        # only another parent's id says that the process did.
        if os.getppid() != parent:
            return 128 + signal.SIGKILL
        if select.select([wakeup], [], [], _CHECK_SECONDS)[0]:
            os.read(wakeup, 4096)


def _reap(child: int) -> int | None:
    """Takes in whatever has ended, also orphans; the status of ``child`` if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def _kill_everything_below() -> None:
    """SIGKILL for all descendants, repeated until there are none: they may be forking."""
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        left = _find_descendants() if _IS_LINUX else _find_group()
        if not left:
            return
        for pid in left:
            _send(pid, signal.SIGKILL)
        _reap(0)
        time.sleep(0.01)
    print(f"processes that cannot be killed: {left}", file=sys.stderr, flush=True)


def _find_descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # The name of the program, in brackets, may hold anything.
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue  # It has ended meanwhile.
            if len(fields) > 1:
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: list[int] = []
    to_visit = [os.getpid()]
    while to_visit:
        below = children.get(to_visit.pop(), [])
        found += below
        to_visit += below
    return found


def _find_group() -> list[int]:
    me = os.getpid()
    command = ["ps", "-A", "-o", "pid=,pgid=,stat="]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listing:
        rows = [line.split() for line in listing.communicate()[0].splitlines()]
    return [
        int(pid)
        for pid, group, state in rows
        if int(group) == me and int(pid) not in (me, listing.pid) and not state.startswith("Z")
    ]


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # It has ended by itself.


def _prctl(option: int, value: int) -> None:
    if _IS_LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
