"""One engine server, kept running: started, waited for, checked, and restarted.

This is where a hung server is found: it is killed, so that calls on it fail at once and are sampled
elsewhere, and restarted. Nothing else asks a healthy server whether it still is.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.errors import AgentrlError, EngineError, EngineTimeoutError, UserInputError
from agentrl_cli.launch.processes.managed_process import ManagedProcess, describe_status
from agentrl_cli.launch.servers.server_commands import DRAIN_SECONDS
from agentrl_cli.launch.servers.start_failures import (
    explain_unknown_failure,
    find_start_failure,
    says_port_taken,
)
from agentrl_cli.log import Observer, get_logger

_log = get_logger(__name__)

_POLL_SECONDS = 0.25
_HEALTH_INTERVAL_SECONDS = 2.0
_HEALTH_TIMEOUT_SECONDS = 5.0
#: A server that does not answer for so long is considered hung, and killed.
HUNG_SECONDS = 30.0
#: However long this thread itself was kept from asking: it must have asked this often.
_MIN_FAILURES = 3
_BUDGET_SECONDS = 3600.0
_NUM_TAIL_LINES = 15
#: How often it is reported that a server is still starting.
_REMINDER_SECONDS = 60.0
_TERM_SECONDS = DRAIN_SECONDS + 10.0
_KILL_SECONDS = 10.0


@dataclass(slots=True)
class HealthCheck:
    """An endpoint that a healthy server answers, and for how long it may fail to."""

    path: str
    patience_seconds: float
    _failures: list[float] = field(default_factory=list)

    def has_failed(self, is_answered: bool) -> bool:
        """Takes in one more answer, or none; True once there was none for long enough."""
        if is_answered:
            self._failures.clear()
            return False
        self._failures.append(time.monotonic())
        is_over = self._failures[-1] - self._failures[0] > self.patience_seconds
        return is_over and len(self._failures) >= _MIN_FAILURES


class ServerSupervisor:
    """Keeps one server running, in a thread of its own, until :meth:`stop`.

    Args:
        endpoint: where it listens, also when it is restarted.
        process: starts it.
        config: the experiment.
        observer: gets messages about it.
        on_failed: called once, when it cannot be kept running.
        kind: of the engine.
        on_cpu: it computes on the CPU.
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
        self._config = config
        self._observer = observer
        self._on_failed = on_failed
        self._kind = kind
        self._on_cpu = on_cpu
        self._stopping = threading.Event()
        self._has_been_ready = False
        self._failures: deque[float] = deque()
        self._thread = threading.Thread(
            target=self._run, name=f"agentrl-{endpoint.name}", daemon=True
        )

    @property
    def has_been_ready(self) -> bool:
        """True once it has answered, whatever came after."""
        return self._has_been_ready

    def start(self) -> None:
        """Begins to start it; returns at once."""
        self._thread.start()

    def request_stop(self) -> None:
        """Begins to end it; returns at once."""
        self._stopping.set()

    def stop(self) -> None:
        """Ends it: calls in flight get a few seconds, then it is asked, then killed."""
        self.request_stop()
        if self._thread.ident is not None:
            self._thread.join(_HEALTH_TIMEOUT_SECONDS + _TERM_SECONDS + 2 * _KILL_SECONDS)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.process.start()
                problem = self._wait_ready() or self._check_until_failure()
                if problem is None:
                    return
                self.process.stop(term_seconds=0, kill_seconds=_KILL_SECONDS)
                self._spend_restart(problem)
        except AgentrlError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("the supervision of %s failed", self.endpoint.name)
            self._fail(EngineError(f"the supervision of {self.endpoint.name} failed: {error!r}"))
        finally:
            self.process.stop(term_seconds=_TERM_SECONDS, kill_seconds=_KILL_SECONDS)

    def _fail(self, error: AgentrlError) -> None:
        _log.error("%s", error)
        self._on_failed(error)

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
            if self._serves_model():
                self._has_been_ready = True
                self._tell(f"{self.endpoint.name} is ready after {now - started:.0f} s")
                return None
            if now > started + limit:
                how = f"was not ready within engine.start_timeout_seconds ({limit:g})"
                if not self._has_been_ready:
                    raise self._explain_timeout(how)
                return how
            if now > reminded + _REMINDER_SECONDS:
                reminded = now
                self._tell(f"{self.endpoint.name} is still starting after {now - started:.0f} s")
        return None

    def _check_until_failure(self) -> str | None:
        """What went wrong with it; None when it is to be stopped."""
        asked = time.monotonic()
        checks = self._build_health_checks()
        while not self._stopping.wait(_POLL_SECONDS):
            if (status := self.process.poll()) is not None:
                return describe_status(status)
            if time.monotonic() < asked + _HEALTH_INTERVAL_SECONDS:
                continue
            asked = time.monotonic()
            for check in checks:
                if check.has_failed(self._ask(check.path) is not None):
                    seconds = check.patience_seconds
                    return f"did not answer {check.path} for {seconds:.0f} s and was killed"
        return None

    def _build_health_checks(self) -> list[HealthCheck]:
        """Of the process that listens, and of the one behind it that computes.

        The second answers nothing while it reads new weights (vLLM), or all through a publication
        (SGLang, which is asked for a token).
        """
        path = "/weight_info" if self._kind == "vllm" else "/health_generate"
        num_legs = 1 if self._kind == "vllm" else 2
        patience = num_legs * self._config.engine.publish_timeout_seconds + HUNG_SECONDS
        return [HealthCheck("/health", HUNG_SECONDS), HealthCheck(path, patience)]

    def _spend_restart(self, problem: str) -> None:
        """Says that it is restarted.

        Raises:
            EngineError: it has failed too often.
        """
        now = time.monotonic()
        self._failures.append(now)
        while self._failures[0] < now - _BUDGET_SECONDS:
            self._failures.popleft()
        limit, num_failures = self._config.engine.max_restarts, len(self._failures)
        if num_failures > limit:
            times = "once" if num_failures == 1 else f"{num_failures} times"
            raise explain_unknown_failure(
                self.endpoint.name,
                f"{problem}: {times} within an hour, and engine.max_restarts is {limit}",
                self._tail(),
                str(self.process.log_path),
            )
        text = (
            f"{self.endpoint.name} {problem}; restarting it (restart {num_failures} of {limit} "
            "within an hour)"
        )
        _log.warning("%s\n%s", text, self._tail())
        self._tell(text)

    def _refuse_first_failure(self, how: str) -> None:
        if self._has_been_ready:
            return
        name, log, path = self.endpoint.name, self._read_log(), str(self.process.log_path)
        if says_port_taken(log):
            engine, port = self._config.engine, urlsplit(self.endpoint.base_url).port or 0
            if engine.first_port is not None:
                raise UserInputError(explain_taken_port(port, engine.num_servers))
            raise EngineError(f"{name}: port {port} was taken by another program. Start again")
        raise find_start_failure(
            self._config, name, log, path, on_cpu=self._on_cpu
        ) or explain_unknown_failure(name, how, self._tail(), path)

    def _explain_timeout(self, how: str) -> EngineTimeoutError:
        limit = self._config.engine.start_timeout_seconds
        error = explain_unknown_failure(
            self.endpoint.name,
            f"{how}. If it only needs longer, type engine.start_timeout_seconds={2 * limit:g}",
            self._tail(),
            str(self.process.log_path),
        )
        return EngineTimeoutError(str(error))

    def _serves_model(self) -> bool:
        """True once it answers, and it is ours: it takes the key and serves the model."""
        if self._ask("/health") is None:
            return False
        reply = self._ask("/v1/models")
        try:
            models = json.loads(reply or b"{}").get("data", [])
            return any(model["id"] == self._config.model.path for model in models)
        except (ValueError, AttributeError, KeyError, TypeError):
            return False

    def _ask(self, path: str) -> bytes | None:
        """The body of a good reply; None for any other, or none."""
        url = urlsplit(self.endpoint.base_url)
        connection = http.client.HTTPConnection(
            url.hostname or "", url.port, timeout=_HEALTH_TIMEOUT_SECONDS
        )
        try:
            headers = {"Authorization": f"Bearer {self.endpoint.api_key}"}
            connection.request("GET", path, headers=headers)
            reply = connection.getresponse()
            body = reply.read()
            return body if reply.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _read_log(self) -> str:
        return self.process.read_log().replace(self.endpoint.api_key, "***")

    def _tail(self) -> str:
        return self.process.tail(_NUM_TAIL_LINES).replace(self.endpoint.api_key, "***")

    def _tell(self, text: str) -> None:
        self._observer.on_message(text)


def explain_taken_port(port: int, num_servers: int) -> str:
    """What to type when a port from ``engine.first_port`` on is taken."""
    return (
        f"engine.first_port: port {port} of 127.0.0.1 is taken by another program (perhaps another "
        f"run). {num_servers} consecutive free ports are needed. Type engine.first_port=null to "
        "have free ones chosen, or the number of another"
    )
