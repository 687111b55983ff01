"""The gateway: an ASGI app that samples, records every call, and answers like OpenAI.

One app serves agents in this process (:mod:`agentrl_cli.tracking.transport`) and agents
that speak through a loopback socket (:mod:`agentrl_cli.tracking.server`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any

import httpx2
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, Router

from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.errors import ContextLengthError, EngineError, EngineTimeoutError
from agentrl_cli.log import get_logger
from agentrl_cli.tracking.chat_calls import complete_chat, stream_chat
from agentrl_cli.tracking.chat_reply import format_error
from agentrl_cli.tracking.chat_request import ChatRequest, RequestError, parse_chat_request
from agentrl_cli.tracking.server import LoopbackServer
from agentrl_cli.tracking.session import Budget, BudgetExceededError, Call, Session
from agentrl_cli.tracking.template import ChatTemplate, TemplateError
from agentrl_cli.tracking.tool_calls import check_parser_name
from agentrl_cli.tracking.transport import InProcessTransport
from agentrl_cli.tracking.tree import ConversationTree

_log = get_logger(__name__)
#: Sampling twice what failed once would hide the failure and cost a turn.
_NO_RETRY = {"x-should-retry": "false"}
_MAX_BODY_BYTES = 64 * 2**20


class BaseGateway(ABC):
    """Sessions with their own keys, and the way to them: in process and by socket.

    Args:
        model_name: the model that is named to clients.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        # Not Starlette around it: its middlewares answer exceptions, of which none come this far.
        self.app = Router(
            routes=[
                Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
                Route("/v1/models", self._list_models, methods=["GET"]),
                Route("/v1/{path:path}", self._unknown_path, methods=["GET", "POST"]),
            ]
        )
        self.http_client = httpx2.AsyncClient(
            transport=InProcessTransport(self.app), timeout=httpx2.Timeout(None)
        )
        self._sessions: dict[bytes, Session] = {}
        self._server = LoopbackServer(self.app)

    @abstractmethod
    def build_tree(self) -> ConversationTree:
        """An empty conversation tree for a new session."""

    @abstractmethod
    async def answer(self, body: dict[str, Any], session: Session) -> Response:
        """The response to a chat completion request of the session; exceptions become errors."""

    def open_session(
        self, *, sampling: Sampling | None = None, budget: Budget | None = None
    ) -> Session:
        """A new session; ``sampling`` holds where a request does not say otherwise."""
        session = Session(
            uuid.uuid4().hex,
            self.build_tree(),
            sampling or Sampling(),
            budget or Budget(),
        )
        self._sessions[_digest(session.key)] = session
        return session

    def close_session(self, session: Session) -> None:
        """Forgets the session's key; its records stay with whoever holds the session."""
        self._sessions.pop(_digest(session.key), None)

    @property
    def num_open_sessions(self) -> int:
        """Sessions whose key still opens the gateway."""
        return len(self._sessions)

    async def serve(self, port: int = 0) -> str:
        """The base_url of a loopback socket, opened on first use: ``http://127.0.0.1:N/v1``.

        Args:
            port: on first use, where to open it; 0: at a free port.

        Raises:
            UserInputError: the port is not free.
        """
        return f"{await self._server.start(port)}/v1"

    async def close(self) -> None:
        """Ends the socket and the in-process client."""
        self._sessions.clear()
        await self._server.stop()
        await self.http_client.aclose()

    # -- routes ---------------------------------------------------------------------------

    async def _list_models(self, request: Request) -> Response:
        if self._find_session(request) is None:
            return _refuse_key()
        model = {"id": self.model_name, "object": "model", "created": 0}
        return JSONResponse({"object": "list", "data": [{**model, "owned_by": "agentrl"}]})

    async def _unknown_path(self, request: Request) -> Response:
        return _error_response(
            404,
            f"{request.method} {request.url.path} is not served here; served are "
            "POST /v1/chat/completions and GET /v1/models",
        )

    async def _chat_completions(self, request: Request) -> Response:
        session = self._find_session(request)
        if session is None:
            return _refuse_key()
        try:
            body = await _read_json(request)
            return await _until_disconnect(request, self.answer(body, session))
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return describe_error(error)

    def _find_session(self, request: Request) -> Session | None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        session = self._sessions.get(_digest(key))
        if session is None or scheme.lower() != "bearer":
            return None
        return session if hmac.compare_digest(key.encode(), session.key.encode()) else None


class Gateway(BaseGateway):
    """Sessions over one engine; safe for any number of them on one event loop.

    Args:
        engine: what samples.
        tokenizer: the model's Hugging Face tokenizer, with its chat template.
        tool_call_parser: how the model writes tool calls.
    """

    def __init__(
        self, engine: InferenceEngine, tokenizer: Any, *, tool_call_parser: str = "hermes"
    ) -> None:
        check_parser_name(tool_call_parser)
        super().__init__(engine.model_name)
        self.engine = engine
        self.template = ChatTemplate(tokenizer)

    def build_tree(self) -> ConversationTree:
        """A tree whose prompts the model's chat template makes."""
        return ConversationTree(self.template)

    async def answer(self, body: dict[str, Any], session: Session) -> Response:
        """The engine's answer."""
        chat_request = parse_chat_request(body, session.sampling)
        calls = session.begin_calls(
            f"chatcmpl-{uuid.uuid4().hex}",
            chat_request.messages,
            chat_request.inputs,
            chat_request.sampling,
            chat_request.num_choices,
        )
        run = self._stream if chat_request.stream else self._complete
        return await run(session, chat_request, calls)

    async def _complete(
        self, session: Session, request: ChatRequest, calls: list[Call]
    ) -> Response:
        body = await complete_chat(self.engine, self.template, session, request, calls)
        return Response(json.dumps(body, ensure_ascii=False), media_type="application/json")

    async def _stream(self, session: Session, request: ChatRequest, calls: list[Call]) -> Response:
        events = stream_chat(self.engine, self.template, session, request, calls)
        try:
            # What fails before the first token fails with a status, not inside a stream.
            first = await anext(events)
        except BaseException:
            await events.aclose()  # type: ignore[attr-defined]
            raise
        return StreamingResponse(_continue_events(first, events), media_type="text/event-stream")


_GATEWAYS: weakref.WeakValueDictionary[tuple[int, int, str], Gateway] = (
    weakref.WeakValueDictionary()
)


def get_gateway(
    engine: InferenceEngine, tokenizer: Any, tool_call_parser: str = "hermes"
) -> Gateway:
    """The gateway of an engine, shared by all who hold it: building one takes tens of ms."""
    key = (id(engine), id(tokenizer), tool_call_parser)
    gateway = _GATEWAYS.get(key)
    if gateway is None:
        gateway = Gateway(engine, tokenizer, tool_call_parser=tool_call_parser)
        _GATEWAYS[key] = gateway
    return gateway


async def _continue_events(first: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with aclosing(events):  # type: ignore[type-var]
        yield first
        try:
            async for event in events:
                yield event
        except Exception as error:
            response = describe_error(error)
            yield b"data: " + bytes(response.body) + b"\n\n"


async def _until_disconnect(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response, unless the client hangs up first: then the work is cancelled.

    The work stays in this task, and what watches the client cancels it from another: a task
    for each of the two, and one for a single choice, cost 30 microseconds more.

    Raises:
        ClientDisconnect: nobody waits for the response any more.
    """
    working = asyncio.current_task()
    assert working is not None
    has_hung_up = False

    async def watch() -> None:
        nonlocal has_hung_up
        while (await request.receive())["type"] != "http.disconnect":
            pass
        has_hung_up = True
        working.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        # Cancelled from elsewhere too, it has to stay cancelled.
        if not has_hung_up or working.uncancel() > 0:
            raise
        raise ClientDisconnect from None
    finally:
        watching.cancel()


async def _read_json(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        RequestError: too large, no JSON, or no object.
    """
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise RequestError(f"the body is larger than {_MAX_BODY_BYTES} bytes")
    try:
        data = json.loads(body)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    return data


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _refuse_key() -> Response:
    return _error_response(
        401,
        "this key opens no session: it is wrong, or its trajectory has ended. Pass the "
        "api_key that the agent was given as 'Authorization: Bearer KEY'",
        kind="authentication_error",
        code="invalid_api_key",
    )


def describe_error(error: Exception) -> Response:
    """The error response that says what went wrong, in OpenAI's shape."""
    if isinstance(error, RequestError):
        return _error_response(400, str(error), param=error.param, code=error.code)
    if isinstance(error, TemplateError):
        return _error_response(400, str(error), param="messages")
    if isinstance(error, BudgetExceededError):
        message = f"this trajectory has used up its budget ({error}); no further call is answered"
        return _error_response(400, message, code="budget_exceeded")
    if isinstance(error, ContextLengthError):
        return _error_response(400, str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, EngineTimeoutError):
        return _error_response(504, str(error), kind="server_error", code="engine_timeout")
    if isinstance(error, EngineError):
        return _error_response(503, str(error), kind="server_error", code="engine_error")
    _log.exception("a call failed inside the gateway")
    message = f"the gateway failed: {type(error).__name__}: {error}"
    return _error_response(500, message, kind="server_error", code="gateway_error")


def _error_response(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> Response:
    body = format_error(message, kind, param=param, code=code)
    return JSONResponse(body, status_code=status, headers=_NO_RETRY)
