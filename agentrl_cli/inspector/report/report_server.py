"""The page of a run that continues: served on this machine alone, with details by request.

A web page elsewhere must not read it: requests have to name this server as their host, which a
foreign name that points to this machine does not, and whoever has another origin is refused. Other
users of this machine would need the random key in its address.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl_cli.errors import AgentrlError, UserInputError
from agentrl_cli.inspector.report.report_columns import RunColumns
from agentrl_cli.inspector.report.report_data import ReportData
from agentrl_cli.inspector.report.report_details import DetailReader
from agentrl_cli.inspector.report.report_page import build_page, escape_json
from agentrl_cli.inspector.trajectory_view import Spell
from agentrl_cli.log import sanitize
from agentrl_cli.store.run_folder import RunFolder

_HOST = "127.0.0.1"
_START_SECONDS = 20.0
_STOP_SECONDS = 5.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _LiveReport:
    """The newest state of a run, read when somebody asks; one reader at a time."""

    def __init__(self, folder: RunFolder, spell: Spell | None) -> None:
        self._folder = folder
        self._data = ReportData(folder, has_tokenizer=spell is not None)
        self._details = DetailReader(spell)
        self._lock = threading.Lock()
        self._run: RunColumns | None = None
        self._state: Any = None
        self._head: dict[str, Any] = {}
        self._blocks: Mapping[str, bytes] = {}

    def read_head(self) -> dict[str, Any]:
        """What the page shows first; ``version`` changes when anything new is stored."""
        with self._lock:
            metrics = self._folder.read_metrics()
            last = metrics[-1].get("step") if metrics else None
            state = (
                self._folder.trajectory_steps(), self._folder.list_evals(), len(metrics), last
            )  # fmt: skip
            if state != self._state:
                self._run, head = self._data.read()
                version = self._head.get("version", 0) + 1
                self._head = head | {"version": version, "details": {"where": "server"}}
                self._head["problems"] = [s.problem for s in self._run.sources if s.problem]
                self._blocks = self._run.pack(version)
                self._state = state
            return self._head

    def read_block(self, name: str) -> bytes | None:
        """A block by its name; None: there is none."""
        self.read_head()
        with self._lock:
            if name in self._blocks:
                return self._blocks[name]
            key, _, number = name.rpartition(".")
            assert self._run is not None
            source = next((s for s in self._run.sources if s.key == key), None)
            if source is None or number not in map(str, range(source.num_blocks)):
                return None
            start = int(number) * source.block_rows
            stop = min(start + source.block_rows, source.num_rows)
            return self._details.read_block(source.find_file(), start, stop)


def build_app(folder: RunFolder, spell: Spell | None, hosts: set[str], key: str) -> Starlette:
    """The application that serves the page of a run below ``/KEY/``.

    Args:
        folder: of the run.
        spell: gives the texts of tokens.
        hosts: the names and ports that requests may be for.
        key: the first part of every path.
    """
    live = _LiveReport(folder, spell)

    def answer(content: Any, kind: str, status: int = 200) -> Response:
        return Response(content, status, _HEADERS, media_type=kind)

    def guarded(
        read: Callable[[Request], Response],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            host, origin = request.headers.get("host", ""), request.headers.get("origin")
            if host not in hosts or (origin and origin.removeprefix("http://") not in hosts):
                text = f"refused: this server answers requests for {', '.join(sorted(hosts))} alone"
                return answer(text, "text/plain", 403)
            if not secrets.compare_digest(request.path_params["key"].encode(), key.encode()):
                return answer("no such page: open the address that was printed", "text/plain", 404)
            try:
                return await run_in_threadpool(read, request)
            except AgentrlError as error:
                return answer(sanitize(str(error)), "text/plain", 500)

        return handle

    def read_page(_request: Request) -> Response:
        page = "".join(build_page(live.read_head(), {}, connects=True))
        return answer(page, "text/html")

    def read_head(_request: Request) -> Response:
        return answer(escape_json(live.read_head()), "application/json")

    def read_block(request: Request) -> Response:
        block = live.read_block(request.path_params["name"])
        if block is None:
            return answer("there is no such block", "text/plain", 404)
        return answer(block, "application/octet-stream")

    return Starlette(
        routes=[
            Route("/{key}/", guarded(read_page)),
            Route("/{key}/head", guarded(read_head)),
            Route("/{key}/block/{name}", guarded(read_block)),
        ]
    )


@dataclass(frozen=True, slots=True)
class ServedReport:
    """A server that runs."""

    url: str
    _thread: threading.Thread

    def is_running(self) -> bool:
        """False when it has ended by itself."""
        return self._thread.is_alive()


@contextmanager
def serve_report(
    folder: RunFolder, spell: Spell | None = None, port: int | None = None
) -> Iterator[ServedReport]:
    """Serves the page of a run inside the block; by default at any free port.

    Raises:
        UserInputError: the port is taken.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_HOST, port or 0))
        except OSError as error:
            raise UserInputError(
                f"--port {port}: cannot listen at {_HOST}:{port}: {error.strerror}. Name another, "
                "or leave --port out for any free one"
            ) from None
        bound = listener.getsockname()[1]
        key = secrets.token_urlsafe(16)
        app = build_app(folder, spell, {f"{_HOST}:{bound}", f"localhost:{bound}"}, key)
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(_STOP_SECONDS),
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(
            target=server.run, args=([listener],), name="agentrl-report", daemon=True
        )
        thread.start()
        try:
            _wait_until_started(server, thread)
            yield ServedReport(f"http://{_HOST}:{bound}/{key}/", thread)
        finally:
            server.should_exit = True
            thread.join(2 * _STOP_SECONDS)


def _wait_until_started(server: uvicorn.Server, thread: threading.Thread) -> None:
    waited = threading.Event()
    for _ in range(int(_START_SECONDS / 0.02)):
        if server.started:
            return
        if not thread.is_alive():
            break
        waited.wait(0.02)
    raise UserInputError("the server of the page did not start; its message is above")
