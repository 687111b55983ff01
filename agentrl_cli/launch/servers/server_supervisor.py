"""One engine server, kept running: started, waited for, checked, and restarted.

This is where a hung server is found: it is killed, so that calls on it fail at once and are sampled
elsewhere, and restarted. Nothing else asks a healthy server whether it still is.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.engine.server_http import format_log_tail
from agentrl_cli.errors import AgentrlError, EngineError, EngineTimeoutError, UserInputError
from agentrl_cli.launch.plan import DRAIN_SECONDS
from agentrl_cli.launch.processes.managed_process import ManagedProcess, describe_status
from agentrl_cli.launch.servers.start_failures import find_start_failure
from agentrl_cli.log import Observer, get_logger

_log = get_logger(__name__)

_POLL_SECONDS = 0.25
_HEALTH_INTERVAL_SECONDS = 2.0
#: Doubled with each question that is not answered: one that is slow does answer in the end.
_HEALTH_TIMEOUT_SECONDS = 5.0
#: A server that does not answer for so long is considered hung, and killed.
HUNG_SECONDS = 30.0
#: However long this thread itself was kept from asking: it must have asked this often.
_MIN_FAILURES = 3
#: Share of that time after which a silent server is reported: on cores that it shares, one that
#: reads long prompts is late by some seconds in every step, and nothing is wrong.
_REPORTED_SHARE = 1 / 3
_BUDGET_SECONDS = 3600.0
#: How often it is reported that a server is still starting.
_REMINDER_SECONDS = 60.0
_TERM_SECONDS = DRAIN_SECONDS + 10.0
_KILL_SECONDS = 10.0


class ServerSupervisor:
    """Keeps one server running, in a thread of its own, until it is asked to stop.

    Args:
        endpoint: where it listens, also when it is restarted.
        process: starts it.
        config: the experiment.
        observer: gets messages about it.
        on_failed: called once, when it cannot be kept running.
        kind: of the engine.
        on_cpu: it computes on the CPU.

    Attributes:
        has_been_ready: True once it has answered, whatever came after.
    """

    def __init__(
        self,
        endpoint: ServerEndpoint,
        process: ManagedProcess,
        config: ExperimentConfig,
        observer: Observer,
        on_failed: Callable[[AgentrlError], None],
        *,
        kind: str,
        on_cpu: bool,
    ) -> None:
        self.endpoint = endpoint
        self.process = process
        self.has_been_ready = False
        self._config = config
        self._tell = observer.on_message
        self._on_failed = on_failed
        self._kind = kind
        self._on_cpu = on_cpu
        self._stopping = threading.Event()
        self._asking: http.client.HTTPConnection | None = None
        self._failures: list[float] = []
        self._thread = threading.Thread(
            target=self._run, name=f"agentrl-{endpoint.name}", daemon=True
        )

    def start(self) -> None:
        """Begins to start it; returns at once."""
        self._thread.start()

    def request_stop(self) -> None:
        """Begins to end it: calls in flight get a few seconds, then it is asked, then killed."""
        self._stopping.set()
        asking = self._asking
        if asking is not None and asking.sock is not None:
            # A slow server may take long to answer.
            with suppress(OSError):
                asking.sock.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Returns when it has ended."""
        if self._thread.is_alive():
            self._thread.join(HUNG_SECONDS + _TERM_SECONDS + 2 * _KILL_SECONDS)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.process.start()
                problem = self._wait_ready() or self._check_until_failure()
                if problem is None:
                    return
                self.process.stop(term_seconds=0, kill_seconds=_KILL_SECONDS)
                self._spend_restart(problem)
        except Exception as error:
            failure = (
                error
                if isinstance(error, AgentrlError)
                else EngineError(f"the supervision of {self.endpoint.name} failed: {error!r}")
            )
            _log.error("%s", failure, exc_info=failure is not error)
            self._on_failed(failure)
        finally:
            self.process.stop(term_seconds=_TERM_SECONDS, kill_seconds=_KILL_SECONDS)

    def _wait_ready(self) -> str | None:
        """None when it answers (or is to be stopped), else what went wrong.

        Raises:
            AgentrlError: it failed at its first start, and would again.
        """
        started = reminded = time.monotonic()
        limit = self._config.engine.start_timeout_seconds
        while not self._stopping.wait(_POLL_SECONDS):
            if (status := self.process.poll()) is not None:
                how = f"{describe_status(status)} while it started"
                self._refuse_first_failure(how)
                return how
            now = time.monotonic()
            if self._serves_model(min(HUNG_SECONDS, max(started + limit - now, _POLL_SECONDS))):
                self.has_been_ready = True
                self._tell(f"{self.endpoint.name} is ready after {now - started:.0f} s")
                return None
            if now > started + limit:
                how = f"was not ready within engine.start_timeout_seconds ({limit:g})"
                if not self.has_been_ready:
                    hint = (
                        f"If it only needs longer, type engine.start_timeout_seconds={2 * limit:g}"
                    )
                    raise EngineTimeoutError(self._explain(f"{how}. {hint}"))
                return how
            if now > reminded + _REMINDER_SECONDS:
                reminded = now
                self._tell(f"{self.endpoint.name} is still starting after {now - started:.0f} s")
        return None

    def _check_until_failure(self) -> str | None:
        """What went wrong with it; None when it is to be stopped.

        Asked are the process that listens, and the one behind it that computes. The second answers
        nothing while it reads new weights (vLLM), or all through a publication (SGLang, which is
        asked for a token).
        """
        path = "/weight_info" if self._kind == "vllm" else "/health_generate"
        num_legs = 1 if self._kind == "vllm" else 2
        publication = num_legs * self._config.engine.publish_timeout_seconds
        patience_seconds = {"/health": HUNG_SECONDS, path: HUNG_SECONDS + publication}
        unanswered: dict[str, list[float]] = {path: [] for path in patience_seconds}
        reported: set[str] = set()
        asked = time.monotonic()
        while not self._stopping.wait(_POLL_SECONDS):
            if (status := self.process.poll()) is not None:
                return describe_status(status)
            if time.monotonic() < asked + _HEALTH_INTERVAL_SECONDS:
                continue
            asked = time.monotonic()
            for path, limit in patience_seconds.items():
                missed = unanswered[path]
                patience = min(_HEALTH_TIMEOUT_SECONDS * 2 ** len(missed), HUNG_SECONDS)
                missed.append(time.monotonic())
                if self._ask(path, patience) is not None:
                    if path in reported:
                        self._tell(f"{self.endpoint.name} answers again")
                    reported.discard(path)
                    missed.clear()
                    continue
                seconds = time.monotonic() - missed[0]
                is_late = seconds > _REPORTED_SHARE * limit
                if is_late and path not in reported and self.process.poll() is None:
                    reported.add(path)
                    self._tell(
                        f"{self.endpoint.name} is slow: it has not answered {path} for "
                        f"{seconds:.0f} s; it is restarted after {limit:.0f} s without an answer"
                    )
                if seconds > limit and len(missed) >= _MIN_FAILURES:
                    return f"did not answer {path} for {limit:.0f} s and was killed"
        return None

    def _spend_restart(self, problem: str) -> None:
        """Says that it is restarted.

        Raises:
            EngineError: it has failed too often.
        """
        now = time.monotonic()
        self._failures = [t for t in self._failures if t >= now - _BUDGET_SECONDS] + [now]
        limit, num_failures = self._config.engine.max_restarts, len(self._failures)
        if num_failures > limit:
            times = "once" if num_failures == 1 else f"{num_failures} times"
            how = f"{problem}: {times} within an hour, and engine.max_restarts is {limit}"
            raise EngineError(self._explain(how))
        text = f"restarting it (restart {num_failures} of {limit} within an hour)"
        _log.warning("%s", self._explain(f"{problem}; {text}"))
        self._tell(f"{self.endpoint.name} {problem}; {text}")

    def _refuse_first_failure(self, how: str) -> None:
        if self.has_been_ready:
            return
        log = self.process.read_log().replace(self.endpoint.api_key, "***")
        if "address already in use" in log.lower():
            engine, port = self._config.engine, urlsplit(self.endpoint.base_url).port or 0
            if engine.first_port is not None:
                raise UserInputError(explain_taken_port(port, engine.num_servers))
            raise EngineError(
                f"{self.endpoint.name}: port {port} was taken by another program. Start again"
            )
        raise find_start_failure(
            self._config,
            self.endpoint.name,
            log,
            str(self.process.log_path),
            on_cpu=self._on_cpu,
        ) or EngineError(self._explain(how))

    def _explain(self, how: str) -> str:
        tail = format_log_tail(self.process.log_path, keys=[self.endpoint.api_key])
        return f"{self.endpoint.name} {how}.{tail}"

    def _serves_model(self, patience: float) -> bool:
        """True once it answers, and it is ours: it takes the key and serves the model."""
        if self._ask("/health", patience) is None:
            return False
        reply = self._ask("/v1/models", patience)
        try:
            models = json.loads(reply or b"{}").get("data", [])
            return any(model["id"] == self._config.model.path for model in models)
        except (ValueError, AttributeError, KeyError, TypeError):
            return False

    def _ask(self, path: str, patience: float) -> bytes | None:
        """The body of a good reply; None for any other, or none in ``patience`` seconds."""
        url = urlsplit(self.endpoint.base_url)
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=patience)
        self._asking = connection
        try:
            headers = {"Authorization": f"Bearer {self.endpoint.api_key}"}
            connection.request("GET", path, headers=headers)
            reply = connection.getresponse()
            body = reply.read()
            return body if reply.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            self._asking = None
            connection.close()


def explain_taken_port(port: int, num_servers: int) -> str:
    """What to type when a port from ``engine.first_port`` on is taken."""
    return (
        f"engine.first_port: port {port} of 127.0.0.1 is taken by another program (perhaps another "
        f"run). {num_servers} consecutive free ports are needed. Type engine.first_port=null to "
        "have free ones chosen, or the number of another"
    )
