"""Real vLLM servers, started, refused, killed and restarted by the launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.errors import UserInputError
from agentrl_cli.launch.servers.server_group import ServerGroup


def call(
    endpoint: ServerEndpoint, path: str, body: dict[str, Any] | None = None, *, key: str | None = ""
) -> tuple[int, Any]:
    """Status and JSON of a request; ``key`` "" is the right one, None is none."""
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key or endpoint.api_key}"
    request = urllib.request.Request(
        endpoint.base_url + path,
        headers=headers,
        data=None if body is None else json.dumps(body).encode(),
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            text = reply.read()
            return reply.status, json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        error.read()
        error.close()
        return error.code, None


def generate(endpoint: ServerEndpoint) -> list[int]:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "logprobs": 0}}
    status, reply = call(endpoint, "/inference/v1/generate", body)
    assert status == 200
    return reply["choices"][0]["token_ids"]


def find_descendants(pid: int) -> list[int]:
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in listing.stdout.splitlines()]
    found, to_visit = [], [pid]
    while to_visit:
        parent = to_visit.pop()
        below = [int(p) for p, q, state in rows if int(q) == parent and state[0] != "Z"]
        found += below
        to_visit += below
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def test_a_server_answers_who_has_its_key_and_nobody_else(untied_server_group: ServerGroup) -> None:
    [endpoint] = untied_server_group.endpoints
    assert generate(endpoint)
    status, models = call(endpoint, "/v1/models")
    assert (status, models["data"][0]["max_model_len"]) == (200, 512)
    for path in ("/pause", "/collective_rpc", "/update_weight_version", "/inference/v1/generate"):
        assert call(endpoint, path, {}, key=None)[0] == 401, path
        assert call(endpoint, path, {}, key="sk-wrong")[0] == 401, path
    assert untied_server_group.run.untied_head is False
    log = Path(endpoint.log_path or "").read_text()
    assert endpoint.api_key not in log
    assert "is_paused" in str(call(endpoint, "/is_paused")[1]), "the endpoints for training are on"


#: A launcher in a process of its own, which can be killed.
_LAUNCHER = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.launch.run_resolution import resolve_run_here, with_output_head
from agentrl_cli.launch.servers.server_group import ServerGroup
from agentrl_cli.log import SilentObserver

class Printing(SilentObserver):
    def on_message(self, text):
        print(json.dumps(text), flush=True)

config = ExperimentConfig.model_validate_json(sys.argv[1])
run = with_output_head(resolve_run_here(config, "train"), config, config.model.path)
options = {"log_dir": Path(sys.argv[2]), "observer": Printing()}
with ServerGroup(config, run, config.model.path, **options) as server_group:
    server_group.wait()
    started = {"pid": server_group.processes[0].pid, "untied_head": run.untied_head}
    print(json.dumps(started | asdict(server_group.endpoints[0])), flush=True)
    sys.stdin.read()
"""


def read_until(lines: IO[str], condition: Callable[[Any], bool]) -> Any:
    """The first line of JSON that is looked for."""
    for line in lines:
        if condition(found := json.loads(line)):
            return found
    raise AssertionError("the launcher ended")


def test_a_killed_server_comes_back_and_nothing_outlives_a_killed_launcher(
    make_vllm_config: Callable[..., ExperimentConfig], tied_folder: Path, tmp_path: Path
) -> None:
    config = make_vllm_config(tied_folder).model_dump_json()
    with subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, config, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        family: list[int] = []
        try:
            assert launcher.stdout is not None
            started = read_until(launcher.stdout, lambda found: isinstance(found, dict))
            reaper, untied_head = started.pop("pid"), started.pop("untied_head")
            endpoint = ServerEndpoint(**started)
            assert untied_head is True
            first_life = [reaper, *find_descendants(reaper)]
            assert len(first_life) >= 3, "a process reaper, an API server and an engine"
            os.kill(first_life[1], signal.SIGKILL)
            told = read_until(launcher.stdout, lambda found: "restarting" in found)
            assert told.startswith("vllm-0 was killed by SIGKILL; restarting it")
            assert not any(map(is_alive, first_life)), "ended before it is restarted"
            read_until(launcher.stdout, lambda found: "is ready" in found)
            assert generate(endpoint), "the same port and key"
            family = find_descendants(launcher.pid)
            assert len(family) >= 3
        finally:
            launcher.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, family)), 30)


def test_a_model_that_does_not_fit_says_which_keys_change_it(
    start_server_group: Callable[..., ServerGroup],
    make_vllm_config: Callable[..., ExperimentConfig],
    untied_folder: Path,
) -> None:
    config = make_vllm_config(untied_folder, {"max_model_len": 1024, "cpu_kv_cache_gib": 0.0002})
    with pytest.raises(UserInputError) as error_info:
        start_server_group(config)
    text = str(error_info.value)
    assert text.startswith("vllm-0: the model does not fit. It says:\n  To serve at least one")
    assert "engine.max_model_len (1024), engine.cpu_kv_cache_gib (0.0002)" in text


def test_an_unknown_argument_is_the_users_mistake(
    start_server_group: Callable[..., ServerGroup],
    make_vllm_config: Callable[..., ExperimentConfig],
    untied_folder: Path,
) -> None:
    config = make_vllm_config(untied_folder, {"server_args": ["--no-such-flag", "3"]})
    with pytest.raises(UserInputError, match=r"unrecognized arguments: --no-such-flag") as info:
        start_server_group(config)
    assert "engine.server_args (['--no-such-flag', '3'])" in str(info.value)
