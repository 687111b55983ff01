"""The three places where a cell's agent runs, before one script that every cell plays."""

from __future__ import annotations

import json
import queue
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.import_paths import import_object
from agentrl_cli.engine.protocol import Generation
from agentrl_cli.launch.model_serving import ListenAddress, serve_online
from agentrl_cli.log import SilentObserver
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.background_loop import BackgroundLoop
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.workers.worker_pool import WorkerAgents
from agentrl_cli.rollout.workflow import Attempt
from agentrl_cli.rollout.workflow_building import build_workflow
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway import Gateway

AGENTS = Path(__file__).with_name("matrix_agents.py")
ROW = {"question": "What is 20 + 22?", "answer": "42"}
_CALLS = [
    f'<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{e}"}}}}\n</tool_call>'
    for e in ("20 + 22", "21 * 2")
]
#: What the model says for each number of results that it has seen: text beside a call, a call
#: alone, two calls at once, and the answer.
SCRIPT = {0: f"Let me see.\n{_CALLS[0]}", 1: _CALLS[0], 2: "\n".join(_CALLS), 4: "It is 42."}
_RESULT = "<tool_response>\n42\n</tool_response>"
_TOKENS_PER_PIECE = 3
_TOKENS_PER_VERSION = 7
_PLAY_SECONDS = 120.0


class NumberingEngine:
    """Gives every token a logprob of its own, as if weights changed between tokens, and streams."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._num_tokens = 0
        self.deliveries: list[str] = []
        """How each call was asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_ids: Any, sampling: Any, **options: Any) -> Generation:
        self.deliveries.append("whole")
        return await self._sample(prompt_ids, sampling)

    async def stream(self, prompt_ids: Any, sampling: Any, **options: Any) -> Any:
        self.deliveries.append("streamed")
        whole = await self._sample(prompt_ids, sampling)
        for start in range(0, len(whole.completion_ids), _TOKENS_PER_PIECE):
            piece = slice(start, start + _TOKENS_PER_PIECE)
            yield replace(
                whole,
                completion_ids=whole.completion_ids[piece],
                rollout_logprobs=whole.rollout_logprobs[piece],
                versions=whole.versions[piece],
                finish_reason="stop" if piece.stop >= len(whole.completion_ids) else None,
            )

    async def _sample(self, prompt_ids: Any, sampling: Any) -> Generation:
        generation = await self._engine.generate(prompt_ids, sampling)
        begin = self._num_tokens + 1
        self._num_tokens += len(generation.completion_ids)
        numbers = range(begin, self._num_tokens + 1)
        return replace(
            generation,
            # Exact in float32.
            rollout_logprobs=tuple(-number / 1024 for number in numbers),
            versions=tuple(number // _TOKENS_PER_VERSION for number in numbers),
        )


@pytest.fixture(scope="module")
def engine(scripted_engine: Any, recording_engine: Any) -> Any:
    """The script, and what of it was played: forget that before a cell."""
    script = scripted_engine(lambda prompt: SCRIPT[prompt.count(_RESULT)])
    return recording_engine(NumberingEngine(script))


def configure(rollout: Mapping[str, Any], **more: Any) -> ExperimentConfig:
    """A configuration whose trajectories are judged by the answer."""
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "matrix",
            "model": {"path": "builtin:calculator", "dtype": "float32"},
            "train_dataset": {"path": "rows.jsonl"},
            "reward_fn_path": f"{AGENTS}:judge",
            "rollout": rollout,
        }
        | more
    )


class OwnAgents:
    """Agents that agentrl runs itself: inline, or in one pool of workers for each framework."""

    def __init__(self, engine: Any, tokenizer: Any) -> None:
        self._engine = engine
        self._background = BackgroundLoop()
        self._gateway = Gateway(engine, tokenizer)
        self._workers: WorkerAgents | None = None
        self._pooled: Mapping[str, Any] = {}

    def play(self, mode: str, agents: Mapping[str, Any], name: str) -> Trajectory:
        """One trajectory of the agent called ``name`` among a framework's agents."""
        config = configure({"agent_mode": mode, "subprocess": {"max_processes": 2}}, agents=agents)
        workers = self._find_workers(config, agents) if mode == "subprocess" else None
        return self._background.run(self._play(config, workers, name), _PLAY_SECONDS)

    def _find_workers(self, config: ExperimentConfig, agents: Mapping[str, Any]) -> WorkerAgents:
        if self._workers is None or self._pooled != agents:
            self._close_workers()
            self._workers, self._pooled = WorkerAgents(config), agents
            self._workers.start()
        return self._workers

    async def _play(
        self, config: ExperimentConfig, workers: WorkerAgents | None, name: str
    ) -> Trajectory:
        def open_client(_: Any, sampling: Any, budget: Any) -> TrackingClient:
            session = self._gateway.open_session(sampling=sampling, budget=budget)
            return TrackingClient(gateway=self._gateway, session=session)

        workflow = build_workflow(config, None, open_client=open_client, workers=workers)
        try:
            row = {**ROW, "agent_name": name}
            workflow.check_rows([row], "train_dataset")
            task = Task(task_id="0", row=row, group_id="000001.000")
            return await workflow.arun_trajectory(self._engine, Attempt(task=task, step=1))
        finally:
            workflow.close()

    def _close_workers(self) -> None:
        async def close(workers: WorkerAgents) -> None:
            workers.close()

        if self._workers is not None:
            self._background.run(close(self._workers), _PLAY_SECONDS)

    def close(self) -> None:
        """Ends the workers, the gateway and the loop."""
        self._close_workers()
        self._background.run(self._gateway.close(), _PLAY_SECONDS)
        self._background.close()


@pytest.fixture(scope="module")
def own_agents(engine: Any, chat_tokenizer: Any) -> Iterator[OwnAgents]:
    """Where agents run inline and in workers."""
    agents = OwnAgents(engine, chat_tokenizer)
    yield agents
    agents.close()


class OnlineService:
    """``agentrl serve --online``, as a program finds it: with what was shown to its user."""

    def __init__(self, shown: str, folder: RunFolder, finished: queue.Queue[str]) -> None:
        url, key = (
            re.search(rf"export AGENTRL_{name}=(\S+)", shown)[1]  # type: ignore[index]
            for name in ("URL", "API_KEY")
        )
        self._http = httpx2.Client(
            base_url=f"{url}/agentrl/v1",
            headers={"Authorization": f"Bearer {key}"},
            timeout=_PLAY_SECONDS,
        )
        self._folder = folder
        self._finished = finished

    def play(self, program: Callable[[Mapping[str, Any]], str]) -> Trajectory:
        """What is stored of the session in which ``program`` gave its answer."""
        session = self._ask("sessions")
        ended: dict[str, Any] = {"error": "the program failed"}
        try:
            ended = {"final_answer": program(session)}
        finally:
            self._ask(f"sessions/{session['id']}/end", **ended)
        while not self._finished.get(timeout=_PLAY_SECONDS).startswith(session["trajectory_id"]):
            continue  # That of a program that failed.
        [trajectory] = (
            trajectory
            for step, label in self._folder.list_evals()
            for trajectory in self._folder.read_eval(step, label=label)[0]
            if trajectory.id == session["trajectory_id"]
        )
        return trajectory

    def _ask(self, path: str, **body: Any) -> dict[str, Any]:
        reply = self._http.post(path, json=body)
        assert reply.is_success, reply.text
        return reply.json()

    def close(self) -> None:
        self._http.close()


@pytest.fixture(scope="module")
def online_service(
    engine: Any, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OnlineService]:
    """The whole of ``agentrl serve --online``, save that its engine plays the script."""
    folder = tmp_path_factory.mktemp("online")
    (folder / "rows.jsonl").write_text(json.dumps(ROW))
    config = configure(
        {"agent_mode": "external", "max_concurrent": 2},
        model={"path": str(model_folder), "dtype": "float32"},
        train_dataset={"path": str(folder / "rows.jsonl"), "batch_size": 1},
        output_dir=str(folder / "runs"),
        engine={"kind": "embedded", "max_model_len": 512},
    )
    finished: queue.Queue[str] = queue.Queue()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AGENTRL_API_KEY", raising=False)
        patch.setattr(
            "agentrl_cli.launch.completion_sources.load_embedded_engine", lambda *_: engine
        )
        opened = serve_online(
            config, observer=SilentObserver(), on_finished=finished.put, address=ListenAddress()
        )
        with opened as served:
            run_folder = RunFolder.open(folder / "runs" / "matrix" / "t0")
            service = OnlineService(served.text, run_folder, finished)
            yield service
            service.close()
            served.check()


@pytest.fixture(scope="module")
def run_program() -> Callable[..., str]:
    """Runs a program that elsewhere would be a process, in this one."""
    return import_object(f"{AGENTS}:run_program", "the matrix")
