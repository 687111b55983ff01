"""Closes every endpoint of a vLLM server to those without its key.

vLLM's own ``--api-key`` protects the paths below /v1, /v2 and /inference alone: anyone with an
account on the machine could pause the server, call any method of its workers, or replace its
weights. This file is loaded by the server (``--middleware agentrl_vllm_auth.KeyAuth``, its
folder on PYTHONPATH), whose interpreter may have no agentrl: the standard library only.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]

#: They tell nothing but that the server is alive.
_OPEN_PATHS = frozenset({"/health", "/ping"})

_REFUSAL = json.dumps(
    {
        "error": {
            "message": "this server needs its key: Authorization: Bearer KEY",
            "type": "Unauthorized",
            "param": None,
            "code": 401,
        }
    }
).encode()


class KeyAuth:
    """ASGI middleware that answers 401 unless a request carries the key in VLLM_API_KEY.

    Raises:
        RuntimeError: there is no key in the environment; a server that lets everybody in
            must not start.
    """

    def __init__(self, app: _App) -> None:
        key = os.environ.get("VLLM_API_KEY", "")
        if not key:
            raise RuntimeError("KeyAuth needs the server's key in the variable VLLM_API_KEY")
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Hands the request on, or refuses it."""
        kind = scope["type"]
        if kind == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(_REFUSAL)).encode()),
                (b"www-authenticate", b"Bearer"),
            ]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})

    def _is_allowed(self, scope: _Message) -> bool:
        if scope["type"] == "http" and (
            scope["method"] == "OPTIONS" or scope["path"] in _OPEN_PATHS
        ):
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
