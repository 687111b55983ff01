"""The gateway: an ASGI app that samples, records every call, and answers like the API asked.

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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.log import get_logger
from agentrl_cli.tracking.answers import Answer, AnswerBook, CallKey, wait_cancelled
from agentrl_cli.tracking.call_router import CallRouter
from agentrl_cli.tracking.chat_protocol import ChatProtocol
from agentrl_cli.tracking.constraints import constrain
from agentrl_cli.tracking.messages_protocol import CountTokensProtocol, MessagesProtocol
from agentrl_cli.tracking.model_calls import ModelCalls
from agentrl_cli.tracking.model_request import BusyError, ModelRequest, ReplyRules
from agentrl_cli.tracking.parsers.choosing import choose_formats
from agentrl_cli.tracking.reply_text import PROMPT_END_TOKENS
from agentrl_cli.tracking.request_body import Limits, check_size, is_retry, parse_json, read_body
from agentrl_cli.tracking.responses_protocol import ResponsesProtocol
from agentrl_cli.tracking.server import LOOPBACK, GatewayServer
from agentrl_cli.tracking.session import Budget, Session
from agentrl_cli.tracking.template import ChatTemplate
from agentrl_cli.tracking.transport import SharedClient
from agentrl_cli.tracking.tree import ConversationTree
from agentrl_cli.tracking.wire import (
    Problem,
    WireProtocol,
    describe_error,
    unknown_key_problem,
)

_log = get_logger(__name__)

#: Every API that agents may speak; what is recorded is the same.
_PROTOCOLS: tuple[WireProtocol, ...] = (
    ChatProtocol(),
    ResponsesProtocol(),
    MessagesProtocol(),
    CountTokensProtocol(),
)
#: Whose errors are shown where no protocol was asked for.
_DEFAULT_PROTOCOL = _PROTOCOLS[0]
_ANTHROPIC_PROTOCOL = _PROTOCOLS[2]
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
#: Sampling twice what failed once would hide the failure and cost a turn.
_NO_RETRY = {"x-should-retry": "false"}
_BUSY_SECONDS = 1


class BaseGateway(ABC):
    """Sessions with their own keys, and the way to them: in process and by socket.

    Args:
        model_name: the model that is named to clients.
        protocols: what agents may speak.
        limits: what it takes at once.
    """

    def __init__(
        self, model_name: str, protocols: Sequence[WireProtocol], limits: Limits | None = None
    ) -> None:
        self.model_name = model_name
        self.limits = limits or Limits()
        self._answers = AnswerBook()
        self._protocols = {protocol.path: protocol for protocol in protocols}
        self.app = CallRouter(
            self._protocols,
            self._answer_call,
            [
                Route("/v1/models", self._list_models, methods=["GET"]),
                Route("/v1/{path:path}", self._unknown_path, methods=_METHODS),
            ],
        )
        self.http_client = SharedClient(self.app)
        self._sessions: dict[bytes, Session] = {}
        self._on_close: list[Callable[[], None]] = []
        self._server = GatewayServer(self.app)

    @abstractmethod
    def build_tree(self) -> ConversationTree:
        """An empty conversation tree for a new session."""

    @abstractmethod
    async def answer(
        self, protocol: WireProtocol, body: dict[str, Any], session: Session
    ) -> Response:
        """The response to a call of the session; exceptions become errors."""

    def open_session(
        self,
        *,
        sampling: Sampling | None = None,
        budget: Budget | None = None,
        key: str | None = None,
        max_kept: int | None = None,
    ) -> Session:
        """A new session; ``sampling`` holds where a request does not say otherwise.

        ``key`` and ``max_kept``: see :class:`~agentrl_cli.tracking.session.Session`.
        """
        session = Session(
            uuid.uuid4().hex,
            self.build_tree(),
            sampling or Sampling(),
            budget or Budget(),
            key=key,
            max_kept=max_kept,
        )
        self._sessions[_digest(session.key)] = session
        return session

    def close_session(self, session: Session) -> None:
        """Forgets the session's key and cancels its calls; records stay with whoever holds it."""
        session.is_closed = True
        self._sessions.pop(_digest(session.key), None)
        for answer in self._answers.drop_session(session.id):
            answer.cancel()

    async def end_session(self, session: Session) -> None:
        """As :meth:`close_session`; returns when the calls are on record as cancelled."""
        running = self._answers.list_running(session.id)
        self.close_session(session)
        await wait_cancelled(running)

    @property
    def num_open_sessions(self) -> int:
        """Sessions whose key still opens the gateway."""
        return len(self._sessions)

    def add_routes(self, routes: Iterable[BaseRoute], *on_close: Callable[[], None]) -> None:
        """Serves further paths before those of calls; ``on_close`` runs before the socket ends."""
        self.app.routes[:0] = list(routes)
        self._on_close += on_close

    async def serve(self, port: int = 0, host: str = LOOPBACK) -> str:
        """The base_url of a socket, opened on first use: ``http://127.0.0.1:N/v1``.

        Args:
            port: on first use, where to open it; 0: at a free port.
            host: on first use, the address; others than this machine's own let others in.

        Raises:
            UserInputError: the port is not free.
        """
        return f"{await self._server.start(port, host)}/v1"

    async def close(self) -> None:
        """Ends all sessions, the socket and the in-process client."""
        for tell in self._on_close:
            tell()
        sessions = list(self._sessions.values())
        running = [answer for s in sessions for answer in self._answers.list_running(s.id)]
        for session in sessions:
            self.close_session(session)
        await wait_cancelled(running)
        await self._server.stop()
        await self.http_client.end()

    # -- routes ---------------------------------------------------------------------------

    async def _list_models(self, request: Request) -> Response:
        if self._find_session(request) is None:
            return refuse(_guess_protocol(request), unknown_key_problem())
        # The keys of OpenAI's form and those of Anthropic's; either SDK passes over the others.
        name = self.model_name
        model = {"id": name, "object": "model", "created": 0, "owned_by": "agentrl"}
        model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        page = {"object": "list", "data": [model]}
        return JSONResponse({**page, "has_more": False, "first_id": name, "last_id": name})

    async def _unknown_path(self, request: Request) -> Response:
        served = ", ".join(f"POST {path}" for path in self._protocols)
        message = (
            f"{request.method} {request.url.path} is not served here; served are {served} "
            "and GET /v1/models"
        )
        if request.url.path.startswith("/v1/responses/"):
            message += ". Replies are kept to be continued: send previous_response_id"
        if request.url.path.startswith("/v1/v1/"):
            message += ". Anthropic's SDK adds /v1 itself: give it a base_url that ends before it"
        return refuse(_guess_protocol(request), Problem(404, message))

    async def _answer_call(self, path: str, request: Request) -> Response:
        protocol = self._protocols[path]
        session = self._find_session(request)
        if session is None:
            return refuse(protocol, unknown_key_problem())
        try:
            data = await read_body(request, self.limits)
            if session.is_closed:
                return refuse(protocol, unknown_key_problem())
            key = CallKey(session.id, protocol.path, hashlib.sha256(data).digest())
            repeated = self._answers.find(key) if is_retry(request) else None
            if repeated is not None:
                return repeated
            body = parse_json(data)
            self._check_load(session, key)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return refuse(protocol, describe_error(error))
        answer = self._answers.begin(key)
        answer.start(self._make_answer(answer, protocol, body, session))
        return answer

    async def _make_answer(
        self, answer: Answer, protocol: WireProtocol, body: dict[str, Any], session: Session
    ) -> None:
        """Makes a call's answer, for as long as the session may last and anybody reads."""
        is_whole = False
        try:
            async with asyncio.timeout(session.seconds_left) as scope:
                response = await self.answer(protocol, body, session)
                await answer.take(response)
            is_whole = response.status_code < 400
        except asyncio.CancelledError:
            if session.is_closed:
                await _fail(answer, protocol, unknown_key_problem())
            raise
        except Exception as error:
            cause = session.end_for_time() if scope.expired() else error
            await _fail(answer, protocol, describe_error(cause))
        finally:
            self._answers.end(answer, is_whole=is_whole)

    def _check_load(self, session: Session, key: CallKey) -> None:
        """Raises BusyError when so many calls are in flight that one more is too many."""
        limits = self.limits
        if len(self._answers.list_running(session.id)) >= limits.max_session_calls:
            self._answers.refuse(key)
            raise BusyError(
                f"this session has {limits.max_session_calls} calls in flight, and may have no "
                "more: wait for one of them"
            )
        if self._answers.num_running >= limits.max_calls:
            self._answers.refuse(key)
            raise BusyError(f"{limits.max_calls} calls are in flight: ask again in a moment")

    def _find_session(self, request: Request) -> Session | None:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        keys = [bearer] if scheme.lower() == "bearer" else []
        for key in (*keys, request.headers.get("x-api-key", "")):
            session = self._sessions.get(_digest(key))
            if session is not None and hmac.compare_digest(key.encode(), session.key.encode()):
                return session
        return None


class Gateway(BaseGateway):
    """Sessions over one engine; safe for any number of them on one event loop.

    Args:
        engine: what samples.
        tokenizer: the model's Hugging Face tokenizer, with its chat template.
        tool_call_parser: how the model writes tool calls; ``auto``: as its chat template does.
        reasoning_parser: how it writes thoughts; likewise.
        keep_thinking: True: a turn is continued with its thoughts, also where the chat template
            strips them from the history.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Any,
        *,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        keep_thinking: bool = False,
    ) -> None:
        super().__init__(engine.model_name, _PROTOCOLS)
        self.engine = engine
        formats = choose_formats(tokenizer, tool_call_parser, reasoning_parser)
        _log.info(formats.describe())
        self.template = ChatTemplate(tokenizer, formats)
        self._keep_thinking = keep_thinking

    def build_tree(self) -> ConversationTree:
        """A tree whose prompts the model's chat template makes."""
        return ConversationTree(self.template, keep_thinking=self._keep_thinking)

    async def answer(
        self, protocol: WireProtocol, body: dict[str, Any], session: Session
    ) -> Response:
        """The engine's answer."""
        request = protocol.parse(body, session)
        check_size(request, self.limits)
        if isinstance(protocol, CountTokensProtocol):
            plan = session.plan_prompt(request.messages, request.inputs)
            return JSONResponse(protocol.format_count(len(plan.prompt_ids)))
        sampling = await self._hold_to_rules(request, session)
        await session.wait_for_tokens(sampling, request.num_choices)
        calls = ModelCalls(
            self.engine,
            self.template,
            session,
            request,
            session.begin_calls(
                f"{protocol.id_prefix}{uuid.uuid4().hex}",
                request.messages,
                request.inputs,
                sampling,
                request.num_choices,
            ),
        )
        if request.stream:
            return await _stream(protocol, calls)
        reply = protocol.format_reply(calls, await calls.complete())
        return Response(json.dumps(reply, ensure_ascii=False), media_type="application/json")

    async def _hold_to_rules(self, request: ModelRequest, session: Session) -> Sampling:
        """The request's sampling, under what it asks of the reply's form."""
        if request.rules == ReplyRules():
            return request.sampling
        # Whether the prompt ends inside a thought decides what may come first.
        prompt_ids = session.plan_prompt(request.messages, request.inputs).prompt_ids
        prompt_end = self.template.decode_all(prompt_ids[-PROMPT_END_TOKENS:])
        return await constrain(request, self.template.formats, prompt_end)


_GATEWAYS: weakref.WeakValueDictionary[tuple[Any, ...], Gateway] = weakref.WeakValueDictionary()


def get_gateway(
    engine: InferenceEngine,
    tokenizer: Any,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    keep_thinking: bool = False,
) -> Gateway:
    """The gateway of an engine, shared by all who hold it: building one takes tens of ms."""
    key = (id(engine), id(tokenizer), tool_call_parser, reasoning_parser, keep_thinking)
    gateway = _GATEWAYS.get(key)
    if gateway is None:
        gateway = Gateway(
            engine,
            tokenizer,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            keep_thinking=keep_thinking,
        )
        _GATEWAYS[key] = gateway
    return gateway


async def _stream(protocol: WireProtocol, calls: ModelCalls) -> Response:
    events = protocol.stream_events(calls)
    try:
        # What fails before the first token fails with a status, not inside a stream.
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return StreamingResponse(_continue_events(first, events), media_type="text/event-stream")


async def _continue_events(first: bytes, events: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


async def _fail(answer: Answer, protocol: WireProtocol, problem: Problem) -> None:
    event = protocol.format_stream_error(problem, answer.num_pieces)
    await answer.fail(refuse(protocol, problem), event)


def _guess_protocol(request: Request) -> WireProtocol:
    """Whose errors a request understands that is no call of any protocol."""
    is_anthropic = "anthropic-version" in request.headers or "x-api-key" in request.headers
    return _ANTHROPIC_PROTOCOL if is_anthropic else _DEFAULT_PROTOCOL


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def refuse(protocol: WireProtocol, problem: Problem) -> Response:
    """The error response that says what went wrong, in the protocol's shape."""
    headers = {"retry-after": str(_BUSY_SECONDS)} if problem.status == 429 else _NO_RETRY
    return JSONResponse(protocol.format_error(problem), status_code=problem.status, headers=headers)
