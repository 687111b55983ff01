"""How an agent can end in a process of its own, besides finishing."""

from __future__ import annotations

import signal
from typing import Any

from agentrl_cli.records import Failure

_SIGNAL_HINTS = {
    "SIGSEGV": " (a crash in native code)",
    "SIGABRT": " (native code gave up)",
    "SIGBUS": " (a crash in native code, or a full disk)",
    "SIGFPE": " (a crash in native code)",
    "SIGILL": " (native code for another processor)",
    "SIGKILL": ", and agentrl did not: most often the system ran out of memory. Lower "
    "rollout.num_workers, or set rollout.worker_max_memory_gib",
}


class AgentRunError(Exception):
    """What the agent raised in its process.

    Attributes:
        failure: the same, as it was told.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class AgentProcessError(Exception):
    """The agent's process ended before the agent had."""


class AgentCrashError(AgentProcessError):
    """A signal ended the agent's process."""


class AgentExitError(AgentProcessError):
    """The agent ended its own process."""


class AgentMemoryError(AgentProcessError):
    """The agent took more memory than it may."""


def build_process_error(
    ended: dict[str, Any] | None, max_memory_gib: float | None
) -> AgentProcessError:
    """The error for a process that ended as its host tells; None: the host does not say."""
    if ended is None:
        return AgentProcessError("the agent's process was lost together with its host's")
    tail = format_tail(ended)
    status = int(ended["status"])
    if ended["cause"] == "system":
        return AgentProcessError(f"the system starts no further process for an agent{tail}")
    if ended["cause"] == "trainer":
        return AgentProcessError(
            "the agent's process was killed: it closed the connection to the trainer, whose file "
            f"descriptor is not the agent's{tail}"
        )
    if ended["cause"] == "memory":
        used = ended["memory_bytes"] / 2**30
        return AgentMemoryError(
            f"the agent's process was killed: it used {used:.2f} GiB of memory, and "
            f"rollout.worker_max_memory_gib is {max_memory_gib:g}{tail}"
        )
    if status < 0:
        name = name_signal(-status)
        hint = _SIGNAL_HINTS.get(name, "")
        return AgentCrashError(f"the agent's process was killed by {name}{hint}{tail}")
    return AgentExitError(
        f"the agent's process ended itself with exit status {status}, as os._exit({status}) does"
        f"{tail}"
    )


def name_signal(number: int) -> str:
    """Such as ``SIGSEGV``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def format_tail(ended: dict[str, Any] | None) -> str:
    """A clause with the last lines that the process wrote; empty if there are none."""
    lines = (ended or {}).get("tail") or []
    if not lines:
        return ""
    return "\nThe last lines that it wrote:\n" + "\n".join(f"  | {line}" for line in lines)
