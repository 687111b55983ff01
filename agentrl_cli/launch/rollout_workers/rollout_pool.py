"""The rollout workers of a run, and workflows whose trajectories they make."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import InferenceEngine
from agentrl_cli.engine.router.engine_router import EngineRouter
from agentrl_cli.errors import AgentrlError, DatasetError, RunError
from agentrl_cli.launch.placement import LocalPlacement, Placement
from agentrl_cli.launch.plan import plan_rollout_worker
from agentrl_cli.launch.processes.managed_process import StartProcess, start_with_socket
from agentrl_cli.launch.processes.trainer_protocol import RunningServers
from agentrl_cli.launch.rollout_workers.loop_watchdog import SILENCE_SECONDS, Stall
from agentrl_cli.launch.rollout_workers.rollout_worker import (
    NotBegunError,
    RolloutWorker,
    WorkerLostError,
)
from agentrl_cli.log import Observer, get_logger
from agentrl_cli.process_channel import Message, find_unsendable, list_import_path
from agentrl_cli.records import Boundary, Failure, StopReason, Trajectory
from agentrl_cli.rollout.background_loop import BackgroundLoop
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.workflow import Attempt, RolloutWorkflow
from agentrl_cli.scratch_folders import ScratchFolder
from agentrl_cli.store.layout import describe
from agentrl_cli.tracking.credit import TokenSequence

_log = get_logger(__name__)

#: Of one worker within an hour; the next death ends the run.
_MAX_RESTARTS = 3
_RESTART_WINDOW_SECONDS = 3600.0
_WATCH_SECONDS = 1.0
#: What a trajectory may take longer than its deadlines.
_GRACE_SECONDS = 30.0
_START_SECONDS = _CLOSE_SECONDS = 20.0
#: Of the trajectories that a message names.
_MAX_NAMED = 4


class RolloutWorkers:
    """Processes that run the trajectories of a run, each with a gateway of its own.

    An attempt goes to the worker with the fewest trajectories. One that dies is replaced, and its
    trajectories are made once more, by others; one whose event loop is blocked keeps those that it
    has begun, gets no more until it answers, and is ended when they are past their deadlines.

    Args:
        config: the experiment.
        num_workers: how many processes.
        splits: what trajectories they make: for ``train``, for ``eval``.
        observer: is told what a person should know.
        random_key: of the listener for programs elsewhere, where the user has chosen none.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        num_workers: int,
        splits: Sequence[str],
        observer: Observer,
        random_key: str | None = None,
    ) -> None:
        self._config = config
        self._splits = list(splits)
        self._num_workers = num_workers
        self._observer = observer
        self._background: BackgroundLoop | None = None
        self._start_process: StartProcess = start_with_socket
        self._workers: dict[int, RolloutWorker] = {}
        """Those that are ready, by their place."""
        self._started: set[RolloutWorker] = set()
        self._router: EngineRouter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._error: AgentrlError | None = None
        self._changed = asyncio.Event()
        self._listener: Message = {"random_key": random_key, "port": None}
        """What programs elsewhere know; a worker that replaces another keeps it."""
        self._notice = ""
        self._own_tasks: dict[str, tuple[Task, int]] = {}
        """By group: the task that a program put into its place, and how many trajectories have come
        back with it."""
        rollout = config.rollout
        self._max_stall_seconds = (
            rollout.timeout_seconds + rollout.reward_timeout_seconds + _GRACE_SECONDS
        )

    # -- from the trainer's thread ---------------------------------------------------------

    def start(
        self,
        background: BackgroundLoop,
        servers: RunningServers,
        model_folder: str,
        tokenizer: Any,
        log_dir: Path,
        *,
        placement: Placement | None = None,
    ) -> None:
        """Begins to start them, once; returns at once."""
        if self._background is not None:
            return
        self._background = background
        placement = placement or LocalPlacement()
        self._start_process = placement.start_process
        is_here = placement.cluster is None
        spec = {
            "import_path": list_import_path() if is_here else None,
            "engine_kind": servers.run.engine_kind,
            "endpoints": [asdict(endpoint) for endpoint in servers.endpoints],
            "model_folder": model_folder,
            "tokenizer_files": _read_tokenizer_files(tokenizer),
            "log_dir": str(log_dir.absolute()) if is_here else None,
            "splits": self._splits,
            "listener": self._listener,
        }
        names = f"rollout-0 to rollout-{self._num_workers - 1}"
        names = names if self._num_workers > 1 else "rollout-0"
        self._observer.on_message(f"starting {names} (logs: {describe(log_dir)})")
        background.run(self._start_tasks(spec, log_dir), _START_SECONDS)

    def attach(self, router: EngineRouter) -> None:
        """Has them call the servers of this router from now on."""
        assert self._background is not None
        self._background.post(self._attach, router)

    def close(self) -> None:
        """Ends them and all that they have started; may be called twice."""
        background, self._background = self._background, None
        if background is None:
            return
        try:
            background.run(self._close(), _CLOSE_SECONDS)
        finally:
            for worker in self._started:
                worker.end_at_once()

    # -- on the background loop ------------------------------------------------------------

    async def run(self, split: str, attempt: Attempt) -> Trajectory:
        """The record of one attempt, made by one of the workers.

        Raises:
            UserInputError: a mistake that would repeat itself in every trajectory.
            RunError: workers cannot be kept running.
        """
        loop, has_been_lost = asyncio.get_running_loop(), False
        started = loop.time()
        while True:
            worker = await self._choose()
            attempt = self._with_own_task(attempt)
            try:
                trajectory = await worker.run(split, attempt)
            except NotBegunError:
                continue
            except WorkerLostError as error:
                if has_been_lost or error.blocked_by == attempt.id:
                    return _build_lost(attempt, worker.name, error, loop.time() - started)
                has_been_lost = True
                _log.warning("%s was lost with %s: made once more", attempt.id, worker.name)
            else:
                self._note_own_task(attempt, trajectory)
                return trajectory

    def _with_own_task(self, attempt: Attempt) -> Attempt:
        """A group is one task, and a worker that replaces another does not know what task a program
        gave to that one."""
        task, _ = self._own_tasks.get(attempt.task.group_id, (attempt.task, 0))
        return replace(attempt, task=task)

    def _note_own_task(self, attempt: Attempt, trajectory: Trajectory) -> None:
        group_id = trajectory.group_id
        if trajectory.task != attempt.task.row or group_id in self._own_tasks:
            own = Task(task_id=trajectory.task_id, row=trajectory.task, group_id=group_id)
            task, num_back = self._own_tasks.pop(group_id, (own, 0))
            if num_back + 1 < self._config.gconfig.n_samples:
                self._own_tasks[group_id] = task, num_back + 1

    async def _choose(self) -> RolloutWorker:
        """The worker with the fewest trajectories, as soon as one may have another.

        Its waiting ends: a blocked worker is ended in time, and one that dies is replaced, or ends
        the run.
        """
        while True:
            if self._error is not None:
                raise type(self._error)(*self._error.args)
            free = [worker for worker in self._workers.values() if worker.is_free]
            if free:
                return min(free, key=lambda worker: worker.num_running)
            self._changed.clear()
            await self._changed.wait()

    async def _start_tasks(self, spec: Message, log_dir: Path) -> None:
        for index in range(self._num_workers):
            config = share_limits(self._config, index, self._num_workers)
            own = {**spec, "index": index, "config": config.model_dump(mode="json")}
            self._tasks.append(asyncio.create_task(self._keep(index, own, log_dir)))
        self._tasks.append(asyncio.create_task(self._watch()))

    async def _keep(self, index: int, spec: Message, log_dir: Path) -> None:
        """Has a worker in this place, as long as it can be kept running."""
        loop, deaths = asyncio.get_running_loop(), list[float]()
        try:
            while self._error is None:
                worker = RolloutWorker(
                    *(plan_rollout_worker(index), log_dir, self._start_process),
                    *(self._on_stall, self._on_listening),
                )
                self._started.add(worker)
                reason = await self._live(index, worker, spec)
                self._started.discard(worker)
                if self._error is not None:
                    return
                now = loop.time()
                deaths = [t for t in deaths if now - t < _RESTART_WINDOW_SECONDS] + [now]
                if len(deaths) > _MAX_RESTARTS:
                    mode = self._config.rollout.agent_mode
                    raise RunError(_describe_deaths(worker.name, len(deaths), reason, mode))
                self._observer.on_message(f"{worker.name} is started again: {reason}")
        except AgentrlError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("the rollout worker %d cannot be kept running", index)
            problem = f"{type(error).__name__}: {error}"
            self._fail(RunError(f"rollout-{index} cannot be kept running: {problem}"))

    async def _live(self, index: int, worker: RolloutWorker, spec: Message) -> str:
        """The whole life of a worker; why it ended."""
        try:
            await worker.start(spec)
        except WorkerLostError as error:
            return str(error)
        self._workers[index] = worker
        self._attach_one(worker)
        self._changed.set()
        await worker.wait_until_ended()
        del self._workers[index]
        return worker.end_reason

    def _attach(self, router: EngineRouter) -> None:
        self._router = router
        for worker in self._workers.values():
            self._attach_one(worker)

    def _attach_one(self, worker: RolloutWorker) -> None:
        if self._router is not None:
            worker.mirror = self._router.add_mirror(worker.send)

    def _fail(self, error: AgentrlError) -> None:
        self._error = self._error or error
        self._changed.set()
        for worker in self._workers.values():
            worker.kill(WorkerLostError(str(error)))

    async def _watch(self) -> None:
        """Finds workers that give no sign of life, and ends those that are blocked for too long."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _WATCH_SECONDS
            await asyncio.sleep(_WATCH_SECONDS)
            if loop.time() > due + _WATCH_SECONDS:
                # It was this loop that was held up: what workers have sent is read first.
                continue
            for worker in list(self._workers.values()):
                silent = loop.time() - worker.heard_at
                if silent > SILENCE_SECONDS:
                    worker.note_silence(silent)
                if worker.stall is not None and worker.stall.seconds > self._max_stall_seconds:
                    worker.kill(_build_stall_error(worker.stall))

    def _on_stall(self, worker: RolloutWorker, stall: Stall | None) -> None:
        if stall is None:
            self._observer.on_message(f"{worker.name} answers again, and gets trajectories")
            self._changed.set()
            return
        text = describe_stall(worker, stall, self._max_stall_seconds)
        _log.warning("%s", text)
        self._observer.on_message(text)

    def _on_listening(self, text: str, port: int) -> None:
        self._listener["port"] = port
        if text != self._notice:
            self._notice = text
            self._observer.on_message(text)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._error = self._error or RunError("the rollout workers were closed")
        self._changed.set()
        await asyncio.gather(*(worker.end() for worker in self._started))
        self._started.clear()


class RemoteWorkflow(RolloutWorkflow):
    """A workflow whose trajectories rollout workers make.

    Args:
        workers: the workers.
        split: which of their workflows: ``train`` or ``eval``.
        local: the same workflow as it was built here, which knows what rows it can run on.
    """

    def __init__(self, workers: RolloutWorkers, split: str, local: RolloutWorkflow) -> None:
        self._remote = workers
        self._split = split
        self._local = local

    async def arun_trajectory(self, engine: InferenceEngine, attempt: Attempt) -> Trajectory:
        """The record of one attempt; see :class:`RolloutWorkflow`."""
        # What the worker has no use for is not sent: a failed try may hold thousands of tokens.
        attempt = replace(attempt, earlier=self._local.find_finished_turns(attempt))
        return await self._remote.run(self._split, attempt)

    async def arun_episode(
        self, engine: InferenceEngine, data: Mapping[str, Any]
    ) -> dict[str, TokenSequence]:
        """Not here. Raises RuntimeError."""
        raise RuntimeError("rollout workers make whole trajectories: call arun_trajectory")

    def check_rows(self, rows: list[dict[str, Any]], where: str) -> None:
        """As the workflow does; refuses, too, what would not reach a worker as it is.

        Raises:
            UserInputError: naming the row and the field.
        """
        self._local.check_rows(rows, where)
        for number, row in enumerate(rows, start=1):
            for field, value in find_unsendable(row):
                raise DatasetError(
                    f"{where}: row {number} (counted from 1): {field.lstrip('.')} is "
                    f"{type(value).__name__}, which does not reach a rollout worker, another "
                    "process, as it is. Allowed: text, numbers, true, false, null, lists, and "
                    "mappings with text as keys. Convert it, or type rollout.num_workers=0"
                )


def _read_tokenizer_files(tokenizer: Any) -> dict[str, str] | None:
    """The files from which any process loads the same tokenizer without its model's code; None
    where that would be another one."""
    from transformers import PreTrainedTokenizerFast

    with ScratchFolder("tokenizer") as scratch:
        folder = scratch.path / "tokenizer"
        tokenizer.save_pretrained(folder)
        copy = PreTrainedTokenizerFast.from_pretrained(folder)
        if _describe_tokenizer(copy) != _describe_tokenizer(tokenizer):
            return None
        return {path.name: path.read_text("utf-8") for path in folder.iterdir()}


def _describe_tokenizer(tokenizer: Any) -> tuple[Any, ...]:
    return (
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        tokenizer.clean_up_tokenization_spaces,
    )


def share_limits(config: ExperimentConfig, index: int, num_workers: int) -> ExperimentConfig:
    """The configuration of one of the workers, with its share of what all may start."""
    rollout = config.rollout

    def share(total: int) -> int:
        return max(1, total // num_workers + (index < total % num_workers))

    shared = {
        "num_workers": 0,
        "reward_workers": share(rollout.count_reward_workers()),
        "subprocess": rollout.subprocess.model_copy(
            update={"max_processes": share(rollout.count_agent_processes())}
        ),
    }
    return config.model_copy(update={"rollout": rollout.model_copy(update=shared)})


def describe_stall(worker: RolloutWorker, stall: Stall, max_seconds: float) -> str:
    """What a person should know of a worker whose event loop does not answer."""
    running = worker.list_running()
    named = ", ".join(list(running.values())[:_MAX_NAMED])
    named += ", ..." if len(running) > _MAX_NAMED else ""
    culprit = running.get(stall.trajectory or "", stall.trajectory)
    whose = f"trajectory {culprit}" if culprit else f"one of {named or 'none'}"
    lines = "".join(f"\n  | {line}" for line in stall.stack.rstrip().splitlines())
    where = f". It executes:{lines}\n" if lines else f" (threads: {worker.log_path}). "
    return (
        f"{worker.name}: its event loop has been blocked for {stall.seconds:.0f} s by code of "
        f"{whose}, while {len(running)} of its trajectories wait{where}It gets no others until it "
        f"answers, and is ended after {max_seconds:.0f} s. Await what takes long "
        "(asyncio.sleep, an async client, asyncio.to_thread), write the agent as a plain def, "
        "or type rollout.agent_mode=subprocess"
    )


def _build_stall_error(stall: Stall) -> WorkerLostError:
    return WorkerLostError(
        f"its event loop was blocked for {stall.seconds:.0f} s by code that does not await, and "
        f"it was ended\n{stall.stack}".rstrip(),
        stall.trajectory,
    )


def _describe_deaths(name: str, num_deaths: int, reason: str, agent_mode: str) -> str:
    advice = (
        "Type rollout.num_workers=0 to see it fail in the trainer"
        if agent_mode == "external"
        else "An agent that crashes its process takes the others in it along. Type "
        "rollout.agent_mode=subprocess, and only its own trajectory fails; or "
        "rollout.num_workers=0 to see it fail in the trainer"
    )
    ended = f"{name} has ended {num_deaths} times within an hour. The last time {reason}"
    return f"{ended}\n{advice}"


def _build_lost(attempt: Attempt, worker: str, lost: WorkerLostError, seconds: float) -> Trajectory:
    """The record of an attempt that no worker has finished."""
    is_late = lost.blocked_by == attempt.id
    return attempt.begin_trajectory(
        failure=Failure(
            boundary=Boundary.TIMEOUT if is_late else Boundary.AGENT,
            kind="DeadlineError" if is_late else "WorkerLostError",
            message=f"the rollout worker that ran it, {worker}, was lost: {lost}",
        ),
        stop_reason=StopReason.MAX_SECONDS if is_late else None,
        seconds=seconds,
    )
