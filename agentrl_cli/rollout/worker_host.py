"""The host of the workers: a small process that starts, watches and ends them.

The trainer must not fork itself (it has threads and a model), and starting an interpreter with
an agent framework takes seconds. So this process, which has one thread and little memory, is
told once which libraries the agents need, imports them, and forks workers from itself: that
takes milliseconds, and their memory is shared. Where a library has started threads, which a fork
would lose, each worker is a new interpreter instead.

Workers are told of their work by the trainer itself. The host gives them a log and a limit of
memory, tells how they ended, and leaves nothing of theirs behind.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from agentrl_cli.rollout.worker_channel import Channel, ChannelError, Message
from agentrl_cli.rollout.worker_children import (
    adopt_orphans,
    count_threads,
    end_with_parent,
    find_ended,
    find_orphans,
    kill_worker,
    read_memory,
)
from agentrl_cli.rollout.worker_client import warm_up
from agentrl_cli.rollout.worker_log import WorkerLog
from agentrl_cli.rollout.worker_process import Worker, end_process, import_modules

#: The memory of the workers is looked at this often: a process fills about 0.3 GiB in that time.
_TICK_SECONDS = 0.2
#: Other processes that a worker has started are looked for once in so many looks.
_TICKS_PER_SEARCH = 5
_PIECE_BYTES = 2**16
#: What a pipe holds at most, by Linux's default for users without privileges, in such pieces.
_MAX_LAST_PIECES = 16
#: A thread is still counted for a moment after it was joined.
_THREAD_END_SECONDS = 1.0
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from agentrl_cli.rollout import worker_host; "
    "getattr(worker_host, sys.argv[1])(*sys.argv[2:])"
)


@dataclass(slots=True, eq=False)
class _Child:
    """A worker as its host knows it."""

    id: int
    pid: int
    output: int
    """The reading end of what it writes."""
    cause: str | None = None
    """Why the host has killed it, or could not start it."""
    memory_bytes: int = 0
    """What it used when it was killed for that."""
    popen: subprocess.Popen[bytes] | None = None
    """Of a worker that was not forked."""


class Host:
    """Serves the trainer until it is gone.

    Args:
        control: from the trainer, and back.
        max_memory_bytes: of one worker and what it has started; None: no limit.
    """

    def __init__(self, control: Channel, max_memory_bytes: int | None) -> None:
        self._control = control
        self._max_memory_bytes = max_memory_bytes
        self._children: dict[int, _Child] = {}
        self._log = WorkerLog()
        self._forks = True
        self._num_ticks = 0
        self._ticked_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._wakeup = os.pipe()
        for end in self._wakeup:
            os.set_blocking(end, False)

    def serve(self) -> Channel | None:
        """Returns None when the trainer is gone; in every worker that is forked, its channel."""
        adopt_orphans()
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        self._selector.register(self._control.socket, selectors.EVENT_READ)
        self._selector.register(self._wakeup[0], selectors.EVENT_READ)
        while True:
            is_watching = self._children and self._max_memory_bytes is not None
            for key, _ in self._selector.select(_TICK_SECONDS if is_watching else None):
                if isinstance(key.data, _Child):
                    self._copy_output(key.data)
                elif key.fd == self._wakeup[0]:
                    os.read(self._wakeup[0], 4096)
                elif (messages := self._control.take_pending()) is None:
                    self._end_all()
                    return None
                else:
                    for message in messages:
                        channel = self._obey(message)
                        if channel is not None:
                            return channel
            self._reap()
            self._tick()

    def _obey(self, message: Message) -> Channel | None:
        op = message["op"]
        if op == "start":
            return self._start(message["worker"], self._control.descriptors.popleft())
        if op == "preload":
            self._preload(message["modules"])
        elif op == "log":
            self._log.open(Path(message["path"]))
        elif op == "label":
            self._log.label(message["worker"], message["label"])
        elif op == "kill":
            child = self._children.get(message["worker"])
            if child is not None:
                self._kill(child, "trainer")
        else:
            raise ChannelError(f"the host knows no {op!r}")
        return None

    def _preload(self, modules: list[str]) -> None:
        import_modules(modules)
        warm_up()
        self._forks = _is_single_threaded()
        # What is here now is never freed: looking at it would copy its pages in every worker.
        gc.collect()
        gc.freeze()
        names = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        self._tell({"op": "preloaded", "forks": self._forks, "threads": names})

    def _start(self, worker: int, channel: int) -> Channel | None:
        """Starts a worker; gives its own channel in the worker itself."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        host, popen = os.getpid(), None
        try:
            if self._forks:
                pid = os.fork()
            else:
                popen = _start_interpreter(channel, writing)
                pid = popen.pid
        except OSError as error:
            # The system is short of processes or memory: those that run already shall go on.
            os.close(reading)
            self._tell_end(_Child(worker, 0, reading, "system"), 0, [str(error)])
        else:
            if pid == 0:
                os.close(reading)
                return self._become_worker(host, channel, writing)
            child = self._children[worker] = _Child(worker, pid, reading, popen=popen)
            self._selector.register(reading, selectors.EVENT_READ, child)
        os.close(writing)
        os.close(channel)
        return None

    def _become_worker(self, host: int, channel: int, output: int) -> Channel:
        """Leaves behind what is the host's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        self._control.close()
        self._log.close()
        for descriptor in (*self._wakeup, *(child.output for child in self._children.values())):
            os.close(descriptor)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.setsid()
        end_with_parent(host)
        return Channel(socket.socket(fileno=channel))

    def _copy_output(self, child: _Child) -> bool:
        """Copies a piece of what a worker wrote to the log; False: there is nothing now."""
        try:
            piece = os.read(child.output, _PIECE_BYTES)
        except BlockingIOError:
            return False
        if not piece:
            # Closed, maybe by a worker that lives on: no more will come.
            self._forget_output(child)
            return False
        self._log.write(child.id, piece)
        return True

    def _reap(self) -> None:
        """Takes in whoever has ended, and ends what it has left behind."""
        by_pid = {child.pid: child for child in self._children.values()}
        has_ended = False
        while (pid := find_ended()) is not None:
            if pid in by_pid:
                # Until it is reaped its number means its group, and no other.
                kill_worker(pid)
            status = os.waitpid(pid, 0)[1]
            has_ended = True
            if pid in by_pid:
                self._settle(by_pid.pop(pid), os.waitstatus_to_exitcode(status))
        if has_ended:
            for pid in find_orphans(set(by_pid)):
                kill_worker(pid)

    def _settle(self, child: _Child, status: int) -> None:
        # No more than can have been there when it ended: what it has started may write for ever.
        for _ in range(_MAX_LAST_PIECES):
            if not self._copy_output(child):
                break
        self._forget_output(child)
        os.close(child.output)
        del self._children[child.id]
        if child.popen is not None:
            # It must not look for a process that is reaped already.
            child.popen.returncode = status
        self._tell_end(child, status, self._log.forget(child.id))

    def _tell_end(self, child: _Child, status: int, tail: list[str]) -> None:
        self._tell(
            {
                "op": "ended",
                "worker": child.id,
                "status": status,
                "cause": child.cause,
                "memory_bytes": child.memory_bytes,
                "tail": tail,
            }
        )

    def _forget_output(self, child: _Child) -> None:
        if child.output in self._selector.get_map():
            self._selector.unregister(child.output)

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked_at < _TICK_SECONDS:
            return
        self._ticked_at = now
        self._num_ticks += 1
        if self._log.error is not None:
            self._tell({"op": "log_failed", "message": self._log.error})
            self._log.error = None
        if self._max_memory_bytes is None:
            return
        whole = self._num_ticks % _TICKS_PER_SEARCH == 0
        used = read_memory({child.pid for child in self._children.values()}, with_others=whole)
        for child in self._children.values():
            child_bytes = used.get(child.pid, 0)
            if child_bytes > self._max_memory_bytes and child.cause is None:
                child.memory_bytes = child_bytes
                self._kill(child, "memory")

    def _kill(self, child: _Child, cause: str) -> None:
        child.cause = child.cause or cause
        kill_worker(child.pid)

    def _end_all(self) -> None:
        for child in self._children.values():
            kill_worker(child.pid)

    def _tell(self, message: Message) -> None:
        try:
            self._control.send(message)
        except OSError:
            # The trainer is gone: so it is found to be when it is next listened to.
            self._end_all()


def _is_single_threaded() -> bool:
    """Whether there is no thread that a fork would lose; one that is just ending is waited for."""
    deadline = time.monotonic() + _THREAD_END_SECONDS
    while (num_threads := count_threads()) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    return num_threads == 1


def build_command(function: str, *arguments: str) -> list[str]:
    """What runs a function of this module in a new interpreter.

    The modules that a user's agent imports are found there as they are here, be it beside the
    YAML, by PYTHONPATH, or by what a test has added to ``sys.path``.
    """
    # "" stands for the current folder, of which an agent may leave.
    path = [str(Path(entry).absolute()) for entry in sys.path]
    # Unbuffered: what an agent printed last is not lost with its process.
    return [sys.executable, "-u", "-c", _CODE, json.dumps(path), function, *arguments]


def _start_interpreter(channel: int, output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        build_command("run_started_worker", str(os.getpid()), str(channel)),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(channel,),
        start_new_session=True,
    )


def run_host(control: str, max_memory_bytes: str) -> None:
    """The whole life of a host, and of the workers that are forked from it."""
    limit = int(max_memory_bytes) or None
    channel = Host(Channel(socket.socket(fileno=int(control))), limit).serve()
    if channel is not None:
        Worker(channel).run()
        end_process()


def run_started_worker(host: str, channel: str) -> None:
    """The whole life of a worker with an interpreter of its own."""
    end_with_parent(int(host))
    Worker(Channel(socket.socket(fileno=int(channel)))).run()
    end_process()
