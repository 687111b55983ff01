"""The program of a rollout worker.

    python -m agentrl_cli.launch.rollout_workers.rollout_program DESCRIPTOR

It gets a spec and then attempts on the inherited socket with this file descriptor, and answers with
records of trajectories. Those are made on an event loop in a thread of its own, as in a trainer
without workers; the main thread speaks with the trainer, and so notices when that loop is blocked.
It ends when the trainer closes the socket, or is gone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import faulthandler
import os
import signal
import socket
import sys
import traceback
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.engine.router.server_clients import open_clients
from agentrl_cli.engine.router.server_mirror import MirrorEngine
from agentrl_cli.errors import AgentrlError, RunError
from agentrl_cli.launch.rollout_workers.loop_watchdog import (
    HEARTBEAT_SECONDS,
    SILENCE_SECONDS,
    LoopWatchdog,
)
from agentrl_cli.log import file_log, get_logger
from agentrl_cli.process_channel import Message, MessageStream
from agentrl_cli.rollout.background_loop import BackgroundLoop, frozen_heap
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.external.external_workflow import ExternalListener
from agentrl_cli.rollout.workers.worker_pool import LOG_NAME
from agentrl_cli.rollout.workflow import Attempt, RolloutWorkflow
from agentrl_cli.rollout.workflow_building import build_workflows, open_workers
from agentrl_cli.scratch_folders import ScratchFolder
from agentrl_cli.secret_masking import find_secrets, hide_text
from agentrl_cli.store.trajectory_record import format_record, parse_record
from agentrl_cli.tracking.gateway import get_gateway

_log = get_logger(__name__)

_OPEN_SECONDS = 30.0
_CLOSE_SECONDS = 3.0


class RolloutProgram:
    """Makes trajectories for the trainer at the other end of the stream."""

    def __init__(self, stream: MessageStream, stack: ExitStack) -> None:
        self._stream = stream
        self._control = asyncio.get_running_loop()
        self._background = BackgroundLoop()
        stack.callback(self._background.close, _CLOSE_SECONDS)
        self._watchdog = LoopWatchdog(self._background)
        self._running: dict[int, concurrent.futures.Future[None]] = {}
        self._workflows: dict[str, RolloutWorkflow] = {}
        self._engine: MirrorEngine

    def open(self, spec: Message, stack: ExitStack) -> None:
        """Builds engine and workflows, as the spec says.

        Raises:
            UserInputError: an agent or a reward cannot be used.
        """
        config = ExperimentConfig.model_validate(spec["config"])
        for *_, secret in find_secrets(spec["config"]):
            hide_text(secret)
        log_dir = _open_log(spec, stack)
        tokenizer = _load_tokenizer(spec, config)
        self._engine = self._background.run(self._open_engine(spec, config), _OPEN_SECONDS)
        agents = stack.enter_context(open_workers(config))
        external = self._build_listener(spec, config)
        workflows = build_workflows(
            config, tokenizer, spec["splits"], workers=agents, external=external
        )
        for split, workflow in zip(spec["splits"], workflows, strict=True):
            stack.callback(workflow.close)
            workflow.log_to(log_dir)
            self._workflows[split] = workflow
        if external is not None:
            # Programs that wait for a task are told that the run has ended.
            reading = config.engine.list_reading_options()
            gateway = get_gateway(self._engine, tokenizer, **reading)
            stack.callback(lambda: self._background.run(gateway.close(), _CLOSE_SECONDS))

    def _build_listener(self, spec: Message, config: ExperimentConfig) -> ExternalListener | None:
        if config.rollout.agent_mode != "external":
            return None

        def announce(text: str) -> None:
            self._report({"op": "listening", "text": text, "port": listener.port})

        listener = ExternalListener(config.rollout, announce, **spec["listener"])
        return listener

    async def _open_engine(self, spec: Message, config: ExperimentConfig) -> MirrorEngine:
        endpoints = [ServerEndpoint(**endpoint) for endpoint in spec["endpoints"]]
        # Each worker's first session goes to another server.
        first = spec["index"] % len(endpoints)
        endpoints = endpoints[first:] + endpoints[:first]
        clients = open_clients(spec["engine_kind"], endpoints, config.engine)
        return MirrorEngine(
            clients, config.engine, model_name=config.model.path, report=self._report
        )

    async def work(self) -> None:
        """Does what the trainer asks for until the stream ends."""
        beating = asyncio.create_task(self._beat())
        try:
            while True:
                message, payload = await self._stream.receive()
                if message["op"] == "servers":
                    self._background.post(self._engine.take_state, message)
                elif message["op"] == "cancel":
                    future = self._running.get(message["key"])
                    if future is not None:
                        future.cancel()
                else:
                    self._begin(message, payload)
        except EOFError:
            _log.info("the trainer has closed the connection")
        finally:
            beating.cancel()

    def _begin(self, message: Message, payload: bytes) -> None:
        key = message["key"]
        future = self._running[key] = self._background.submit(self._run(message, payload))
        future.add_done_callback(lambda _: self._running.pop(key, None))

    async def _beat(self) -> None:
        while True:
            faulthandler.dump_traceback_later(SILENCE_SECONDS)
            stall = self._watchdog.look()
            self._stream.send({"op": "alive", "stall": stall and asdict(stall)})
            self._background.post(self._engine.report_counts)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _run(self, message: Message, payload: bytes) -> None:
        """Makes one trajectory and sends its record, or what it raised."""
        told = message["attempt"]
        earlier = parse_record(payload).interactions if payload else ()
        attempt = Attempt(**{**told, "task": Task(**told["task"]), "earlier": earlier})
        await self._watchdog.name_trajectory(attempt.id)
        # On its way before anything that may end this process: else nobody would know what did.
        begun = self._send({"op": "begun", "key": message["key"]})
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(begun, self._control))
        record, error, has_given_row = b"", None, True
        try:
            workflow = self._workflows[message["split"]]
            trajectory = await workflow.arun_trajectory(self._engine, attempt)
            record = format_record(trajectory)
            has_given_row = trajectory.task == attempt.task.row
        except AgentrlError as raised:
            error = raised
        except BaseException as raised:
            # A cancellation of the trainer's is no longer waited for.
            where = "".join(traceback.format_exception(raised))
            error = RunError(f"{attempt.id}: the workflow raised {type(raised).__name__}: {where}")
        self._engine.report_counts()
        described = error and _describe(error)
        ended = {"key": message["key"], "error": described, "has_given_row": has_given_row}
        self._report({"op": "ended", **ended}, record)

    async def _send(self, message: Message) -> None:
        self._stream.send(message)

    def _report(self, message: Message, payload: bytes = b"") -> None:
        """Sends from the event loop of the rollouts."""
        with suppress(RuntimeError):  # The program is ending.
            self._control.call_soon_threadsafe(self._stream.send, message, payload)


def _open_log(spec: Message, stack: ExitStack) -> Path:
    """The folder in which agents' processes have their logs."""
    if spec["log_dir"] is not None:
        log_dir = Path(spec["log_dir"])
        stack.enter_context(file_log(log_dir / f"{spec['name']}.log"))
        return log_dir
    # The trainer is on another machine, and what is printed here gets there.
    printed = Path("/dev/stderr")
    stack.enter_context(file_log(printed))
    scratch = stack.enter_context(ScratchFolder("logs"))
    (scratch.path / LOG_NAME).symlink_to(printed.resolve())
    return scratch.path


def _load_tokenizer(spec: Message, config: ExperimentConfig) -> Any:
    if spec["tokenizer_files"] is None:
        from agentrl_cli.models.model_files import load_tokenizer_of

        return load_tokenizer_of(
            spec["model_folder"], config.tokenizer_path, config.model.chat_template
        )
    from transformers import PreTrainedTokenizerFast

    # Without torch, which has nothing to do here: 4 s of CPU time and 330 MB less.
    with ScratchFolder("tokenizer") as folder:
        for name, text in spec["tokenizer_files"].items():
            (folder.path / name).write_text(text, "utf-8")
        return PreTrainedTokenizerFast.from_pretrained(folder.path)


async def _serve(end: socket.socket) -> None:
    stream = await MessageStream.open(end)
    with ExitStack() as stack:
        spec, _ = await stream.receive()
        sys.path[:] = spec["import_path"] or sys.path
        try:
            program = RolloutProgram(stream, stack)
            program.open(spec, stack)
        except AgentrlError as error:
            stream.send({"op": "refused", "error": _describe(error)})
        else:
            stream.send({"op": "ready"})
            with frozen_heap():
                await program.work()
    stream.close()
    await stream.wait_closed(_CLOSE_SECONDS)


def _describe(error: AgentrlError) -> list[Any]:
    return [type(error).__name__, str(error), error.exit_code]


def main(argv: list[str]) -> None:
    """The whole life of a rollout worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    descriptor = int(argv[0])
    # Not for what agents start.
    os.set_inheritable(descriptor, False)
    try:
        asyncio.run(_serve(socket.socket(fileno=descriptor)))
    except BaseException:
        traceback.print_exc()
        _exit(1)
    _exit(0)


def _exit(status: int) -> None:
    """Ends the process at once, whatever threads that agents have started still do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
