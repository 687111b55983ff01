"""One engine server over its lives: started, waited for, watched, and started again."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.server import ServerEndpoint
from agentrl_cli.errors import AgentrlError, EngineError, EngineTimeoutError, UserInputError
from agentrl_cli.launch.ports import explain_taken_port
from agentrl_cli.launch.process import ManagedProcess
from agentrl_cli.launch.server_commands import DRAIN_SECONDS
from agentrl_cli.launch.start_failures import (
    explain_unknown_failure,
    find_start_failure,
    says_port_taken,
)
from agentrl_cli.log import Observer, get_logger

_log = get_logger(__name__)

_POLL_SECONDS = 0.25
_HEALTH_INTERVAL_SECONDS = 2.0
_HEALTH_TIMEOUT_SECONDS = 5.0
#: A server that does not answer for so long is taken for hung, and killed.
HUNG_SECONDS = 30.0
#: However long this thread itself was kept from asking.
_MIN_FAILURES = 3
_BUDGET_SECONDS = 3600.0
_NUM_TAIL_LINES = 15
#: How often a person is told that a server is still starting.
_REMINDER_SECONDS = 60.0
_TERM_SECONDS = DRAIN_SECONDS + 10.0
_KILL_SECONDS = 10.0


@dataclass(slots=True)
class LifeSign:
    """An endpoint that a living server answers, and how long it may fail to."""

    path: str
    patience_seconds: float
    _failures: list[float] = field(default_factory=list)

    def is_missed(self, has_answered: bool) -> bool:
        """Takes in one more answer, or none; True once it was patient for long enough."""
        if has_answered:
            self._failures.clear()
            return False
        self._failures.append(time.monotonic())
        is_over = self._failures[-1] - self._failures[0] > self.patience_seconds
        return is_over and len(self._failures) >= _MIN_FAILURES


class ServerKeeper:
    """Keeps one server running, in a thread of its own, until :meth:`stop`.

    Args:
        endpoint: where it listens, in every life.
        process: starts it.
        config: the experiment.
        observer: is told what happens to it.
        on_failed: called once, when it cannot be kept running.
        on_cpu: it computes on the CPU.
        has_engine_process: one process of it listens (vLLM), and another one computes.
    """

    def __init__(
        self,
        endpoint: ServerEndpoint,
        process: ManagedProcess,
        config: ExperimentConfig,
        observer: Observer,
        on_failed: Callable[[AgentrlError], None],
        *,
        on_cpu: bool,
        has_engine_process: bool,
    ) -> None:
        self.endpoint = endpoint
        self.process = process
        self._config = config
        self._observer = observer
        self._on_failed = on_failed
        self._on_cpu = on_cpu
        self._has_engine_process = has_engine_process
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._was_ready = False
        self._deaths: deque[float] = deque()
        self._thread = threading.Thread(
            target=self._run, name=f"agentrl-{endpoint.name}", daemon=True
        )

    @property
    def is_ready(self) -> bool:
        """True while it answers."""
        return self._ready.is_set()

    @property
    def has_been_ready(self) -> bool:
        """True once it has answered, whatever came after."""
        return self._was_ready

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
                problem = self._wait_ready() or self._watch()
                self._ready.clear()
                if problem is None:
                    return
                self.process.stop(term_seconds=0, kill_seconds=_KILL_SECONDS)
                self._spend_restart(problem)
        except AgentrlError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("the watch over %s broke", self.endpoint.name)
            self._fail(EngineError(f"the watch over {self.endpoint.name} broke: {error!r}"))
        finally:
            self._ready.clear()
            self.process.stop(term_seconds=_TERM_SECONDS, kill_seconds=_KILL_SECONDS)

    def _fail(self, error: AgentrlError) -> None:
        _log.error("%s", error)
        self._on_failed(error)

    def _wait_ready(self) -> str | None:
        """None when it answers (or is to be stopped), else what went wrong.

        Raises:
            AgentrlError: it failed in its first life, and would again.
        """
        started = reminded = time.monotonic()
        limit = self._config.engine.start_timeout_seconds
        while not self._stopping.wait(_POLL_SECONDS):
            if (status := self.process.poll()) is not None:
                how = f"ended while it started ({describe_status(status)})"
                self._refuse_first_failure(how)
                return how
            now = time.monotonic()
            if self._serves_model():
                self._ready.set()
                self._was_ready = True
                self._tell(f"{self.endpoint.name} is ready after {now - started:.0f} s")
                return None
            if now > started + limit:
                how = f"was not ready within engine.start_timeout_seconds ({limit:g})"
                if not self._was_ready:
                    raise self._explain_timeout(how)
                return how
            if now > reminded + _REMINDER_SECONDS:
                reminded = now
                self._tell(f"{self.endpoint.name} is still starting after {now - started:.0f} s")
        return None

    def _watch(self) -> str | None:
        """What went wrong with it; None when it is to be stopped."""
        asked = time.monotonic()
        signs = self._list_life_signs()
        while not self._stopping.wait(_POLL_SECONDS):
            if (status := self.process.poll()) is not None:
                return f"died ({describe_status(status)})"
            if time.monotonic() < asked + _HEALTH_INTERVAL_SECONDS:
                continue
            asked = time.monotonic()
            for sign in signs:
                if sign.is_missed(self._ask(sign.path) is not None):
                    seconds = sign.patience_seconds
                    return f"did not answer {sign.path} for {seconds:.0f} s and was killed"
        return None

    def _list_life_signs(self) -> list[LifeSign]:
        signs = [LifeSign("/health", HUNG_SECONDS)]
        if self._has_engine_process:
            # Answered by the process that computes, which is behind the one that listens; not
            # while it reads new weights.
            patience = self._config.engine.publish_timeout_seconds + HUNG_SECONDS
            signs.append(LifeSign("/weight_info", patience))
        return signs

    def _spend_restart(self, problem: str) -> None:
        """Says that it is started again.

        Raises:
            EngineError: it has died too often.
        """
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - _BUDGET_SECONDS:
            self._deaths.popleft()
        limit = self._config.engine.max_restarts
        if len(self._deaths) > limit:
            times = "once" if len(self._deaths) == 1 else f"{len(self._deaths)} times"
            raise explain_unknown_failure(
                self.endpoint.name,
                f"{problem}: {times} within an hour, and engine.max_restarts is {limit}",
                self._tail(),
                str(self.process.log_path),
            )
        text = (
            f"{self.endpoint.name} {problem}; it is started again (restart {len(self._deaths)} of "
            f"{limit} within an hour)"
        )
        _log.warning("%s\n%s", text, self._tail())
        self._tell(text)

    def _refuse_first_failure(self, how: str) -> None:
        if self._was_ready:
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


def describe_status(status: int) -> str:
    """``killed by SIGKILL``, ``exit status 1``."""
    if status > 128:
        try:
            return f"killed by {signal.Signals(status - 128).name}"
        except ValueError:
            return f"exit status {status}"
    return f"exit status {status}"
