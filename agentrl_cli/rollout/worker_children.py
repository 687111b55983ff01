"""What a host asks of the operating system: who descends from whom, memory, and how to end it."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

#: From <sys/prctl.h>: a signal when the parent dies, and: orphans become mine.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IS_LINUX = sys.platform == "linux"
#: When memory is short, the kernel ends the process with the highest score first.
_OOM_SCORE = 800


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent has died."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """Prepares a worker: it ends with its host, is the first to go when memory is short, leaves
    no core files, and keeps the orphans of what it starts."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
    adopt_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if _IS_LINUX:
        try:
            Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
        except OSError as error:
            print(f"oom_score_adj stays as it is: {error}", file=sys.stderr)


def count_threads() -> int:
    """Threads of this process, those of native libraries too; 0 where that is not known."""
    return len(list(Path("/proc/self/task").iterdir())) if _IS_LINUX else 0


def kill_worker(pid: int) -> None:
    """SIGKILL for a process and its group, if there are such."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # It is gone, or (macOS) there are zombies only.


def find_ended() -> int | None:
    """A child of this process that has ended and is not reaped yet; None: there is none."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found is not None else None


def find_orphans(workers: set[int]) -> list[int]:
    """Children of this process that it did not start: what ended workers have left behind."""
    if not _IS_LINUX:
        return []
    me = os.getpid()
    children = Path(f"/proc/self/task/{me}/children")
    if children.exists():
        found = {int(pid) for pid in children.read_bytes().split()}
    else:
        found = {pid for pid, (parent, _) in _read_processes().items() if parent == me}
    return sorted(found - workers)


def read_memory(workers: set[int], *, with_others: bool) -> dict[int, int]:
    """Bytes of RAM by worker; ``with_others``: what it has started included."""
    if not _IS_LINUX:
        return {}
    if not with_others:
        return {pid: _read_own_memory(pid) for pid in workers}
    used, processes = dict.fromkeys(workers, 0), _read_processes()
    for pid, (parent, num_bytes) in processes.items():
        # A worker is the parent of what its descendants leave, so the way up leads to it.
        while pid not in used and parent in processes:
            pid, parent = parent, processes[parent][0]
        if pid in used:
            used[pid] += num_bytes
    return used


def _read_own_memory(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/statm").read_bytes().split()
    except OSError:
        return 0
    return int(fields[1]) * resource.getpagesize()


def _read_processes() -> dict[int, tuple[int, int]]:
    """Parent and bytes of RAM of every process."""
    page, found = resource.getpagesize(), {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The name of the program, in brackets, may hold anything.
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        found[int(folder.name)] = (int(fields[1]), int(fields[21]) * page)
    return found


def _prctl(option: int, value: int) -> None:
    if _IS_LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
