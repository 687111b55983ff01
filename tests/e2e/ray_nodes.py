"""A Ray cluster of this machine: a head, and nodes that can be lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil

_JOIN_SECONDS = 240.0
_OBJECT_STORE_BYTES = 80 * 2**20
#: On two cores that do something else besides.
_ENV = {
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_num_prestart_python_workers": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
#: Processes and temporary folders of its own. The first process takes all others along.
_OWN_HOST = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--")
#: $1: an empty folder; $2: the folder for temporary files; then shared folders below it, and "--".
_HIDE = """
set -e
own=$1 all=$2; shift 2
mount -t tmpfs tmpfs "$own"
while [ "$1" != -- ]; do
    mkdir -p "$own${1#"$all"}"
    mount --bind "$1" "$own${1#"$all"}"
    shift
done
shift
mount --rbind "$own" "$all"
mount -t tmpfs tmpfs /dev/shm
exec "$@"
"""


class RayNodes:
    """A head in this process, and nodes that the machine's temporary folders are hidden from, as
    far as it lets itself be divided.

    Args:
        head: options of the head, as ``Cluster`` takes them.
        folder: an empty folder.
        shared: folders that all nodes see.
    """

    def __init__(self, head: Mapping[str, Any], folder: Path, shared: Sequence[Path] = ()) -> None:
        from ray.cluster_utils import Cluster

        os.environ |= _ENV
        common = {"object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args={**common, **head})
        self.address: str = self._cluster.address
        self._folder = folder
        self._shared = shared
        self._nodes: list[subprocess.Popen[bytes]] = []

    def add(self, num_cpus: int, resources: Mapping[str, float]) -> None:
        """Adds a node, and returns when it has joined."""
        own = tempfile.mkdtemp(dir=self._folder)
        words = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
            *(f"--address={self.address}", f"--num-cpus={num_cpus}"),
            *(f"--object-store-memory={_OBJECT_STORE_BYTES}", "--disable-usage-stats"),
            f"--resources={json.dumps(dict(resources))}",
        ]
        if can_divide():
            hidden = (own, tempfile.gettempdir(), *map(str, self._shared))
            words = [*_OWN_HOST, "sh", "-c", _HIDE, "sh", *hidden, "--", *words]
        with (self._folder / "nodes.log").open("ab") as log:
            self._nodes.append(subprocess.Popen(words, stdout=log, stderr=log))
        deadline = time.monotonic() + _JOIN_SECONDS
        while len(self._cluster.global_state._live_node_ids()) < 1 + len(self._nodes):
            assert time.monotonic() < deadline, (self._folder / "nodes.log").read_text()
            time.sleep(0.2)

    def lose_node_of(self, process: psutil.Process) -> None:
        """Kills the node that a process is on, and all that is on it, at once."""
        above = {parent.pid for parent in process.parents()}
        [node] = [one for one in self._nodes if one.pid in above]
        self._nodes.remove(node)
        _kill(node)

    def lose_head(self) -> None:
        """Kills the head; the other nodes find out by themselves."""
        self._cluster.remove_node(self._cluster.head_node, allow_graceful=False)

    def close(self) -> None:
        """Kills what is left."""
        for node in self._nodes:
            _kill(node)
        self._cluster.shutdown()


def _kill(node: subprocess.Popen[bytes]) -> None:
    for process in [*psutil.Process(node.pid).children(recursive=True), node]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    node.wait()


@cache
def can_divide() -> bool:
    """True where this user may give processes a view of the machine of their own."""
    probe = [*_OWN_HOST, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    return subprocess.run(probe, capture_output=True).returncode == 0
