"""Real vLLM servers, started, refused, killed and restarted by the launcher."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.errors import UserInputError
from agentrl_cli.launch.servers.server_group import ServerGroup


def call(endpoint: ServerEndpoint, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON that is answered to who has the key."""
    key = endpoint.api_key
    request = urllib.request.Request(
        endpoint.base_url + path,
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        data=None if body is None else json.dumps(body).encode(),
    )
    with urllib.request.urlopen(request, timeout=180) as reply:
        return json.loads(reply.read())


def generate(endpoint: ServerEndpoint) -> list[int]:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "logprobs": 0}}
    return call(endpoint, "/inference/v1/generate", body)["choices"][0]["token_ids"]


def find_descendants(pid: int) -> list[psutil.Process]:
    return [p for p in psutil.Process(pid).children(recursive=True) if is_alive(p)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_server_answers_who_has_its_key(untied_server_group: ServerGroup) -> None:
    [endpoint] = untied_server_group.endpoints
    assert generate(endpoint)
    assert call(endpoint, "/v1/models")["data"][0]["max_model_len"] == 512
    assert untied_server_group.run.untied_head is False
    assert endpoint.api_key not in Path(endpoint.log_path or "").read_text()
    assert "is_paused" in call(endpoint, "/is_paused"), "the endpoints for training are on"


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
        family: list[psutil.Process] = []
        try:
            assert launcher.stdout is not None
            started = read_until(launcher.stdout, lambda found: isinstance(found, dict))
            reaper, untied_head = started.pop("pid"), started.pop("untied_head")
            endpoint = ServerEndpoint(**started)
            assert untied_head is True
            first_life = [psutil.Process(reaper), *find_descendants(reaper)]
            assert len(first_life) >= 3, "a process reaper, an API server and an engine"
            first_life[1].kill()
            told = read_until(launcher.stdout, lambda found: "restarting" in found)
            assert told.startswith("vllm-0 was killed by SIGKILL; restarting it")
            assert not any(map(is_alive, first_life)), "ended before it is restarted"
            read_until(launcher.stdout, lambda found: "is ready" in found)
            assert generate(endpoint), "the same port and key"
            family = find_descendants(launcher.pid)
            assert len(family) >= 3
        finally:
            launcher.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not any(map(is_alive, alive))


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
