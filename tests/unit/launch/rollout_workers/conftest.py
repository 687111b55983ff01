"""Real rollout workers over an engine server that answers with what a test says."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.engine.router.engine_router import EngineRouter
from agentrl_cli.engine.router.server_clients import open_clients
from agentrl_cli.launch.processes.trainer_protocol import RunningServers
from agentrl_cli.launch.rollout_workers.rollout_pool import RolloutWorkers
from agentrl_cli.log import SilentObserver
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.background_loop import BackgroundLoop
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.workflow import Attempt

AGENTS = '''
import asyncio, ctypes, os, signal, sys, time
from pathlib import Path
from agentrl_cli.errors import ConfigError, DatasetError

HERE = Path(__file__).parent

def once():
    """Ends this process, and no other that comes here later."""
    try:
        (HERE / "was_here").touch(exist_ok=False)
    except FileExistsError:
        return 1.0
    os._exit(7)

def refuse():
    raise DatasetError("row 3: this one cannot be used")

async def solve(data, client, model):
    """Asks the model, and then does what the question says, in Python."""
    question = data["question"]
    print("about to", question)
    reply = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}])
    if question.startswith("await "):
        await eval(question[6:])
    else:
        returned = eval(question)
        if returned is not None:
            return returned
    return 1.0

def build():
    return solve

def build_refused():
    raise ConfigError("a key: 3 is not allowed") if "rollout_program" in sys.argv[0] else None
'''


class StubServer:
    """Stands for a vLLM server: every completion is ``reply_ids``, sampled with ``version``."""

    def __init__(self, reply_ids: list[int]) -> None:
        self.reply_ids = reply_ids
        self.version = "default"
        self.delay_seconds = 0.0
        self.num_calls = 0
        self.salts: list[str] = []
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """It is gone, with all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        if request.path == "/update_weight_version":
            self.version = (await request.json())["new_version"]
        if request.path != "/inference/v1/generate":
            return web.json_response({"version": "0.32.0", "weight_version": self.version})
        self.num_calls += 1
        body = await request.json()
        self.salts.append(body["cache_salt"])
        await asyncio.sleep(self.delay_seconds)
        count = len(self.reply_ids)
        choice = {
            "index": 0,
            "token_ids": self.reply_ids,
            "logprobs": {"content": [{"token_id": i, "logprob": -0.5} for i in self.reply_ids]},
            "finish_reason": "stop",
            "stop_reason": None,
            "weight_versions": [{"version": self.version, "start": 0, "end": count}],
        }
        text = json.dumps({"request_id": "x", "choices": [choice]})
        if not body.get("stream"):
            return web.Response(text=text, content_type="application/json")
        return web.Response(
            text=f"data: {text}\n\ndata: [DONE]\n\n", content_type="text/event-stream"
        )


class _NoUpdate:
    def __init__(self, version: int) -> None:
        self.version = version

    async def apply(self, server: Any) -> None:
        """There are no weights."""


class NoTransfer:
    """Weights that are none: only versions change."""

    async def prepare(self, version: int, weights: Mapping[str, Any]) -> Any:
        return _NoUpdate(version)

    async def close(self) -> None:
        """Nothing is held."""


class Messages(SilentObserver):
    """What a person was told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


class Site:
    """Stub servers, a router over them, and rollout workers, as a trainer has them."""

    def __init__(self, folder: Path, tokenizer: Any, num_servers: int = 1) -> None:
        self.folder = folder
        self._tokenizer = tokenizer
        reply_ids = [*tokenizer.encode("4", add_special_tokens=False), tokenizer.eos_token_id]
        self.log_dir = folder / "logs"
        self.log_dir.mkdir()
        self.messages = Messages()
        self.background = BackgroundLoop()
        self.servers = [StubServer(reply_ids) for _ in range(num_servers)]
        for server in self.servers:
            self.background.run(server.open(), 10)
        self.router: EngineRouter
        self.workers: RolloutWorkers

    def configure(self, builder: str = "build", **rollout: Any) -> ExperimentConfig:
        has_agent = rollout.get("agent_mode") != "external"
        return ExperimentConfig.model_validate(
            {
                "experiment_name": "x",
                "model": {"path": str(self.folder / "model")},
                "engine": {"kind": "vllm", "device": "cpu", "num_servers": len(self.servers)},
                "train_dataset": {"path": "x.jsonl"},
                "agent_builder_path": f"{self.folder}/my_agents.py:{builder}"
                if has_agent
                else None,
                "gconfig": {"max_tokens": 64},
                "rollout": rollout,
            }
        )

    def start(
        self, num_workers: int = 2, random_key: str | None = None, **settings: Any
    ) -> RolloutWorkers:
        config = self.configure(**settings)
        run = resolve_run(config, Machine(), purpose="train")
        endpoints = tuple(
            ServerEndpoint(
                name=f"vllm-{number}", base_url=f"http://127.0.0.1:{server.port}", api_key="k"
            )
            for number, server in enumerate(self.servers)
        )
        self.workers = RolloutWorkers(config, num_workers, ["train"], self.messages, random_key)
        running = RunningServers(run=run, endpoints=endpoints)
        self.workers.start(
            self.background, running, config.model.path, self._tokenizer, self.log_dir
        )
        self.router = self.background.run(self._open_router(config, running), 30)
        self.workers.attach(self.router)
        return self.workers

    async def _open_router(self, config: ExperimentConfig, running: RunningServers) -> EngineRouter:
        clients = open_clients("vllm", running.endpoints, config.engine)
        transfer: Any = NoTransfer()
        router = EngineRouter(clients, config.engine, model_name="m", transfer=transfer)
        await router.start(0)
        return router

    def submit(self, question: str, number: int = 0, split: str = "train", **fields: Any) -> Any:
        """A future of the trajectory of this question."""
        task = Task(task_id=str(number), row={"question": question}, group_id=f"1.{number}")
        attempt = Attempt(task=task, step=1, **fields)
        return self.background.submit(self.workers.run(split, attempt))

    def run(self, *questions: str, timeout_seconds: float = 240) -> list[Trajectory]:
        futures = [self.submit(question, number) for number, question in enumerate(questions)]
        return [future.result(timeout_seconds) for future in futures]

    def publish(self, version: int) -> None:
        self.background.run(self.router.publish_weights(version, {}), 60)

    def wait_for(self, condition: Callable[[], Any], what: str, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.02)

    def wait_until_ready(self, num_workers: int = 2) -> None:
        self.wait_for(lambda: len(self.workers._workers) == num_workers, "they are not ready")

    @property
    def pids(self) -> list[int]:
        """Of the reapers of the workers that run."""
        # One that is being started has no process yet.
        processes = [worker._process for worker in self.workers._started]  # type: ignore[union-attr]
        return [process.pid for process in processes if process is not None]

    def close(self) -> None:
        if hasattr(self, "workers"):
            self.workers.close()
        if hasattr(self, "router"):
            self.background.run(self.router.close(), 10)
        for server in self.servers:
            self.background.run(server.close(), 10)
        self.background.close()


@pytest.fixture
def site(
    tmp_path: Path, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Site]]:
    """Makes sites; they are closed after the test."""
    (tmp_path / "my_agents.py").write_text(AGENTS)
    chat_tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    sites: list[Site] = []

    def make(num_servers: int = 1) -> Site:
        sites.append(Site(tmp_path, chat_tokenizer, num_servers))
        return sites[-1]

    yield make
    for one in sites:
        one.close()
