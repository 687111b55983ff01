from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import (
    AgentrlError,
    EngineError,
    EngineTimeoutError,
    MissingExtraError,
    ModelError,
    UserInputError,
)
from agentrl_cli.launch import server_keeper
from agentrl_cli.launch.servers import ServerFleet
from agentrl_cli.log import SilentObserver

MakeConfig = Callable[..., ExperimentConfig]


class Messages(SilentObserver):
    """Keeps what a person would be told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_keeper, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(server_keeper, "_HEALTH_INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(server_keeper, "_HEALTH_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(server_keeper, "HUNG_SECONDS", 0.8)


@pytest.fixture
def open_fleet(tmp_path: Path) -> Iterator[Callable[..., ServerFleet]]:
    with ExitStack() as stack:

        def open_one(config: ExperimentConfig, **arguments: Any) -> ServerFleet:
            defaults: dict[str, Any] = {"purpose": "train", "num_gpus": 0}
            defaults |= {"log_dir": tmp_path / "logs", "observer": SilentObserver()}
            fleet = ServerFleet(config, config.model.path, **(defaults | arguments))
            stack.callback(fleet.stop)
            return fleet

        yield open_one


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def answers(fleet: ServerFleet, index: int = 0) -> bool:
    port = int(fleet.endpoints[index].base_url.rpartition(":")[2])
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_servers_start_with_keys_and_ports_and_logs_of_their_own(
    make_config: MakeConfig, open_fleet: Any, interpreter: Any, tmp_path: Path
) -> None:
    observer = Messages()
    fleet = open_fleet(make_config(num_servers=3), observer=observer)
    before = list(fleet.endpoints)
    fleet.start()
    fleet.start()
    assert fleet.endpoints == before, "known before they listen"
    assert [e.name for e in before] == ["vllm-0", "vllm-1", "vllm-2"]
    assert len({e.base_url for e in before}) == len({e.api_key for e in before}) == 3
    assert all(len(e.api_key) > 40 for e in before)
    assert all("serving" in Path(e.log_path or "").read_text() for e in before)
    assert sorted(interpreter.read_env(i)["VLLM_API_KEY"] for i in range(3)) == sorted(
        e.api_key for e in before
    )
    assert sum("is ready after" in text for text in observer.texts) == 3
    assert all(answers(fleet, i) for i in range(3))
    pids = interpreter.pids
    fleet.stop()
    fleet.stop()
    assert len(pids) == 3
    assert not any(map(is_alive, pids))
    assert fleet.error is None
    # Nobody but the owner reads another's key from a command line.
    command_lines = [path.read_text() for path in (interpreter.folder / "lives").iterdir()]
    assert not any(e.api_key in line for e in before for line in command_lines)


def test_a_fleet_is_a_context_manager(make_config: MakeConfig, open_fleet: Any) -> None:
    with open_fleet(make_config()) as fleet:
        assert answers(fleet)
    assert not answers(fleet)


def test_servers_see_no_secrets_that_are_not_theirs(
    make_config: MakeConfig,
    open_fleet: Any,
    interpreter: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    monkeypatch.setenv("AGENTRL_SERVERS", "[]")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    monkeypatch.setenv("HF_TOKEN", "hf_for_gated_models")
    open_fleet(make_config()).start()
    env = interpreter.read_env(0)
    assert not {"OPENAI_API_KEY", "AGENTRL_SERVERS", "VLLM_CPU_KVCACHE_SPACE"} & env.keys()
    assert env["HF_TOKEN"] == "hf_for_gated_models"


@pytest.mark.parametrize(
    ("said", "error", "shown"),
    [
        (
            "ValueError: To serve at least one request with the model's max seq len (8192), (9 GiB "
            "KV cache is needed, which is larger than the available KV cache memory (1 GiB).",
            ModelError,
            "engine.max_model_len (8192), engine.cpu_kv_cache_gib (1.0)",
        ),
        ("api_server.py: error: unrecognized arguments: --no", UserInputError, "--no"),
        ("something nobody has seen", EngineError, "something nobody has seen"),
    ],
)
def test_a_server_that_does_not_start_says_why(
    said: str,
    error: type[AgentrlError],
    shown: str,
    make_config: MakeConfig,
    open_fleet: Any,
    interpreter: Any,
) -> None:
    interpreter.behave(f"say {said}")
    fleet = open_fleet(make_config(num_servers=2))
    with pytest.raises(error) as error_info:
        fleet.start()
    assert type(error_info.value) is error
    assert shown in str(error_info.value)
    assert said.partition(": ")[2][:60] in str(error_info.value)
    assert "logs/vllm-" in str(error_info.value)
    assert fleet.error is error_info.value
    assert not any(map(is_alive, interpreter.pids)), "the others are ended too"
    assert len(interpreter.pids) <= 2, "what fails at first is not tried again"


@pytest.mark.parametrize("behaviour", ["hang", "other model"])
def test_a_server_that_is_never_ready_has_a_deadline(
    behaviour: str, make_config: MakeConfig, open_fleet: Any, interpreter: Any
) -> None:
    interpreter.behave(behaviour)
    fleet = open_fleet(make_config(start_timeout_seconds=1.5))
    with pytest.raises(EngineTimeoutError) as error_info:
        fleet.start()
    text = str(error_info.value)
    assert "vllm-0 was not ready within engine.start_timeout_seconds (1.5)" in text
    assert "type engine.start_timeout_seconds=3" in text
    assert f"life 0 {behaviour}" in text, "the log's last lines"
    assert not is_alive(interpreter.pids[0])


def test_a_start_can_be_stopped_from_another_thread(
    make_config: MakeConfig, open_fleet: Any, interpreter: Any
) -> None:
    interpreter.behave("hang")
    fleet = open_fleet(make_config())
    threading.Timer(0.5, fleet.stop).start()
    started = time.monotonic()
    with pytest.raises(EngineError, match="stopped before they were ready"):
        fleet.start()
    assert time.monotonic() - started < 10
    assert not any(map(is_alive, interpreter.pids))


def test_a_stopped_fleet_does_not_start(make_config: MakeConfig, open_fleet: Any) -> None:
    fleet = open_fleet(make_config())
    fleet.stop()
    with pytest.raises(EngineError, match="stopped"):
        fleet.start()


def test_a_killed_server_comes_back_at_its_endpoint(
    make_config: MakeConfig, open_fleet: Any, interpreter: Any
) -> None:
    observer = Messages()
    fleet = open_fleet(make_config(num_servers=2), observer=observer)
    fleet.start()
    endpoints, victim = list(fleet.endpoints), interpreter.pids[0]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: len(interpreter.pids) == 3)
    wait_for(lambda: answers(fleet, 0) and answers(fleet, 1))
    assert fleet.endpoints == endpoints
    assert fleet.error is None
    [told] = [text for text in observer.texts if "started again" in text]
    assert "died (killed by SIGKILL); it is started again (restart 1 of 3 within an hour)" in told
    assert interpreter.read_env(2)["VLLM_API_KEY"] in {e.api_key for e in endpoints}
    assert is_alive(interpreter.pids[1]) or is_alive(interpreter.pids[0]), "the other goes on"


@pytest.mark.parametrize(
    ("behaviour", "path"), [("freeze", "/health"), ("freeze engine", "/weight_info")]
)
def test_a_frozen_server_is_killed_and_comes_back(
    make_config: MakeConfig, open_fleet: Any, interpreter: Any, behaviour: str, path: str
) -> None:
    interpreter.behave(behaviour, "serve")
    observer = Messages()
    fleet = open_fleet(make_config(publish_timeout_seconds=0.2), observer=observer)
    fleet.start()
    wait_for(lambda: len(interpreter.pids) == 2)
    wait_for(lambda: sum("is ready" in text for text in observer.texts) == 2)
    assert not is_alive(interpreter.pids[0])
    assert any(f"did not answer {path} for" in text for text in observer.texts)


def test_a_server_that_dies_too_often_is_given_up(
    make_config: MakeConfig, open_fleet: Any, interpreter: Any
) -> None:
    interpreter.behave("die")
    failed: list[AgentrlError] = []
    fleet = open_fleet(make_config(max_restarts=2), on_failed=failed.append)
    fleet.start()
    wait_for(lambda: failed)
    assert len(interpreter.pids) == 3
    text = str(fleet.error)
    assert failed == [fleet.error]
    assert "died (exit status 3): 3 times within an hour, and engine.max_restarts is 2" in text
    assert "serving" in text, "the log's last lines"


def test_restarts_that_fail_count_too(
    make_config: MakeConfig, open_fleet: Any, interpreter: Any
) -> None:
    interpreter.behave("die", "say no more memory")
    fleet = open_fleet(make_config(max_restarts=1))
    fleet.start()
    wait_for(lambda: fleet.error is not None)
    assert len(interpreter.pids) == 2
    assert "ended while it started (exit status 1): 2 times" in str(fleet.error)
    assert "no more memory" in str(fleet.error)


def test_a_budget_is_for_an_hour(
    make_config: MakeConfig, open_fleet: Any, interpreter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_keeper, "_BUDGET_SECONDS", 0.1)
    interpreter.behave("die", "die", "die", "serve")
    fleet = open_fleet(make_config(max_restarts=1))
    fleet.start()
    wait_for(lambda: len(interpreter.pids) == 4)
    time.sleep(0.3)
    assert fleet.error is None


def test_a_port_that_is_taken_is_the_users_to_change(
    make_config: MakeConfig, open_fleet: Any
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserInputError, match=f"port {port} of 127.0.0.1 is taken") as info:
            open_fleet(make_config(first_port=port))
    assert "Type engine.first_port=null" in str(info.value)


def test_a_port_that_is_taken_later_is_the_users_to_change_too(
    make_config: MakeConfig, open_fleet: Any, interpreter: Any
) -> None:
    interpreter.behave("say OSError: [Errno 98] Address already in use")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UserInputError, match=f"engine.first_port: port {port} of"):
        open_fleet(make_config(first_port=port)).start()


def test_ports_are_kept_while_nobody_listens(make_config: MakeConfig, open_fleet: Any) -> None:
    fleet = open_fleet(make_config())
    port = int(fleet.endpoints[0].base_url.rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    fleet.stop()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_what_cannot_serve_is_refused_before_anything_is_started(
    make_config: MakeConfig, open_fleet: Any, interpreter: Any, tmp_path: Path
) -> None:
    interpreter.behave("serve", versions={"torch": "2.13.0"})
    with pytest.raises(MissingExtraError, match="has none"):
        open_fleet(make_config())
    interpreter.behave("serve", versions={"vllm": "0.3.1"})
    with pytest.raises(UserInputError, match=r"0\.3\.1"):
        open_fleet(make_config())
    assert not (interpreter.folder / "lives").exists()
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("/proc/none", "cannot be written to"),
        ("{tmp_path}/file/inside", "cannot be written to"),
        ("{tmp_path}/file", "is a file"),
    ],
)
def test_weights_that_cannot_be_put_anywhere_are_refused_before_anything_is_started(
    make_config: MakeConfig, open_fleet: Any, tmp_path: Path, folder: str, reason: str
) -> None:
    (tmp_path / "file").touch()
    folder = folder.format(tmp_path=tmp_path)
    config = make_config(weight_transfer={"dir": folder})
    with pytest.raises(UserInputError, match=f"weight_transfer.dir: {folder} {reason}") as info:
        open_fleet(config)
    assert "engine.weight_transfer.dir=null" in str(info.value)
    open_fleet(config, purpose="eval")


def test_a_folder_for_weights_is_made_and_left_empty(
    make_config: MakeConfig, open_fleet: Any, tmp_path: Path
) -> None:
    open_fleet(make_config(weight_transfer={"dir": str(tmp_path / "a/b")}))
    assert list((tmp_path / "a/b").iterdir()) == []


def test_an_sglang_server_gets_its_key_in_a_private_file(
    make_config: MakeConfig, open_fleet: Any, interpreter: Any
) -> None:
    interpreter.behave("serve", versions={"sglang": "0.5.23"})
    fleet = open_fleet(make_config(kind="sglang"), num_gpus=1, purpose="eval")
    argv = fleet.processes[0].argv
    key_file = Path(argv[argv.index("--config") + 1])
    assert key_file.read_text() == f'api-key: "{fleet.endpoints[0].api_key}"\n'
    assert stat.S_IMODE(key_file.parent.stat().st_mode) == 0o700
    fleet.stop()
    assert not key_file.exists()
