"""``agentrl serve`` as a user types it: the printed command works, and Ctrl-C ends it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CONFIG = """\
experiment_name: demo
model: {path: tiny, dtype: float32}
agent_builder_path: agent.py:build
gconfig: {max_tokens: 8}
train_dataset: {path: tasks.jsonl}
engine: {kind: embedded, max_model_len: 128}
"""
SERVE = ("serve", "--config", "c.yaml")
Start = Callable[..., Any]
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_printed_command_gets_an_answer_and_ctrl_c_ends_it(start: Start) -> None:
    process = start(*SERVE)
    process.wait_for(" -d ")
    command = process.text[process.text.index("curl ") :].replace("\\\n", " ")
    done = subprocess.run([*shlex.split(command), "-sS"], capture_output=True, timeout=60)
    reply = json.loads(done.stdout)
    assert reply["model"] == "tiny"
    assert 1 <= reply["usage"]["completion_tokens"] <= 8
    # The key opens the gateway, and nothing else does.
    key = re.search(r"OPENAI_API_KEY=(\S+)", process.text)
    assert key is not None
    wrong = command.replace(key[1], "sk-agentrl-wrong")
    done = subprocess.run([*shlex.split(wrong), "-sS"], capture_output=True, timeout=60)
    assert json.loads(done.stdout)["error"]["code"] == "invalid_api_key"
    process.signal(signal.SIGINT, at=" -d ")
    assert process.end() == 0, process.text
    assert "stopped serving" in process.text


def test_it_listens_where_it_is_told_and_names_a_port_that_is_taken(
    start: Start, refused: Callable[..., str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        taken.listen()
        text = refused(*SERVE, "--port", port)
    assert f"port {port}" in text
    assert "--port" in text
    elsewhere = ("--checkpoint", "tiny", "model.path=no/such-model")
    process = start(*SERVE, "--port", port, *elsewhere)
    process.signal(signal.SIGTERM, at=" -d ")
    assert process.end() == 0, process.text
    assert f"OPENAI_BASE_URL=http://127.0.0.1:{port}/v1" in process.text
