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
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from agentrl_cli.errors import format_nearest
from agentrl_cli.records import Interaction
from agentrl_cli.tracking.credit import parse_reward
from agentrl_cli.tracking.gateway import Limits, read_body
from agentrl_cli.tracking.protocols.model_request import describe_error, parse_json

if TYPE_CHECKING:
    from agentrl_cli.rollout.external.external_workflow import ExternalSession
    from agentrl_cli.rollout.external.task_queue import TaskQueue

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
class SessionRequest:
    """Which task a program asks for."""

    task_id: str | None = None
    """A pending task of the dataset; None: the next one."""
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


class AdminRoutes:
    """The routes over the tasks that wait for programs.

    Args:
        tasks: opens and ends the sessions.
        key: opens the routes.
        model_name: the model's, for programs.
        limits: of requests.
    """

    def __init__(self, tasks: TaskQueue, key: str, model_name: str, limits: Limits) -> None:
        self._tasks = tasks
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
        given = await self._wait_for_session(request, _parse_session_request(body))
        root = f"{request.url.scheme}://{request.headers.get('host', '')}"
        described = {
            "id": given.session.id,
            "api_key": given.session.key,
            "base_urls": {"openai": f"{root}/v1", "anthropic": root},
            "model": self._model_name,
            **given.describe(),
            "seconds_left": given.session.seconds_left,
        }
        return JSONResponse(described, status_code=201)

    async def _wait_for_session(self, request: Request, asked: SessionRequest) -> ExternalSession:
        """A session for a program that still waits for it. Raises ClientDisconnect otherwise."""
        starting = asyncio.create_task(self._tasks.start(asked))
        hanging_up = asyncio.create_task(_wait_for_hang_up(request))
        try:
            await asyncio.wait({starting, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
            if not hanging_up.done():
                return starting.result()
        finally:
            for waiting in (starting, hanging_up):
                waiting.cancel()
            [given, _] = await asyncio.gather(starting, hanging_up, return_exceptions=True)
        if not isinstance(given, BaseException):
            self._tasks.abandon(given.session.id)
        raise ClientDisconnect

    async def _summarize(self, request: Request) -> Response:
        return JSONResponse(self._tasks.summarize())

    async def _show(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        state = self._tasks.find_state(session_id)
        if state != "open":
            return JSONResponse({"id": session_id, "state": state})
        given = self._tasks.find(session_id)
        session = given.session
        return JSONResponse(
            {
                "id": session_id,
                "state": state,
                **given.describe(),
                "seconds_left": session.seconds_left,
                "stop_reason": session.stop_reason,
                "interactions": [_describe_interaction(i) for i in session.interactions],
            }
        )

    async def _abandon(self, request: Request) -> Response:
        self._tasks.abandon(request.path_params["session_id"])
        return JSONResponse({"id": request.path_params["session_id"], "state": "abandoned"})

    async def _reward(self, request: Request) -> Response:
        body = await self._read(request, ("reward", "interaction_id", "rewards"))
        given = self._tasks.find(request.path_params["session_id"])
        given.session.touch()
        rewards = body.get("rewards", {})
        if not isinstance(rewards, dict):
            raise AdminError(400, "invalid_reward", "rewards must be {interaction id: number}")
        if "interaction_id" in body:
            if not isinstance(body["interaction_id"], str):
                raise AdminError(400, "invalid_request", "interaction_id must be text")
            rewards = {**rewards, body["interaction_id"]: body.get("reward")}
        parsed = {name: _parse_reward(value) for name, value in rewards.items()}
        completed = {i.id for i in given.session.interactions if i.ended and i.reply is not None}
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
            given.keep_reward(_parse_reward(body["reward"]))
        for name, reward in parsed.items():
            given.session.set_reward(name, reward)
        return JSONResponse({"id": given.session.id, "state": "open"})

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
        self._tasks.end(session_id, end)
        return JSONResponse({"id": session_id, "state": "ended"})

    async def _read(self, request: Request, allowed: tuple[str, ...]) -> dict[str, Any]:
        data = await read_body(request.stream(), self._limits)
        body = parse_json(data) if data.strip() else {}
        for name in body:
            if name not in allowed:
                raise AdminError(
                    400, "unknown_field", f"{name!r} is not known; {format_nearest(name, allowed)}"
                )
        return body


_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def _parse_session_request(body: dict[str, Any]) -> SessionRequest:
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
    return SessionRequest(task_id=task_id, task=task, group_id=group_id, wait_seconds=wait_seconds)


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
