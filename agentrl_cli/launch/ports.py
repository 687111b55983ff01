"""Loopback ports for servers, kept for them from the choice to the end of the run."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from agentrl_cli.errors import EngineError, UserInputError

_HOST = "127.0.0.1"


class ReservedPorts:
    """Ports that nobody is given by chance, also while their server is being started again.

    A socket that is bound and does not listen holds each: the system gives the port to no one
    who asks for any, and a server, which asks for this very one with SO_REUSEADDR, gets it.

    Args:
        num_ports: how many.
        first_port: the first of consecutive ones; None: any that are free.

    Raises:
        UserInputError: one of the consecutive ports is taken.
        EngineError: the system has no port left.
    """

    def __init__(self, num_ports: int, first_port: int | None) -> None:
        self.ports: list[int] = []
        with ExitStack() as stack:
            for index in range(num_ports):
                holder = stack.enter_context(socket.socket())
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                _bind(holder, 0 if first_port is None else first_port + index, num_ports)
                self.ports.append(holder.getsockname()[1])
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Gives the ports back; may be called twice."""
        self._stack.close()


def _bind(holder: socket.socket, port: int, num_ports: int) -> None:
    try:
        holder.bind((_HOST, port))
    except OSError as error:
        if port == 0:
            raise EngineError(f"there is no free port for an engine server: {error}") from error
        raise UserInputError(explain_taken_port(port, num_ports)) from error


def explain_taken_port(port: int, num_servers: int) -> str:
    """A message for who has set ``engine.first_port``."""
    return (
        f"engine.first_port: port {port} of {_HOST} is taken by another program (perhaps another "
        f"run). {num_servers} consecutive free ports are needed. Type engine.first_port=null to "
        "have free ones chosen, or the number of another"
    )
