"""``/agentrl/v1/sessions``: sessions for programs that run elsewhere, in any language.

They start a session with the admin key, talk to the model with the session's own, and give the
reward and the end with the admin key again: an agent that holds its session's key alone can
neither reward itself nor see another.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from agentrl_cli.errors import format_nearest
from agentrl_cli.records import Interaction
from agentrl_cli.tracking.credit import parse_reward
from agentrl_cli.tracking.request_body import Limits, parse_json, read_body
from agentrl_cli.tracking.session import Session
from agentrl_cli.tracking.wire import describe_error

PREFIX = "/agentrl/v1"
_WAIT_SECONDS = 30.0
_MAX_WAIT_SECONDS = 60.0


class AdminError(Exception):
    """A request that is refused.

    Attributes:
        status: of HTTP.
        code: for programs.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a program wants a session for."""

    task_id: str | None = None
    """A task of the dataset that waits; None: the next one."""
    task: Mapping[str, Any] | None = None
    """A task of its own, in place of one of the dataset."""
    group_id: str | None = None
    """Its own name of the group that trajectories of its task are compared in."""
    wait_seconds: float = _WAIT_SECONDS
    """How long to wait for a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """What a program says of a session at its end."""

    is_rewarded: bool = False
    """True: ``reward`` is the outcome's, None included; False: the reward function judges."""
    reward: float | None = None
    final_answer: str | None = None
    error: str | None = None
    """Why it failed; None: it did not."""


class Lease(Protocol):
    """A session that was given to a program."""

    @property
    def session(self) -> Session:
        """Its live side."""
        ...

    def describe(self) -> dict[str, Any]:
        """Its task and names, for the program."""
        ...

    def keep_reward(self, reward: float | None) -> None:
        """Takes the outcome's reward, until the end."""
        ...


class SessionDesk(Protocol):
    """Whoever gives out sessions."""

    async def start(self, wish: Wish) -> Lease:
        """A new session. Raises AdminError when there is none to give."""
        ...

    def find(self, session_id: str) -> Lease:
        """A session that is open. Raises AdminError for others."""
        ...

    def find_state(self, session_id: str) -> str:
        """``open``, ``ended``, ``abandoned`` or ``expired``. Raises AdminError for others."""
        ...

    def end(self, session_id: str, end: SessionEnd) -> None:
        """Ends a session; once more for one that has ended does nothing."""
        ...

    def abandon(self, session_id: str) -> None:
        """Gives a session's task back."""
        ...

    def stop(self) -> None:
        """Gives out no more: whoever waits is told so."""
        ...

    def summarize(self) -> dict[str, Any]:
        """How many sessions are open and tasks wait."""
        ...


class AdminRoutes:
    """The routes over a desk.

    Args:
        desk: gives out the sessions.
        key: opens the routes.
        model_name: the model's, for programs.
        limits: of requests.
    """

    def __init__(self, desk: SessionDesk, key: str, model_name: str, limits: Limits) -> None:
        self._desk = desk
        self._key = key.encode()
        self._model_name = model_name
        self._limits = limits

    def list_routes(self) -> list[BaseRoute]:
        """What to serve."""
        one = f"{PREFIX}/sessions/{{session_id}}"
        table: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("POST", f"{PREFIX}/sessions", self._start),
            ("GET", f"{PREFIX}/sessions", self._summarize),
            ("GET", one, self._show),
            ("DELETE", one, self._abandon),
            ("POST", f"{one}/reward", self._reward),
            ("POST", f"{one}/end", self._end),
        ]
        routes: list[BaseRoute] = [
            Route(path, self._guard(handler), methods=[method]) for method, path, handler in table
        ]
        unknown = Route(f"{PREFIX}/{{rest:path}}", self._guard(_refuse_path), methods=_METHODS)
        return [*routes, unknown]

    def _guard(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The handler for those who have the key, its errors as responses."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except AdminError as error:
                return _refuse(error.status, error.code, str(error))
            except Exception as error:
                problem = describe_error(error)
                return _refuse(problem.status, problem.code or "invalid_request", problem.message)

        return guarded

    def _check_key(self, request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key if scheme.lower() == "bearer" else ""
        if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._key):
            raise AdminError(
                401,
                "invalid_admin_key",
                f"{PREFIX} needs the admin key, as 'Authorization: Bearer KEY'; the key of a "
                "session opens the model alone",
            )

    async def _start(self, request: Request) -> Response:
        body = await self._read(request, ("task_id", "task", "group_id", "wait_seconds"))
        lease = await self._wait_for_lease(request, _parse_wish(body))
        root = f"{request.url.scheme}://{request.headers.get('host', '')}"
        described = {
            "id": lease.session.id,
            "api_key": lease.session.key,
            "base_urls": {"openai": f"{root}/v1", "anthropic": root},
            "model": self._model_name,
            **lease.describe(),
            "seconds_left": lease.session.seconds_left,
        }
        return JSONResponse(described, status_code=201)

    async def _wait_for_lease(self, request: Request, wish: Wish) -> Lease:
        """A session for a program that still waits for it. Raises ClientDisconnect otherwise."""
        starting = asyncio.create_task(self._desk.start(wish))
        hanging_up = asyncio.create_task(_wait_for_hang_up(request))
        try:
            await asyncio.wait({starting, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
            if not hanging_up.done():
                return starting.result()
        finally:
            for waiting in (starting, hanging_up):
                waiting.cancel()
            [lease, _] = await asyncio.gather(starting, hanging_up, return_exceptions=True)
        if not isinstance(lease, BaseException):
            self._desk.abandon(lease.session.id)
        raise ClientDisconnect

    async def _summarize(self, request: Request) -> Response:
        return JSONResponse(self._desk.summarize())

    async def _show(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        state = self._desk.find_state(session_id)
        if state != "open":
            return JSONResponse({"id": session_id, "state": state})
        lease = self._desk.find(session_id)
        session = lease.session
        return JSONResponse(
            {
                "id": session_id,
                "state": state,
                **lease.describe(),
                "seconds_left": session.seconds_left,
                "stop_reason": session.stop_reason,
                "interactions": [_describe_interaction(i) for i in session.interactions],
            }
        )

    async def _abandon(self, request: Request) -> Response:
        self._desk.abandon(request.path_params["session_id"])
        return JSONResponse({"id": request.path_params["session_id"], "state": "abandoned"})

    async def _reward(self, request: Request) -> Response:
        body = await self._read(request, ("reward", "interaction_id", "rewards"))
        lease = self._desk.find(request.path_params["session_id"])
        lease.session.touch()
        rewards = body.get("rewards", {})
        if not isinstance(rewards, dict):
            raise AdminError(400, "invalid_reward", "rewards must be {interaction id: number}")
        if "interaction_id" in body:
            if not isinstance(body["interaction_id"], str):
                raise AdminError(400, "invalid_request", "interaction_id must be text")
            rewards = {**rewards, body["interaction_id"]: body.get("reward")}
        parsed = {name: _parse_reward(value) for name, value in rewards.items()}
        completed = {i.id for i in lease.session.interactions if i.ended and i.reply is not None}
        for name in parsed:
            if name not in completed:
                raise AdminError(
                    404,
                    "unknown_interaction",
                    f"{name!r} is no completed call of this session; "
                    f"{format_nearest(str(name), completed)}",
                )
        if "reward" not in body and not rewards:
            raise AdminError(
                400, "invalid_reward", "give reward, interaction_id and reward, or rewards"
            )
        if "reward" in body and "interaction_id" not in body:
            lease.keep_reward(_parse_reward(body["reward"]))
        for name, reward in parsed.items():
            lease.session.set_reward(name, reward)
        return JSONResponse({"id": lease.session.id, "state": "open"})

    async def _end(self, request: Request) -> Response:
        body = await self._read(request, ("reward", "final_answer", "error"))
        for name in ("final_answer", "error"):
            if not isinstance(body.get(name), str | None):
                raise AdminError(400, "invalid_request", f"{name} must be text")
        session_id = request.path_params["session_id"]
        end = SessionEnd(
            is_rewarded="reward" in body,
            reward=_parse_reward(body.get("reward")),
            final_answer=body.get("final_answer"),
            error=body.get("error"),
        )
        self._desk.end(session_id, end)
        return JSONResponse({"id": session_id, "state": "ended"})

    async def _read(self, request: Request, allowed: tuple[str, ...]) -> dict[str, Any]:
        data = await read_body(request, self._limits)
        body = parse_json(data) if data.strip() else {}
        for name in body:
            if name not in allowed:
                raise AdminError(
                    400, "unknown_field", f"{name!r} is not known; {format_nearest(name, allowed)}"
                )
        return body


_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def _parse_wish(body: dict[str, Any]) -> Wish:
    task, group_id, task_id = body.get("task"), body.get("group_id"), body.get("task_id")
    wait_seconds = body.get("wait_seconds", _WAIT_SECONDS)
    if not isinstance(task, dict | None):
        raise AdminError(400, "invalid_task", "task must be an object, as a row of a dataset is")
    for name in ("group_id", "task_id"):
        if not isinstance(body.get(name), str | None):
            raise AdminError(400, "invalid_request", f"{name} must be text")
    if task is not None and group_id is None:
        raise AdminError(
            400,
            "missing_group_id",
            "a task of your own needs a group_id of your choice: the sessions with the same one "
            "are attempts at the same task, and are compared with each other",
        )
    if group_id is not None and task_id is not None:
        raise AdminError(400, "invalid_request", "give task_id or group_id, not both")
    if isinstance(wait_seconds, bool) or not isinstance(wait_seconds, int | float):
        raise AdminError(400, "invalid_request", "wait_seconds must be a number")
    wait_seconds = min(max(float(wait_seconds), 0.0), _MAX_WAIT_SECONDS)
    return Wish(task_id=task_id, task=task, group_id=group_id, wait_seconds=wait_seconds)


def _parse_reward(value: Any) -> float | None:
    try:
        return parse_reward(value)
    except (TypeError, ValueError) as error:
        raise AdminError(400, "invalid_reward", str(error)) from None


def _describe_interaction(interaction: Interaction) -> dict[str, Any]:
    return {
        "id": interaction.id,
        "parent_id": interaction.parent_id,
        "status": interaction.status,
        "finish_reason": interaction.finish_reason,
        "num_prompt_tokens": len(interaction.prompt_ids),
        "num_completion_tokens": interaction.num_completion_tokens,
        "reward": interaction.reward,
        "error": interaction.error,
    }


async def _wait_for_hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def _refuse_path(request: Request) -> Response:
    raise AdminError(
        404,
        "unknown_path",
        f"{request.method} {request.url.path} is not served here; served are {PREFIX}/sessions "
        "(POST, GET), .../sessions/ID (GET, DELETE), .../sessions/ID/reward and /end (POST)",
    )


def _refuse(status: int, code: str, message: str) -> Response:
    headers = {"retry-after": "1"} if status in (429, 503) else {}
    error = {"code": code, "message": message}
    return JSONResponse({"error": error}, status_code=status, headers=headers)
