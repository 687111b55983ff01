"""``agentrl`` commands forked from a process that has imported what they need.

Of a command that trains two small steps, nearly all time is imports. Tests of wheels and of the
start itself do without this.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

_PRELOADED = (
    *("agentrl_cli.cli.app", "agentrl_cli.launch.local_run", "agentrl_cli.evaluate.eval_run"),
    *("agentrl_cli.engine.embedded.embedded_engine", "agentrl_cli.inspector.inspect_run"),
    *("agentrl_cli.launch.trainer", "agentrl_cli.launch.run_models", "agentrl_cli.train.learner"),
    *("transformers.models.qwen2.modeling_qwen2", "transformers.models.llama.modeling_llama"),
)
#: Variables that Python and libraries read when they are loaded.
_READ_AT_START = ("PYTHON", "LANG", "LC_", "OMP_", "MKL_", "HF_", "TRANSFORMERS_", "LD_")
_PR_SET_CHILD_SUBREAPER = 36
_LOCK = threading.Lock()


class ForkedCommand(subprocess.Popen[str]):
    """``python -m agentrl_cli ARGUMENTS``, a child of this process as any that is started.

    Where ``env`` has other values of what is read at a start, it is started.
    """

    def __init__(self, arguments: list[str], **options: Any) -> None:
        command = [sys.executable, "-m", "agentrl_cli", *arguments]
        super().__init__(command, text=True, **options)

    def _execute_child(self, args: Any, *others: Any) -> None:
        # The parameters of Popen's own method, in CPython 3.11 to 3.14.
        cwd, env, pipes = others[4] or Path.cwd(), dict(others[5] or os.environ), others[9:15]
        if _list_read_at_start(env) != _list_read_at_start(_server_environment()):
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        stdin, _, _, stdout, _, stderr = pipes
        with Path(os.devnull).open() as nothing:
            given = (nothing.fileno() if stdin == -1 else stdin, stdout, stderr)
            descriptors = [number if one == -1 else one for number, one in enumerate(given)]
            self.pid = _fork({"words": args[3:], "cwd": os.fspath(cwd), "env": env}, descriptors)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _list_read_at_start(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_READ_AT_START)}


@cache
def _server_environment() -> dict[str, str]:
    return dict(os.environ) | command_environment()


def command_environment() -> dict[str, str]:
    """What commands find in their environment besides this process's."""
    root = str(Path(__file__).parents[2])
    return {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@cache
def _connect() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, __file__], stdin=theirs, env=_server_environment()
        )
    atexit.register(server.wait)
    atexit.register(ours.close)
    return ours


def _fork(command: dict[str, Any], descriptors: list[int]) -> int:
    """The process of a command; it has become a child of this one when the call returns."""
    libc = ctypes.CDLL(None)
    with _LOCK:
        connection = _connect()
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(connection, [json.dumps(command).encode()], descriptors)
            answer = connection.recv(100)
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    if not answer:
        raise RuntimeError("the process that commands are forked from has ended")
    return int(answer)


def _serve() -> None:
    """Forks a command for each message; returns in the forks, with ``sys.argv`` and the rest set,
    and when nobody is there any more."""
    connection = socket.socket(fileno=os.dup(0))
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            os._exit(0)
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            # Who is left behind by this process becomes a child of the one that asked.
            if pid := os.fork():
                os.write(writing, str(pid).encode())
                os._exit(0)
            connection.close()
            os.close(reading)
            os.close(writing)
            _become(json.loads(message), descriptors)
            return
        os.waitpid(between, 0)
        connection.send(os.read(reading, 100))
        for descriptor in (*descriptors, reading, writing):
            os.close(descriptor)


def _become(command: dict[str, Any], descriptors: list[int]) -> None:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, closefd=False)  # noqa: SIM115 - for the process's life
        for number, mode in enumerate(("r", "w", "w"))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.chdir(command["cwd"])
    os.environ.clear()
    os.environ.update(command["env"])
    tempfile.tempdir = None
    # Whose parent ignores it, such as a worker of pytest-xdist, would ignore it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["agentrl_cli", *command["words"]]
    sys.path[0] = command["cwd"]


def _run() -> NoReturn:
    """Runs the command and ends as Python does, without taking all modules apart."""
    code: object = 1
    try:
        runpy.run_module("agentrl_cli", run_name="__main__", alter_sys=True)
        code = None
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    for module in _PRELOADED:
        importlib.import_module(module)
    # Else the first collection in each command copies every page.
    gc.freeze()
    _serve()
    _run()
