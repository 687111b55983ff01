"""``agentrl serve`` as a user types it: the printed command works, and Ctrl-C ends it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[3]
CONFIG = """\
experiment_name: demo
model: {path: tiny, dtype: float32}
agent_builder_path: agent.py:build
gconfig: {max_tokens: 8}
train_dataset: {path: tasks.jsonl}
engine: {kind: embedded, max_model_len: 128}
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path, model_folder: Path) -> Iterator[Start]:
    """Starts ``agentrl serve`` in a user's folder with a random model of two layers in it."""
    shutil.copytree(model_folder, tmp_path / "tiny")
    (tmp_path / "c.yaml").write_text(CONFIG)
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        env = os.environ | {"PYTHONPATH": str(PROJECT), "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(
            [sys.executable, "-m", "agentrl_cli", "serve", "--config", "c.yaml", *arguments],
            cwd=tmp_path,
            env=env | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def read_until(process: subprocess.Popen[str], end: str, seconds: float = 120) -> str:
    """What it prints up to a line that contains ``end``."""
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    text = ""
    try:
        for line in process.stdout:
            text += line
            if end in line:
                return text
    finally:
        timer.cancel()
    raise AssertionError(f"it ended, or took too long:\n{text}")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_printed_command_gets_an_answer_and_ctrl_c_ends_it(start: Start) -> None:
    process = start()
    text = read_until(process, " -d ")
    command = text[text.index("curl ") :].replace("\\\n", " ")
    done = subprocess.run([*shlex.split(command), "-sS"], capture_output=True, timeout=60)
    reply = json.loads(done.stdout)
    assert reply["model"] == "tiny"
    assert 1 <= reply["usage"]["completion_tokens"] <= 8
    # The key opens the gateway, and nothing else does.
    key = re.search(r"OPENAI_API_KEY=(\S+)", text)
    assert key is not None
    wrong = command.replace(key[1], "sk-agentrl-wrong")
    done = subprocess.run([*shlex.split(wrong), "-sS"], capture_output=True, timeout=60)
    assert json.loads(done.stdout)["error"]["code"] == "invalid_api_key"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "stopped serving" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start("--port", str(port))
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert f"port {port}" in output
    assert "--port" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_it_listens_where_it_is_told(start: Start) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = start("--port", str(port), "gconfig.max_tokens=4")
    assert f"OPENAI_BASE_URL=http://127.0.0.1:{port}/v1" in read_until(process, " -d ")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
