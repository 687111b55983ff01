"""What a vLLM server loads to check keys, run as the server does: by its file's name, alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentrl_cli
from agentrl_cli.engine.vllm.plugin.agentrl_vllm_auth import KeyAuth

KEY = "k1-secret"
PLUGIN_DIR = Path(agentrl_cli.__file__).parent / "engine" / "vllm" / "plugin"


async def ask(
    auth: KeyAuth,
    path: str = "/pause",
    *headers: tuple[bytes, bytes],
    method: str = "POST",
    kind: str = "http",
) -> list[dict[str, Any]]:
    """What the key check sends; the app behind it sends "reached"."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the key check reads no body")

    await auth({"type": kind, "method": method, "path": path, "headers": headers}, receive, send)
    return sent


@pytest.fixture
def auth(monkeypatch: pytest.MonkeyPatch) -> KeyAuth:
    monkeypatch.setenv("VLLM_API_KEY", KEY)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send("reached")

    return KeyAuth(app)


def with_key(value: str) -> tuple[bytes, bytes]:
    return (b"authorization", value.encode())


async def test_the_key_opens_every_path(auth: KeyAuth) -> None:
    assert await ask(auth, "/pause", with_key(f"Bearer {KEY}")) == ["reached"]


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (with_key("Bearer wrong"),),
        (with_key(f"Bearer {KEY}x"),),
        (with_key(KEY),),
        (with_key("Bearer "),),
        (with_key("Bearer ä"),),
        (with_key("Bearer wrong"), with_key(f"Bearer {KEY}")),
        ((b"x-api-key", KEY.encode()),),
    ],
)
async def test_everybody_else_is_refused(
    auth: KeyAuth, headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    start, body = await ask(auth, "/collective_rpc", *headers)
    assert start["status"] == 401
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert json.loads(body["body"])["error"]["code"] == 401
    assert KEY.encode() not in body["body"]


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_whether_it_lives_may_be_asked_by_anybody(auth: KeyAuth, path: str) -> None:
    assert await ask(auth, path, method="GET") == ["reached"]


@pytest.mark.parametrize(
    "path", ["/health/", "//health", "/healthy", "/v1/health", "/ping/../pause"]
)
async def test_only_those_very_paths_are_open(auth: KeyAuth, path: str) -> None:
    start, _ = await ask(auth, path)
    assert start["status"] == 401


async def test_options_tell_nothing_and_are_open(auth: KeyAuth) -> None:
    assert await ask(auth, "/pause", method="OPTIONS") == ["reached"]


async def test_websockets_need_the_key_too(auth: KeyAuth) -> None:
    assert await ask(auth, "/v1/realtime", kind="websocket") == [
        {"type": "websocket.close", "code": 1008}
    ]
    key = with_key(f"Bearer {KEY}")
    assert await ask(auth, "/v1/realtime", key, kind="websocket") == ["reached"]


async def test_the_start_of_the_server_passes(auth: KeyAuth) -> None:
    assert await ask(auth, kind="lifespan") == ["reached"]


def test_it_does_not_start_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="VLLM_API_KEY"):
        KeyAuth(lambda *_: None)  # type: ignore[arg-type, return-value]


def test_it_needs_nothing_but_the_standard_library() -> None:
    """The server's interpreter may have neither agentrl nor anything it depends on."""
    code = (
        f"import sys; sys.path.insert(0, {str(PLUGIN_DIR)!r}); import agentrl_vllm_auth as g; "
        "assert 'agentrl_cli' not in sys.modules; print(g.KeyAuth.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "KeyAuth"
