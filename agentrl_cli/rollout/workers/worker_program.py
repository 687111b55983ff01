"""What runs in a worker process: agents, one trajectory at a time.

It gets its work from the trainer as JSON, and ends when the trainer closes the connection. It
imports no line of the user's code before the environment says where the model is: what that code
makes when it is imported, such as a client, is then right for the trajectory.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import resource
import ssl
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import httpx2
import psutil
from openai import AsyncOpenAI, OpenAI

from agentrl_cli.agents.agent_building import AgentSource, AgentSpec
from agentrl_cli.agents.agent_environment import keep_no_connections, list_changes
from agentrl_cli.agents.agent_runner import AgentCall, AgentOutcome
from agentrl_cli.blocking_clients import build_loopback_http
from agentrl_cli.config.user_code import is_of_user
from agentrl_cli.errors import BuilderError, RewardError, UserInputError
from agentrl_cli.log import get_logger
from agentrl_cli.process_channel import Message, encode_message
from agentrl_cli.records import Boundary
from agentrl_cli.rollout.policy_failures import list_refused
from agentrl_cli.rollout.reward_process import parse_reward_result
from agentrl_cli.rollout.rollout_failures import describe_failure
from agentrl_cli.tracking.credit import parse_reward

_log = get_logger(__name__)

#: A runaway answer is longer.
MAX_MESSAGE_BYTES = 32 * 2**20
#: Calls of a trajectory's client that a worker has the trainer make.
REWARD_CALLS = ("set_reward", "set_final_reward", "apply_reward_discount")
#: Where builders are tried, there is no model.
_NO_BASE_URL, _NO_KEY = "http://agentrl.invalid/v1", "opens-nothing"
#: When memory is short, the kernel ends the process with the highest score first.
_OOM_SCORE = 800
_ERRORS: dict[str, type[Exception]] = {"KeyError": KeyError, "ValueError": ValueError}


class TrainerConnection:
    """The worker's end of the connection. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._session_key: str | None = None

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends, and waits until the message is on its way."""
        with self._lock:
            self._connection.send_bytes(encode_message(message))

    def receive(self) -> Message:
        """The next piece of work. Raises EOFError when there will be none."""
        message: Message = json.loads(self._connection.recv_bytes())
        return message

    def allow_rewards(self, session_key: str | None) -> None:
        """Takes rewards of the session with this key from now on, and of no other."""
        with self._lock:
            self._session_key = session_key

    def set_reward(self, session_key: str, call: str, *arguments: Any) -> None:
        """Has the trainer make one of ``REWARD_CALLS``.

        Raises:
            KeyError, ValueError: as the session raises them.
        """
        with self._lock:
            if session_key != self._session_key:
                raise RuntimeError("the trajectory has ended: no reward is accepted any more")
            self._connection.send_bytes(encode_message({"op": call, "arguments": arguments}))
            answer = self.receive()
        if answer["error"] is not None:
            raise _ERRORS.get(answer["error"], RuntimeError)(answer["message"])


class _Rewarding:
    """What a tracking client adds to the SDK, as far as it reaches into another process."""

    api_key: str

    def __init__(self, *, connection: TrainerConnection, **openai_options: Any) -> None:
        self._connection = connection
        super().__init__(**openai_options)

    def copy(self, **options: Any) -> Any:
        """A client with other options on the same session."""
        extra = {**options.pop("_extra_kwargs", {}), "connection": self._connection}
        return super().copy(**options, _extra_kwargs=extra)  # type: ignore[misc]

    with_options = copy

    @property
    def session_key(self) -> str:
        """The secret that opens this session, and no other, at the gateway."""
        return self.api_key

    def set_reward(self, interaction_id: str, reward: Any) -> None:
        """As :meth:`TrackingClient.set_reward`."""
        self._set("set_reward", interaction_id, parse_reward(reward))

    def set_final_reward(self, reward: Any) -> None:
        """As :meth:`TrackingClient.set_final_reward`."""
        self._set("set_final_reward", parse_reward(reward))

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """As :meth:`TrackingClient.apply_reward_discount`."""
        self._set("apply_reward_discount", float(turn_discount))

    def _set(self, call: str, *arguments: Any) -> None:
        self._connection.set_reward(self.session_key, call, *arguments)

    def export_interactions(self, style: str = "concat") -> NoReturn:
        """Not here: records stay with the trainer. Raises RuntimeError."""
        raise RuntimeError(
            "records of model calls are kept in the trainer's process, and this agent runs in "
            "another. Type rollout.agent_mode=inline for an agent that reads them"
        )

    @property
    def interactions(self) -> NoReturn:
        """Not here either."""
        self.export_interactions()


class WorkerClient(_Rewarding, AsyncOpenAI):
    """A stock ``AsyncOpenAI`` on one session of the gateway."""

    def build_blocking_client(self) -> BlockingWorkerClient:
        """The same for code that blocks."""
        return BlockingWorkerClient(
            connection=self._connection,
            base_url=self.base_url,
            api_key=self.session_key,
            max_retries=self.max_retries,
            http_client=build_loopback_http(),
        )


class BlockingWorkerClient(_Rewarding, OpenAI):
    """A stock ``OpenAI`` on one session of the gateway, for agents that are not async."""


class WorkerProgram:
    """Does what is asked for on the connection, until there is nothing more."""

    def __init__(self, connection: TrainerConnection) -> None:
        self._connection = connection
        self._sources: dict[str, AgentSource] = {}
        self._environment = dict(os.environ)
        self._folder = Path.cwd()
        self._pid = os.getpid()

    def run(self) -> None:
        """Works until the trainer closes the connection, or is gone."""
        # Of one thread, so that the last lines are those of the crash.
        faulthandler.enable(all_threads=False)
        keep_no_connections()
        with suppress(EOFError, OSError):
            while True:
                is_reusable = not _has_left_process()
                self._connection.send({"op": "idle", "pid": self._pid, "is_reusable": is_reusable})
                message = self._connection.receive()
                if message["op"] == "try":
                    specs = [AgentSpec(**spec) for spec in message["agents"]]
                    self._connection.send(self._try_agents(specs))
                else:
                    self._run_task(message)

    def _try_agents(self, specs: Sequence[AgentSpec]) -> Message:
        """Builds every agent once: what they are, or why one cannot be."""
        self._set_environment(_NO_BASE_URL, _NO_KEY)
        traits, key = [], ""
        try:
            for spec in specs:
                key = spec.key
                runner = spec.load().runner
                traits.append(
                    {
                        "framework": runner.framework,
                        "gives_rewards": runner.gives_rewards,
                        "input_fields": list(runner.input_fields),
                    }
                )
        except UserInputError as error:
            return {"op": "refused", "error": type(error).__name__, "message": str(error)}
        except BaseException as error:
            text = f"{key}: trying the builder ended with {type(error).__name__}: {error}"
            traceback.print_exc()
            return {"op": "refused", "error": BuilderError.__name__, "message": text}
        _forget_modules()
        return {"op": "tried", "agents": traits}

    def _run_task(self, task: Message) -> None:
        os.chdir(self._folder)
        self._set_environment(task["base_url"], task["api_key"])
        self._connection.allow_rewards(task["api_key"])
        try:
            with asyncio.Runner() as runner:
                loop = runner.get_loop()
                answering = loop.create_task(self._answer(task))
                while not answering.done():
                    # asyncio ends its loop when a tool in a task of its own calls exit; the agent,
                    # which awaits it, gets that too.
                    with suppress(SystemExit):
                        loop.run_until_complete(answering)
        except BaseException as error:
            # The agent's end was sent before; this is what it left behind.
            _log.debug("an agent's event loop did not end cleanly", exc_info=error)
        if task["modules"] == "reloaded":
            self._sources.clear()
            _forget_modules()

    def _set_environment(self, base_url: str, api_key: str) -> None:
        """The environment as the process found it, with the way to the model."""
        changes = list_changes(self._environment, base_url, api_key)
        os.environ.clear()
        changed = {**self._environment, **changes}
        os.environ.update({name: value for name, value in changed.items() if value is not None})

    async def _answer(self, task: Message) -> None:
        reply = await self._find_answer(task)
        if os.getpid() != self._pid:
            # Forked by the agent, and not ended where it should have been.
            os._exit(0)
        num_bytes = len(encode_message(reply))
        if num_bytes > MAX_MESSAGE_BYTES:
            text = f"what the agent returned or raised: {num_bytes} bytes are too many, allowed are"
            reply = _format_failure(TypeError(f"{text} {MAX_MESSAGE_BYTES}"))
        self._connection.allow_rewards(None)
        self._connection.send(reply)

    async def _find_answer(self, task: Message) -> Message:
        try:
            return _format_outcome(await self._run_agent(task))
        except UserInputError as error:
            return {"op": "refused", "error": type(error).__name__, "message": str(error)}
        except RewardError as error:
            return _format_failure(error, boundary=Boundary.REWARD)
        except SystemExit as error:
            return _format_failure(RuntimeError(f"the agent called exit({error.code!r})"))
        except asyncio.CancelledError:
            cancelled = RuntimeError("the agent cancelled itself (asyncio.CancelledError)")
            return _format_failure(cancelled)
        except BaseException as error:
            return _format_failure(error, own_urls=(task["base_url"],))

    async def _run_agent(self, task: Message) -> AgentOutcome:
        spec = AgentSpec(**task["agent"])
        if spec.key not in self._sources:
            self._sources[spec.key] = spec.load(trial="never")
        # For plain HTTP to this machine: reading the system's certificates takes 25 ms.
        transport = httpx2.AsyncHTTPTransport(
            limits=httpx2.Limits(max_connections=None),
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )
        http_client = httpx2.AsyncClient(transport=transport, timeout=httpx2.Timeout(None))
        client = WorkerClient(
            connection=self._connection,
            base_url=task["base_url"],
            api_key=task["api_key"],
            max_retries=0,
            http_client=http_client,
        )
        try:
            runner = self._sources[spec.key].get_runner(client, task["model"])
            return await runner.run(
                AgentCall(
                    row=task["row"],
                    client=client,
                    model=task["model"],
                    base_url=task["base_url"],
                    api_key=task["api_key"],
                    http_client=http_client,
                    max_turns=task["max_turns"],
                )
            )
        finally:
            await client.close()


def _format_outcome(outcome: AgentOutcome) -> Message:
    """What an agent ended with, as a message; rewards of any kind become plain numbers.

    Raises:
        RewardError: it returned what is no reward.
    """
    returned = outcome.returned
    if isinstance(returned, Mapping):
        returned = {str(name): _to_number(reward) for name, reward in returned.items()}
    elif returned is not None:
        returned = _to_number(returned)
    return {"op": "done", "final_answer": outcome.final_answer, "returned": returned}


def _to_number(value: Any) -> float:
    reward, _ = parse_reward_result(value)
    # None would mean that the agent gave no reward; this one said "unscored".
    return float("nan") if reward is None else reward


def _format_failure(error: BaseException, **known: Any) -> Message:
    failure = asdict(describe_failure(error, **known))
    return {"op": "failed", "failure": failure, "refused": list_refused(error)}


def _forget_modules() -> None:
    """Has the user's own modules imported again when they are next asked for."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and is_of_user(file):
            del sys.modules[name]


def _has_left_process() -> bool:
    """Whether something that an agent started still runs, orphans included."""
    # multiprocessing starts its tracker with its first lock, once and for good.
    expected = (os.getpid(), getattr(resource_tracker._resource_tracker, "_pid", None))
    for process in psutil.Process(os.getppid()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.pid not in expected and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def main(connection: int) -> None:
    """The whole life of a worker, on the socket with this file descriptor."""
    # Not for what agents start.
    os.set_inheritable(connection, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        try:
            Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
        except OSError as error:
            print(f"oom_score_adj stays as it is: {error}", file=sys.stderr)
    WorkerProgram(TrainerConnection(Connection(connection))).run()
