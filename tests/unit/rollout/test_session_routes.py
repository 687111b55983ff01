"""The routes of the admin key: closed to all others, and never broken by what they are sent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest
from starlette.routing import Route

from agentrl_cli.rollout.external.session_routes import PREFIX, AdminRoutes
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway import Gateway, Limits

Open = Callable[..., Any]
KEY = "the-admin-key-of-this-test"
USER: Any = {"role": "user", "content": "hi"}


@pytest.fixture
async def open_session(scripted_engine: Any, chat_tokenizer: Any) -> AsyncIterator[Open]:
    """Makes a client whose engine follows a script."""
    gateways: list[Gateway] = []

    def open_one(*script: Any) -> TrackingClient:
        gateways.append(Gateway(scripted_engine(list(script)), chat_tokenizer))
        return TrackingClient(gateway=gateways[-1])

    yield open_one
    for gateway in gateways:
        await gateway.close()


class _Tasks:
    """Has one open session; whatever else is asked of it fails the test."""

    def __init__(self, client: TrackingClient) -> None:
        self.session = client.session

    def find(self, session_id: str) -> _Tasks:
        assert session_id == self.session.id
        return self

    def keep_reward(self, reward: Any) -> None:
        raise AssertionError("none of these is the outcome's")


def open_admin(client: TrackingClient, tasks: Any) -> list[Route]:
    routes = AdminRoutes(tasks, KEY, "m", Limits(max_body_bytes=2000)).list_routes()
    client.gateway.add_routes(routes)
    return [route for route in routes if isinstance(route, Route)]


async def send(
    client: TrackingClient, method: str, path: str, key: str | None, **options: Any
) -> Any:
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".strip().encode())]
    root = (await client.gateway.serve()).removesuffix("/v1")
    async with httpx2.AsyncClient(trust_env=False) as http:
        return await http.request(method, f"{root}{path}", headers=headers, **options)


async def test_every_route_needs_the_admin_key(open_session: Open) -> None:
    client = open_session("never")
    keys = (None, "", client.session_key, KEY[:-1], KEY + "x", "\u03a9")
    num_asked = 0
    for route in open_admin(client, tasks=None):
        assert route.path.startswith(PREFIX)
        path = route.path.replace("{session_id}", client.session.id).replace("{rest:path}", "x/y")
        for method in route.methods or ():
            for key in keys:
                reply = await send(client, method, path, key)
                assert reply.status_code == 401, (method, path, key)
                assert KEY not in reply.text
                if method != "HEAD":
                    assert reply.json()["error"]["code"] == "invalid_admin_key"
                num_asked += 1
    assert num_asked >= 7 * len(keys)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "invalid_reward"),
        ({"reward": "1"}, 400, "invalid_reward"),
        ({"reward": 10**400}, 400, "invalid_reward"),
        ({"reward": 1, "interaction_id": [1]}, 400, "invalid_request"),
        ({"reward": 1, "interaction_id": {}}, 400, "invalid_request"),
        ({"reward": 1, "interaction_id": None}, 400, "invalid_request"),
        ({"reward": 1, "interaction_id": "chatcmpl-x"}, 404, "unknown_interaction"),
        ({"rewards": {"failed": 1}}, 404, "unknown_interaction"),
        ({"rewards": [1]}, 400, "invalid_reward"),
        ({"rewards": {}}, 400, "invalid_reward"),
        ({"rewords": {}}, 400, "unknown_field"),
        ({"reward": "x" * 3000}, 413, "request_too_large"),
    ],
)
async def test_no_reward_breaks_the_gateway(
    open_session: Open, body: dict[str, Any], status: int, code: str
) -> None:
    client = open_session("hello", RuntimeError("failed"))
    reply = await client.chat.completions.create(model="m", messages=[USER])
    failed = await send(
        client,
        "POST",
        "/v1/chat/completions",
        client.session_key,
        content=json.dumps({"model": "m", "messages": [USER]}),
    )
    assert failed.status_code == 500
    open_admin(client, _Tasks(client))
    text = json.dumps(body).replace("failed", client.interactions[1].id)
    path = f"{PREFIX}/sessions/{client.session.id}/reward"
    refused = await send(client, "POST", path, KEY, content=text)
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), refused.text
    assert [i.reward for i in client.interactions] == [None, None]
    text = json.dumps({"reward": 0.5, "interaction_id": reply.id})
    assert (await send(client, "POST", path, KEY, content=text)).status_code == 200
    assert [i.reward for i in client.interactions] == [0.5, None]
