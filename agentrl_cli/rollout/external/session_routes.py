"""``/agentrl/v1/sessions``: sessions for programs that run elsewhere, in any language.

They start a session with the admin key, talk to the model with the session's own, and give the
reward and the end with the admin key again: an agent that holds its session's key alone can
neither reward itself nor see another.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from pydantic import Field, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from agentrl_cli.errors import format_nearest
from agentrl_cli.records import Interaction
from agentrl_cli.rollout.external.task_queue import (
    AdminError,
    ExternalSession,
    ProgramRequest,
    Reward,
    SessionEnd,
    SessionRequest,
    TaskQueue,
)
from agentrl_cli.tracking.gateway import Limits, read_body
from agentrl_cli.tracking.protocols.model_request import describe_error, parse_json

BodyT = TypeVar("BodyT", bound=ProgramRequest)

PREFIX = "/agentrl/v1"


class RewardRequest(ProgramRequest):
    """Rewards of a session: of the outcome, or of calls."""

    reward: Reward = None
    interaction_id: str = ""
    """The call that ``reward`` is for; empty: it is the outcome's."""
    rewards: dict[str, Reward] = Field(default_factory=dict)
    """By the id of the call."""


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
                if not self.knows(request.headers):
                    raise AdminError(
                        401,
                        "invalid_admin_key",
                        f"{PREFIX} needs the admin key, as 'Authorization: Bearer KEY'; the key of "
                        "a session opens the model alone",
                    )
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except AdminError as error:
                return _refuse(error.status, error.code, str(error))
            except Exception as error:
                problem = describe_error(error)
                return _refuse(problem.status, problem.code or "invalid_request", problem.message)

        return guarded

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Whether the headers of a request show the admin key."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key if scheme.lower() == "bearer" else ""
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._key)

    async def _start(self, request: Request) -> Response:
        asked = await self._read(request, SessionRequest)
        if asked.task is not None and asked.group_id is None:
            raise AdminError(
                400,
                "missing_group_id",
                "a task of your own needs a group_id of your choice: the sessions with the same "
                "one are attempts at the same task, and are compared with each other",
            )
        if asked.group_id is not None and asked.task_id is not None:
            raise AdminError(400, "invalid_request", "give task_id or group_id, not both")
        given = await self._wait_for_session(request, asked)
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
        body = await self._read(request, RewardRequest)
        given = self._tasks.find(request.path_params["session_id"])
        given.session.touch()
        rewards, is_given = dict(body.rewards), "reward" in body.model_fields_set
        if body.interaction_id:
            rewards[body.interaction_id] = body.reward
        completed = {i.id for i in given.session.interactions if i.ended and i.reply is not None}
        for name in rewards:
            if name not in completed:
                raise AdminError(
                    404,
                    "unknown_interaction",
                    f"{name!r} is no completed call of this session; "
                    f"{format_nearest(name, completed)}",
                )
        if not is_given and not rewards:
            raise AdminError(
                400, "invalid_reward", "give reward, interaction_id and reward, or rewards"
            )
        if is_given and not body.interaction_id:
            given.keep_reward(body.reward)
        for name, reward in rewards.items():
            given.session.set_reward(name, reward)
        return JSONResponse({"id": given.session.id, "state": "open"})

    async def _end(self, request: Request) -> Response:
        end = await self._read(request, SessionEnd)
        self._tasks.end(request.path_params["session_id"], end)
        return JSONResponse({"id": request.path_params["session_id"], "state": "ended"})

    async def _read(self, request: Request, kind: type[BodyT]) -> BodyT:
        data = await read_body(request.stream(), request.headers, self._limits)
        try:
            return kind.model_validate(parse_json(data) if data.strip() else {})
        except ValidationError as error:
            problem = error.errors()[0]
        name = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            nearest = format_nearest(name, list(kind.model_fields))
            raise AdminError(400, "unknown_field", f"{name!r} is not known; {nearest}")
        raise AdminError(
            400,
            _CODES.get(name, "invalid_request"),
            f"{name}: {problem['msg']}, found {problem['input']!r:.80}",
        )


#: Of a field that holds something else than it may.
_CODES = {"task": "invalid_task", "reward": "invalid_reward", "rewards": "invalid_reward"}
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


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
