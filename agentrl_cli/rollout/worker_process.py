"""A worker: a process that runs agents, one trajectory at a time.

It is told of its work on a channel, and ends with it. It imports no line of the user's code
before the environment says where the model is: what that code makes when it is imported, such
as a client, is then right for the first trajectory of the process.
"""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import importlib
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from agentrl_cli.agents.building import AgentSource
from agentrl_cli.agents.runner import AgentOutcome
from agentrl_cli.config.imports import import_object
from agentrl_cli.errors import BuilderError, RewardError, UserInputError
from agentrl_cli.log import get_logger
from agentrl_cli.records import Boundary, Failure
from agentrl_cli.rollout.failures import describe_failure
from agentrl_cli.rollout.reward_results import parse_reward_result
from agentrl_cli.rollout.worker_channel import Channel, ChannelError, Message, encode_message
from agentrl_cli.rollout.worker_client import RewardLine, WorkerClient

_log = get_logger(__name__)

_LIBRARIES = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
#: By these the SDKs find a model and its key: they are the trajectory's own.
MODEL_VARIABLES = (
    *("OPENAI_BASE_URL", "OPENAI_API_KEY"),
    # The last would be sent beside the key, and be taken for it.
    *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
)
#: Any name is served; this one is no model of OpenAI's.
SERVED_MODEL = "policy"
#: Where builders are tried, there is nobody to talk to.
NO_BASE_URL = "http://agentrl.invalid/v1"
NO_KEY = "opens-nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """An agent of the configuration, by name."""

    path: str
    kwargs: dict[str, Any]
    key: str
    """The config key, for messages."""


class Worker:
    """Runs what is asked for on ``channel``, whose other end is the trainer's."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sources: dict[str, AgentSource] = {}
        self._modules = set(sys.modules)
        self._environment = dict(os.environ)
        self._folder = Path.cwd()
        self._pid = os.getpid()

    def run(self) -> None:
        """Works until the trainer says that it is enough, or is gone."""
        # Of one thread: the lines that are kept of it shall be those of the crash.
        faulthandler.enable(all_threads=False)
        while (message := self._channel.receive()) is not None:
            op = message["op"]
            if op == "end":
                return
            if op == "preload":
                import_modules(message["modules"])
                self._channel.send({"op": "idle"})
            elif op == "try":
                specs = [AgentSpec(**spec) for spec in message["agents"]]
                self._channel.send(self._try_agents(specs))
            elif op == "run":
                self._run_task(message)
                self._channel.send({"op": "idle"})
            else:
                raise ChannelError(f"a worker knows no {op!r}")

    def _try_agents(self, specs: Sequence[AgentSpec]) -> Message:
        """Builds every agent once: what they are, or why one cannot be."""
        self._set_environment(NO_BASE_URL, NO_KEY)
        traits, key = [], ""
        try:
            for spec in specs:
                key = spec.key
                runner = _import_agent(spec, trial="now").runner
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
        return {"op": "tried", "agents": traits, "modules": find_library_modules()}

    def _run_task(self, task: Message) -> None:
        os.chdir(self._folder)
        self._set_environment(task["base_url"], task["api_key"])
        try:
            asyncio.run(self._answer(task))
        except BaseException as error:
            # The end of the agent was told before; this is what it left behind.
            _log.debug("an agent's event loop did not end cleanly", exc_info=error)

    def _set_environment(self, base_url: str, api_key: str) -> None:
        """The environment as the process found it, with the way to the model."""
        os.environ.clear()
        os.environ.update(build_environment(self._environment, base_url, api_key))

    async def _answer(self, task: Message) -> None:
        try:
            reply = format_outcome(await self._run_agent(task))
            reply["modules"] = find_library_modules(besides=self._modules)
            encode_message(reply)
        except UserInputError as error:
            reply = {"op": "refused", "error": type(error).__name__, "message": str(error)}
        except ChannelError as error:
            reply = _format_failure(TypeError(f"what the agent returned is no answer: {error}"))
        except RewardError as error:
            reply = _format_failure(error, Boundary.REWARD)
        except SystemExit as error:
            reply = _format_failure(RuntimeError(f"the agent called exit({error.code!r})"))
        except asyncio.CancelledError:
            cancelled = RuntimeError("the agent cancelled itself (asyncio.CancelledError)")
            reply = _format_failure(cancelled)
        except BaseException as error:
            reply = _format_failure(error, own_urls=(task["base_url"],))
        if os.getpid() != self._pid:
            # Forked by the agent, and not ended where it should have been.
            os._exit(0)
        self._channel.send(reply)

    async def _run_agent(self, task: Message) -> AgentOutcome:
        spec = AgentSpec(**task["agent"])
        if spec.key not in self._sources:
            self._sources[spec.key] = _import_agent(spec, trial="never")
        model, base_url, key = task["model"], task["base_url"], task["api_key"]
        line = RewardLine(self._channel)
        client = WorkerClient(line=line, base_url=base_url, api_key=key)
        try:
            runner = self._sources[spec.key].get_runner(client, model)
            return await runner.run(
                task["row"],
                client,
                model=model,
                base_url=base_url,
                api_key=key,
                http_client=client.http_client,
                max_turns=task["max_turns"],
            )
        finally:
            line.close()
            await client.close()


def end_process() -> NoReturn:
    """Ends a worker as an interpreter ends, but for taking itself apart object by object.

    That takes 75 ms of CPU in a process with a framework in it, most of them for copying memory
    that it shared with its host until then.
    """
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def build_environment(
    environment: Mapping[str, str], base_url: str, api_key: str
) -> dict[str, str]:
    """``environment``, which names no model, for an agent whose model is at ``base_url``."""
    changed = {
        **environment,
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        # Anthropic's SDK adds /v1 itself.
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
        # The OpenAI Agents SDK would send traces to OpenAI with the session's key, and with every
        # call the settings of OpenAI's newest model, which it takes for an agent without one.
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "OPENAI_DEFAULT_MODEL": SERVED_MODEL,
    }
    # The way to this machine must not lead through a proxy.
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in environment.get(name, "").split(",") if host]
        changed[name] = ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost"]))
    return changed


def format_outcome(outcome: AgentOutcome) -> Message:
    """What an agent ended with, as a message; rewards of any make become plain numbers.

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


def _format_failure(
    error: BaseException, boundary: Boundary | None = None, own_urls: Sequence[str] | None = None
) -> Message:
    failure: Failure = describe_failure(error, boundary=boundary, own_urls=own_urls)
    message = {"op": "failed", "failure": asdict(failure)}
    try:
        encode_message(message)
    except ChannelError as too_long:
        failure = describe_failure(ChannelError(f"{type(error).__name__}: {too_long}"))
        message = {"op": "failed", "failure": asdict(failure)}
    return message


def _import_agent(spec: AgentSpec, *, trial: Any) -> AgentSource:
    return AgentSource(import_object(spec.path, spec.key), spec.kwargs, spec.key, trial=trial)


def find_library_modules(besides: Container[str] = ()) -> list[str]:
    """The modules of this process that are no user's code, in the order in which they came."""
    return [
        name
        for name, module in list(sys.modules.items())
        if name not in besides and (getattr(module, "__file__", None) or "").startswith(_LIBRARIES)
    ]


def import_modules(names: Iterable[str]) -> None:
    """Imports what can be imported; a module that cannot is the business of who needs it."""
    for name in names:
        if name in sys.modules or name == "__main__":
            continue
        try:
            importlib.import_module(name)
        except BaseException as error:
            _log.debug("%s is not imported early: %s: %s", name, type(error).__name__, error)
