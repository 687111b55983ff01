from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.engine.router.engine_router import EngineRouter
from agentrl_cli.engine.vllm.vllm_server import VllmServer
from agentrl_cli.engine.weights.weight_transfer import build_weight_transfer
from agentrl_cli.errors import AgentrlError, EngineError, EngineTimeoutError, UserInputError
from agentrl_cli.launch.servers import server_supervisor
from agentrl_cli.launch.servers.server_group import ServerGroup
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
    monkeypatch.setattr(server_supervisor, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(server_supervisor, "_HEALTH_INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(server_supervisor, "_HEALTH_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(server_supervisor, "HUNG_SECONDS", 0.8)


@pytest.fixture
def make_server_group(
    make_config: MakeConfig, tmp_path: Path
) -> Iterator[Callable[..., ServerGroup]]:
    """Server groups with the faulty interpreter: ``make_server_group(num_servers=2)``."""
    with ExitStack() as stack:

        def open_one(
            *, num_gpus: int = 0, purpose: Any = "train", observer: Any = None,
            on_failed: Any = None, **engine: Any,
        ) -> ServerGroup:  # fmt: skip
            config = make_config(**engine)
            machine = Machine(gpu_ids=tuple(map(str, range(num_gpus))))
            server_group = ServerGroup(
                config,
                resolve_run(config, machine, purpose=purpose),
                config.model.path,
                log_dir=tmp_path / "logs",
                observer=observer or SilentObserver(),
                on_failed=on_failed,
            )
            stack.callback(server_group.stop)
            return server_group

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


def start(server_group: ServerGroup) -> None:
    server_group.start()
    server_group.wait()


def answers(server_group: ServerGroup, index: int = 0) -> bool:
    port = int(server_group.endpoints[index].base_url.rpartition(":")[2])
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_servers_start_with_keys_and_ports_and_logs_of_their_own(
    make_server_group: Any, interpreter: Any, tmp_path: Path
) -> None:
    observer = Messages()
    with make_server_group(num_servers=3, observer=observer) as server_group:
        before = list(server_group.endpoints)
        server_group.wait()
        assert server_group.endpoints == before, "known before they listen"
        assert all(answers(server_group, i) for i in range(3))
        assert sum("is ready after" in text for text in observer.texts) == 3
    server_group.stop()
    assert not any(answers(server_group, i) for i in range(3))
    assert [e.name for e in before] == ["vllm-0", "vllm-1", "vllm-2"]
    assert len({e.base_url for e in before}) == len({e.api_key for e in before}) == 3
    assert all(len(e.api_key) > 40 for e in before)
    assert all("serving" in Path(e.log_path or "").read_text() for e in before)
    assert {life["env"]["VLLM_API_KEY"] for life in interpreter.lives} == {
        e.api_key for e in before
    }
    assert len(interpreter.pids) == 3
    assert not any(map(is_alive, interpreter.pids))
    assert server_group._error is None
    # Nobody but the owner reads another's key from a command line.
    words = [word for life in interpreter.lives for word in life["argv"]]
    assert not any(e.api_key in word for e in before for word in words)


def test_servers_see_no_secrets_that_are_not_theirs(
    make_server_group: Any, interpreter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    monkeypatch.setenv("AGENTRL_SERVERS", "[]")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    monkeypatch.setenv("HF_TOKEN", "hf_for_gated_models")
    start(make_server_group())
    env = interpreter.lives[0]["env"]
    assert not {"OPENAI_API_KEY", "AGENTRL_SERVERS", "VLLM_CPU_KVCACHE_SPACE"} & env.keys()
    assert env["HF_TOKEN"] == "hf_for_gated_models"


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("api_server.py: error: unrecognized arguments: --no", UserInputError),
        ("something: nobody has seen", EngineError),
    ],
)
def test_a_server_that_does_not_start_says_why(
    said: str, error: type[AgentrlError], make_server_group: Any, interpreter: Any
) -> None:
    interpreter.behave(f"say {said}")
    server_group = make_server_group(num_servers=2)
    with pytest.raises(error) as error_info, server_group:
        server_group.wait()
    assert type(error_info.value) is error
    assert said.partition(": ")[2] in str(error_info.value)
    assert "logs/vllm-" in str(error_info.value)
    assert not any(map(is_alive, interpreter.pids)), "the others are ended too"
    assert len(interpreter.pids) <= 2, "what fails at first is not tried again"


@pytest.mark.parametrize("behaviour", ["hang", "other model"])
def test_a_server_that_is_never_ready_has_a_deadline(
    behaviour: str, make_server_group: Any, interpreter: Any
) -> None:
    interpreter.behave(behaviour)
    with (
        pytest.raises(EngineTimeoutError) as error_info,
        make_server_group(start_timeout_seconds=1.5) as server_group,
    ):
        server_group.wait()
    text = str(error_info.value)
    assert "vllm-0 was not ready within engine.start_timeout_seconds (1.5)" in text
    assert "type engine.start_timeout_seconds=3" in text
    assert f"life 0 {behaviour}" in text, "the log's last lines"
    assert not is_alive(interpreter.pids[0])


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_a_start_can_be_stopped_from_another_thread(
    make_server_group: Any, interpreter: Any, seconds: float
) -> None:
    interpreter.behave("hang")
    server_group = make_server_group()
    threading.Timer(seconds, server_group.stop).start()
    time.sleep(0.0 if seconds else 0.3)
    started = time.monotonic()
    with pytest.raises(EngineError, match="stopped before they were ready"):
        start(server_group)
    assert time.monotonic() - started < 10
    wait_for(lambda: not any(map(is_alive, interpreter.pids)))


def test_a_killed_server_comes_back_at_its_endpoint(
    make_server_group: Any, interpreter: Any
) -> None:
    observer = Messages()
    server_group = make_server_group(num_servers=2, observer=observer)
    start(server_group)
    endpoints, victim = list(server_group.endpoints), interpreter.pids[0]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: len(interpreter.pids) == 3)
    wait_for(lambda: answers(server_group, 0) and answers(server_group, 1))
    assert server_group.endpoints == endpoints
    assert server_group._error is None
    [told] = [text for text in observer.texts if "restarting" in text]
    assert "was killed by SIGKILL; restarting it (restart 1 of 3 within an hour)" in told
    assert interpreter.lives[2]["env"]["VLLM_API_KEY"] in {e.api_key for e in endpoints}
    assert is_alive(interpreter.pids[1]) or is_alive(interpreter.pids[0]), "the other keeps serving"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "path"), [("freeze", "/health"), ("freeze engine", "/weight_info")]
)
def test_a_frozen_server_is_killed_and_comes_back(
    make_server_group: Any, interpreter: Any, behaviour: str, path: str
) -> None:
    interpreter.behave(behaviour, "serve")
    observer = Messages()
    server_group = make_server_group(publish_timeout_seconds=0.2, observer=observer)
    start(server_group)
    wait_for(lambda: len(interpreter.pids) == 2)
    wait_for(lambda: sum("is ready" in text for text in observer.texts) == 2)
    assert not is_alive(interpreter.pids[0])
    assert any(f"did not answer {path} for" in text for text in observer.texts)


@pytest.mark.slow
def test_a_slow_server_is_waited_for(
    make_server_group: Any, interpreter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_supervisor, "HUNG_SECONDS", 4.0)
    interpreter.behave("slow")
    observer = Messages()
    start(make_server_group(publish_timeout_seconds=0.2, observer=observer))
    late = "is slow: it has not answered /health for"
    wait_for(lambda: any(late in text for text in observer.texts))
    wait_for(lambda: any("answers again" in text for text in observer.texts), 40.0)
    # The first miss, after half a second of the four that it has, is not reported.
    assert not any(f"for {seconds} s;" in text for text in observer.texts for seconds in (0, 1))
    assert len(interpreter.pids) == 1


def test_a_server_that_dies_too_often_is_given_up(make_server_group: Any, interpreter: Any) -> None:
    interpreter.behave("die", "say no more memory")
    failed: list[AgentrlError] = []
    server_group = make_server_group(max_restarts=1, on_failed=failed.append)
    start(server_group)
    wait_for(lambda: failed)
    assert len(interpreter.pids) == 2
    [text] = map(str, failed)
    assert "ended with exit status 1 while it started: 2 times within an hour" in text
    assert "engine.max_restarts is 1" in text
    assert "no more memory" in text, "the log's last lines"
    with pytest.raises(EngineError, match="2 times within an hour"):
        server_group.check()


def test_a_budget_is_for_an_hour(make_server_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    [supervisor] = make_server_group(max_restarts=1)._supervisors
    moments = iter((0.0, 3601.0, 7202.0, 7202.0 + 3599.0))
    clock = SimpleNamespace(monotonic=lambda: next(moments))
    monkeypatch.setattr("agentrl_cli.launch.servers.server_supervisor.time", clock)
    for _ in range(3):
        supervisor._spend_restart("ended")
    with pytest.raises(EngineError, match="ended: 2 times within an hour"):
        supervisor._spend_restart("ended")
    monkeypatch.undo()


@pytest.mark.parametrize("is_taken_later", [False, True])
def test_a_port_that_is_taken_is_the_users_to_change(
    make_server_group: Any, interpreter: Any, is_taken_later: bool
) -> None:
    interpreter.behave("say OSError: [Errno 98] Address already in use")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        if not is_taken_later:
            other.listen()
            with pytest.raises(UserInputError, match=f"port {port} of 127.0.0.1 is taken") as info:
                make_server_group(first_port=port)
    if is_taken_later:
        with pytest.raises(UserInputError, match=f"port {port} of 127.0.0.1 is taken") as info:
            start(make_server_group(first_port=port))
    assert "Type engine.first_port=null" in str(info.value)


def test_ports_are_kept_while_nobody_listens(make_server_group: Any) -> None:
    server_group = make_server_group()
    port = int(server_group.endpoints[0].base_url.rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    server_group.stop()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_weights_that_cannot_be_put_anywhere_are_refused_before_anything_is_started(
    make_server_group: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for folder, reason in (("file/inside", "cannot be written to"), ("file", "is a file")):
        transfer = {"dir": str(tmp_path / folder)}
        with pytest.raises(UserInputError, match=f"weight_transfer.dir: .* {reason}") as info:
            make_server_group(weight_transfer=transfer)
        assert "engine.weight_transfer.dir=null" in str(info.value)
        make_server_group(weight_transfer=transfer, purpose="eval")
    make_server_group(weight_transfer={"dir": str(tmp_path / "a/b")})
    assert list((tmp_path / "a/b").iterdir()) == [], "it is made and left empty"


def test_an_sglang_server_gets_its_key_in_a_private_file(
    make_server_group: Any, interpreter: Any
) -> None:
    interpreter.behave("serve", versions={"sglang": "0.5.23"})
    server_group = make_server_group(kind="sglang", num_gpus=1, purpose="eval")
    argv = server_group.processes[0].argv
    key_file = Path(argv[argv.index("--config") + 1])
    assert key_file.read_text() == f'api-key: "{server_group.endpoints[0].api_key}"\n'
    assert stat.S_IMODE(key_file.parent.stat().st_mode) == 0o700
    server_group.stop()
    assert not key_file.exists()


@pytest.mark.parametrize("given_up", ["before", "during"])
async def test_calls_fail_with_the_servers_instead_of_waiting_for_them(
    make_config: MakeConfig, make_server_group: Any, given_up: str
) -> None:
    config = make_config(start_timeout_seconds=600.0)
    server_group = make_server_group(start_timeout_seconds=600.0)
    error = EngineError("vllm-0 died 4 times")
    (endpoint,) = server_group.endpoints
    router = EngineRouter(
        [VllmServer(endpoint, config.engine)],
        config.engine,
        model_name="m",
        transfer=build_weight_transfer(
            config, model_folder=config.model.path, kind="disk", tied_names={}
        ),
    )
    try:
        if given_up == "before":
            server_group._fail(error)
        server_group.end_with_servers(router)
        if given_up == "during":
            threading.Timer(0.1, server_group._fail, [error]).start()
        for call in (router.start(0), router.generate([1, 2], Sampling(max_tokens=4))):
            with pytest.raises(EngineError, match="died 4 times"):
                await asyncio.wait_for(call, 20.0)
    finally:
        await router.close()


def test_an_error_in_the_block_is_explained_by_that_of_the_servers(make_server_group: Any) -> None:
    """The group may know only a moment later."""
    server_group = make_server_group()
    error = EngineError("vllm-0 died 4 times: out of memory")
    threading.Timer(0.5, server_group._fail, [error]).start()
    with pytest.raises(EngineError, match="out of memory") as caught, server_group:
        raise EngineError("no server answers")
    assert "no server answers" in str(caught.value.__cause__)
