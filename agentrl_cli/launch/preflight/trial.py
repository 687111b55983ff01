"""A trial: the agent of a configuration really runs on a few tasks, and is watched meanwhile."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.import_paths import import_object
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.config.user_code import is_of_user
from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.errors import AgentrlError
from agentrl_cli.launch.completion_sources import CompletionSource, EndpointSource, EngineSource
from agentrl_cli.launch.rollout_workers.loop_watchdog import LoopWatchdog
from agentrl_cli.launch.trainer import take_rows
from agentrl_cli.log import Observer
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.background_loop import BackgroundLoop
from agentrl_cli.rollout.dataset import build_eval_tasks
from agentrl_cli.rollout.reward_process import Score
from agentrl_cli.rollout.rewards import AsyncRewardWrapper
from agentrl_cli.rollout.scheduler import run_tasks
from agentrl_cli.rollout.workflow import Attempt, RolloutWorkflow
from agentrl_cli.rollout.workflow_building import build_workflow, open_workers
from agentrl_cli.scratch_folders import ScratchFolder
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.session import Budget, Session

STAND_IN = "builtin:calculator"
#: Of replies of the stand-in, which never ends some of them.
_STAND_IN_TOKENS = 64
#: A model of more weights takes minutes for a few replies on a CPU.
_MAX_CPU_PARAMETERS = 1_000_000_000
#: An event loop that is only busy with a few trajectories answers much sooner.
_STALL_SECONDS = 0.3
_POLL_SECONDS = 0.05
#: Of the time for the check, what one trajectory may take.
_TRAJECTORY_SHARE = 0.6
#: Importing something for the first time blocks too, once in a run.
_IMPORTING = re.compile(r'File "<frozen importlib')
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


@dataclass(slots=True)
class Trial:
    """What came out of a trial."""

    model: str
    """The name of the model that answered."""
    is_stand_in: bool
    """True: it is not the configuration's; how well it does says nothing."""
    num_planned: int = 0
    trajectories: list[Trajectory] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    """What the reward function returned, call by call."""
    sessions: list[Session] = field(default_factory=list)
    stalls: dict[str, float] = field(default_factory=dict)
    """Places in the user's code that blocked the event loop, and the seconds of each in all."""
    seconds: float = 0.0
    error: AgentrlError | None = None
    """What ended it before its end."""
    is_late: bool = False
    """True: the time for it was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan:
    """How a trial is made."""

    num_tasks: int
    n_samples: int
    timeout_seconds: float
    base_url: str | None = None
    """An OpenAI-compatible endpoint that answers; None: a model here does."""
    endpoint_model: str | None = None


def run_trial(
    config: ExperimentConfig, plan: TrialPlan, local_model: str | None, observer: Observer
) -> Trial:
    """Runs the agent as planned; writes to a scratch folder alone, which is deleted.

    ``local_model`` is the folder of the configuration's model, where it can be run here.

    Raises:
        UserInputError: something in the input is wrong, found before the agent ran.
    """
    is_stand_in = plan.base_url is None and local_model is None
    with ScratchFolder("check") as scratch:
        config = _build_trial_config(config, plan, scratch.path, is_stand_in=is_stand_in)
        source: CompletionSource
        if plan.base_url is not None:
            source = EndpointSource(config, plan.base_url, plan.endpoint_model or "")
        else:
            run = resolve_run(config, Machine.detect(), purpose="eval")
            source = EngineSource(config, run, observer)
        trial = Trial(plan.endpoint_model or config.model.path, is_stand_in)
        with suppress(TimeoutError), ExitStack() as stack:
            _run(config, plan, source, trial, observer, scratch.path, stack)
        return trial


def _build_trial_config(
    config: ExperimentConfig, plan: TrialPlan, scratch: Path, *, is_stand_in: bool
) -> ExperimentConfig:
    rollout = config.rollout.model_copy(
        update={
            "num_workers": 0,
            "max_retries": 0,
            "timeout_seconds": min(
                config.rollout.timeout_seconds, plan.timeout_seconds * _TRAJECTORY_SHARE
            ),
        }
    )
    gconfig = config.gconfig.model_copy(update={"n_samples": plan.n_samples})
    num_trajectories = plan.num_tasks * plan.n_samples
    engine = config.engine.model_copy(
        update={"kind": "embedded", "num_servers": 1, "max_num_seqs": num_trajectories}
    )
    model = config.model.model_copy(update={"lora": None})
    update: dict[str, Any] = {"output_dir": str(scratch), "loggers": (), "rollout": rollout}
    if is_stand_in:
        # Its own template and formats, not those of the model that it stands in for.
        model = model.model_copy(
            update={"path": STAND_IN, "dtype": "float32", "chat_template": None}
        )
        engine = engine.model_copy(update={"tool_call_parser": "auto", "reasoning_parser": "auto"})
        limit = min(gconfig.max_tokens, _STAND_IN_TOKENS)
        gconfig = gconfig.model_copy(update={"max_tokens": limit})
        update["tokenizer_path"] = None
    elif Machine.detect().emulates_bfloat16:
        model = model.model_copy(update={"dtype": "float32"})
    update |= {"model": model, "engine": engine, "gconfig": gconfig}
    return config.model_copy(update=update)


def _run(
    config: ExperimentConfig,
    plan: TrialPlan,
    source: CompletionSource,
    trial: Trial,
    observer: Observer,
    scratch: Path,
    stack: ExitStack,
) -> None:
    rows = take_rows(None, config.train_dataset, "train_dataset")
    rows = [rows[index] for index in spread(len(rows), plan.num_tasks)]
    workers = stack.enter_context(open_workers(config))
    tokenizer = source.tokenizer if config.workflow_path is not None else None
    recorded = _SessionRecorder(source, trial.sessions)
    workflow = build_workflow(config, tokenizer, open_client=recorded.open_client, workers=workers)
    stack.callback(workflow.close)
    reward = _build_recorded_reward(config, trial.scores)
    if reward is not None:
        stack.callback(reward.close)
        workflow.use(config.rollout, config.gconfig, reward)
    workflow.check_rows(rows, "train_dataset")
    workflow.log_to(scratch)
    source.prepare()
    background = stack.enter_context(BackgroundLoop("agentrl-check"))
    observer.on_stage("load model")
    engine = source.open_engine(scratch, background, stack)
    watched = _WatchedWorkflow(workflow, LoopWatchdog(background, _STALL_SECONDS))
    trial.num_planned = len(rows) * plan.n_samples
    observer.on_stage("trial", trial.num_planned)

    def keep(trajectory: Trajectory) -> None:
        trial.trajectories.append(trajectory)
        observer.on_progress(len(trial.trajectories))

    running = run_tasks(
        watched,
        engine,
        build_eval_tasks(rows, "check"),
        n_samples=plan.n_samples,
        max_concurrent=config.rollout.max_concurrent,
        on_finished=keep,
    )
    started = time.monotonic()
    with watched.watching(trial.stalls):
        try:
            background.run(running, plan.timeout_seconds)
        except AgentrlError as error:
            trial.error = error
        except TimeoutError:
            trial.is_late = True
        finally:
            trial.seconds = time.monotonic() - started


def spread(num_rows: int, num_chosen: int) -> list[int]:
    """Positions all over the rows, from the first on: datasets are often sorted."""
    num_chosen = min(num_rows, num_chosen)
    return [index * num_rows // num_chosen for index in range(num_chosen)]


class _SessionRecorder:
    """Opens clients of a source, and keeps their sessions."""

    def __init__(self, source: CompletionSource, sessions: list[Session]) -> None:
        self._source = source
        self._sessions = sessions

    def open_client(
        self, engine: InferenceEngine, sampling: Sampling, budget: Budget
    ) -> TrackingClient:
        client = self._source.open_client(engine, sampling, budget)
        self._sessions.append(client.session)
        return client


class _RecordedReward(AsyncRewardWrapper):
    """A reward function, and all that it said."""

    scores: list[Score]

    async def score(self, **supplied: Any) -> Score:
        score = await super().score(**supplied)
        self.scores.append(score)
        return score


def _build_recorded_reward(
    config: ExperimentConfig, scores: list[Score]
) -> AsyncRewardWrapper | None:
    if config.reward_fn_path is None:
        return None
    reward = _RecordedReward(
        import_object(config.reward_fn_path, "reward_fn_path"),
        timeout_seconds=config.rollout.reward_timeout_seconds,
        num_workers=config.rollout.reward_workers,
        import_path=config.reward_fn_path,
    )
    reward.scores = scores
    return reward


class _WatchedWorkflow(RolloutWorkflow):
    """A workflow whose trajectories are known to a watchdog."""

    def __init__(self, workflow: RolloutWorkflow, watchdog: LoopWatchdog) -> None:
        self._workflow = workflow
        self._watchdog = watchdog

    async def arun_episode(self, engine: InferenceEngine, data: Mapping[str, Any]) -> Any:
        return await self._workflow.arun_episode(engine, data)

    async def arun_trajectory(self, engine: InferenceEngine, attempt: Attempt) -> Trajectory:
        return await self._workflow.arun_trajectory(engine, attempt)

    @contextmanager
    def watching(self, stalls: dict[str, float]) -> Iterator[None]:
        """Adds to ``stalls`` what blocks the loop while the block runs."""
        ended = threading.Event()

        def watch() -> None:
            place, seconds = "", 0.0
            while not ended.wait(_POLL_SECONDS):
                stall = self._watchdog.look()
                if stall is None or stall.seconds < seconds:
                    if place:
                        stalls[place] = stalls.get(place, 0.0) + seconds
                    place, seconds = "", 0.0
                if stall is not None:
                    place, seconds = find_place(stall.stack) or place, stall.seconds
            if place:
                stalls[place] = stalls.get(place, 0.0) + seconds

        thread = threading.Thread(target=watch, name="agentrl-check-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(5.0)


def find_place(stack: str) -> str | None:
    """``FILE:LINE in FUNCTION`` of the innermost line of the user's in a stack; None: it blocks in
    no code of the user's, or imports something for the first time."""
    if _IMPORTING.search(stack):
        return None
    frames = [f for f in _FRAME.findall(stack) if is_of_user(f[0])]
    if not frames:
        return None
    file, line, function = frames[-1]
    return f"{os.path.relpath(file)}:{line} in {function}"


def choose_local_model(
    config: ExperimentConfig, num_parameters: int | None, find_folder: Callable[[str], str | None]
) -> str | None:
    """The folder of the configuration's model, if it is on this machine and small enough to run
    here; None: something must stand in for it."""
    if config.model.path == STAND_IN:
        return STAND_IN
    folder = find_folder(config.model.path)
    if folder is None or Machine.detect().gpu_ids:
        return folder
    if num_parameters is None or num_parameters > _MAX_CPU_PARAMETERS:
        return None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return folder if 8 * num_parameters < memory else None
