"""The gateway: samples, records every call, and replies like the API that was asked.

One gateway serves agents in this process and, through a loopback socket, those in others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.routing import BaseRoute, Router
from starlette.types import Receive, Scope, Send

from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.errors import ContextLengthError
from agentrl_cli.log import get_logger
from agentrl_cli.tracking.formats.format_choice import choose_formats
from agentrl_cli.tracking.gateway_socket import GatewaySocket
from agentrl_cli.tracking.model_calls import Choice, ModelCalls, StreamWriter
from agentrl_cli.tracking.protocols.chat import ChatProtocol
from agentrl_cli.tracking.protocols.messages import CountTokensProtocol, MessagesProtocol
from agentrl_cli.tracking.protocols.model_request import (
    BusyError,
    ModelRequest,
    Problem,
    ReplyRules,
    TooLargeError,
    describe_error,
    parse_json,
    unknown_key_problem,
)
from agentrl_cli.tracking.protocols.responses import ResponsesProtocol
from agentrl_cli.tracking.replay import (
    CallKey,
    Reply,
    ReplyBook,
    ReplyStream,
    SharedClient,
    wait_cancelled,
)
from agentrl_cli.tracking.session import Session
from agentrl_cli.tracking.structured_output import constrain
from agentrl_cli.tracking.template import ChatTemplate, UnshownInputError
from agentrl_cli.tracking.tree import ConversationTree

_log = get_logger(__name__)

#: Sampling twice what failed once would hide the failure and cost a turn.
_NO_RETRY = {"x-should-retry": "false"}
_BUSY_SECONDS = 1
#: Which repetition of a call this is, as the SDKs of OpenAI and Anthropic say it; 0: the first.
_RETRY_HEADER = "x-stainless-retry-count"


class WireProtocol(Protocol):
    """One API as agents speak it: how its requests are read and its replies written."""

    path: str
    """Such as ``/v1/chat/completions``."""
    id_prefix: str
    """What ids of its replies begin with."""

    def parse(self, body: dict[str, Any], session: Session) -> ModelRequest:
        """The request in a JSON body; the session's sampling holds where it says nothing.

        Raises:
            RequestError: naming the key, what was found and what is allowed.
        """

    def format_reply(self, calls: ModelCalls, choices: Sequence[Choice]) -> dict[str, Any]:
        """The body of a reply that is not streamed."""

    def open_writer(self, calls: ModelCalls) -> StreamWriter:
        """Writes the events of a reply that is streamed."""

    def format_error(self, problem: Problem) -> dict[str, Any]:
        """The body of an error."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a gateway takes at once; more is refused in the words of the protocol."""

    max_body_bytes: int = 64 * 2**20
    """Of one request, as the next two: status 413."""
    max_messages: int = 20_000
    max_tools: int = 2_000
    max_session_calls: int = 256
    """Calls of one session in flight: status 429."""
    max_calls: int = 8192
    """Calls of all sessions in flight: status 429."""


class BaseGateway(GatewaySocket, ABC):
    """Sessions with their own keys, and the way to them: in process and by socket.

    Args:
        model_name: the model that is named to clients.
        protocols: what agents may speak.
        limits: what it takes at once.
    """

    def __init__(
        self, model_name: str, protocols: Sequence[WireProtocol], limits: Limits | None = None
    ) -> None:
        super().__init__(self._serve, self._knows)
        self.model_name = model_name
        self.limits = limits or Limits()
        self.http_client = SharedClient(self.respond)
        self._protocols = {protocol.path: protocol for protocol in protocols}
        self._replies = ReplyBook()
        self._sessions: dict[bytes, Session] = {}
        self._further_routes: Router | None = None
        self._on_close: list[Callable[[], None]] = []
        self._opens_routes: Callable[[Mapping[str, str]], bool] = lambda _: False

    @abstractmethod
    def build_tree(self) -> ConversationTree:
        """An empty conversation tree for a new session."""

    @abstractmethod
    async def answer(
        self, protocol: WireProtocol, body: dict[str, Any], session: Session, reply: Reply
    ) -> None:
        """Makes the reply to a call of the session; exceptions become errors."""

    def open_session(self, **options: Any) -> Session:
        """A new session, with the options of :class:`~agentrl_cli.tracking.session.Session`."""
        session = Session(self.build_tree, **options)
        self._sessions[_digest(session.key)] = session
        return session

    def close_session(self, session: Session) -> list[Reply]:
        """Forgets the session's key and cancels its calls, which are returned; records stay with
        whoever holds it."""
        session.is_closed = True
        self._sessions.pop(_digest(session.key), None)
        running = self._replies.drop_session(session.id)
        for reply in running:
            reply.cancel()
        return running

    async def end_session(self, session: Session) -> None:
        """As :meth:`close_session`; returns when the calls are on record as cancelled."""
        await wait_cancelled(self.close_session(session))

    @property
    def num_open_sessions(self) -> int:
        """Sessions whose key still opens the gateway."""
        return len(self._sessions)

    def add_routes(
        self,
        routes: Iterable[BaseRoute],
        opens: Callable[[Mapping[str, str]], bool],
        *on_close: Callable[[], None],
    ) -> None:
        """Serves further paths on the socket; ``opens`` tells whether a request's headers show
        their key, and ``on_close`` runs before the socket is closed."""
        self._further_routes = Router([*routes], default=self._serve_call)
        self._opens_routes = opens
        self._on_close += on_close

    def _knows(self, headers: Mapping[str, str]) -> bool:
        return self._find_session(headers) is not None or self._opens_routes(headers)

    async def close(self) -> None:
        """Ends all sessions, the socket and the in-process client."""
        for notify in self._on_close:
            notify()
        sessions = tuple(self._sessions.values())
        await wait_cancelled([reply for s in sessions for reply in self.close_session(s)])
        await self.close_socket()
        await self.http_client.end()

    # -- requests -------------------------------------------------------------------------

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The gateway as an ASGI app; model calls pass no router, whose search takes time."""
        if self._further_routes is None or scope["path"] in self._protocols:
            await self._serve_call(scope, receive, send)
        else:
            await self._further_routes(scope, receive, send)

    async def _serve_call(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        with contextlib.suppress(ClientDisconnect):
            reply = await self.respond(
                request.method, scope["path"], request.headers, request.stream()
            )
            await ReplyStream(reply).send(receive, send)

    async def respond(
        self, method: str, path: str, headers: Mapping[str, str], body: AsyncIterable[bytes]
    ) -> Reply:
        """The reply to a request, in flight or complete; the body of strangers is not read.

        Raises:
            ClientDisconnect: the body never came to its end.
        """
        session = self._find_session(headers)
        protocol = self._protocols.get(path)
        if protocol is None or method != "POST":
            return self._respond_besides(method, path, headers, session)
        if session is None:
            return refuse(protocol, unknown_key_problem())
        is_retry = _is_retry(headers)
        session.num_requests += 1
        session.num_retries += is_retry
        try:
            data = await read_body(body, headers, self.limits)
            if session.is_closed:
                return refuse(protocol, unknown_key_problem())
            key = (session.id, path, hashlib.sha256(data).digest())
            repeated = self._replies.find(key) if is_retry else None
            if repeated is not None:
                return repeated
            parsed = parse_json(data)
            self._check_load(session, key)
        except ClientDisconnect:
            raise
        except Exception as error:
            return refuse(protocol, describe_error(error))
        reply = self._replies.begin(key)
        reply.start(self._make_reply(reply, protocol, parsed, session))
        return reply

    def _respond_besides(
        self, method: str, path: str, headers: Mapping[str, str], session: Session | None
    ) -> Reply:
        """The reply to what is no model call."""
        is_anthropic = "anthropic-version" in headers or "x-api-key" in headers
        protocol = _ANTHROPIC_PROTOCOL if is_anthropic else _DEFAULT_PROTOCOL
        if (method, path) == ("GET", "/v1/models"):
            if session is None:
                return refuse(protocol, unknown_key_problem())
            # The keys of OpenAI's form and of Anthropic's; either SDK ignores the other's.
            name = self.model_name
            model = {"id": name, "object": "model", "created": 0, "owned_by": "agentrl"}
            model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
            page = {"object": "list", "data": [model], "has_more": False}
            reply = Reply(has_ended=True)
            reply.set_body({**page, "first_id": name, "last_id": name})
            return reply
        served = ", ".join(f"POST {served_path}" for served_path in self._protocols)
        message = f"{method} {path} is not served here; served are {served} and GET /v1/models"
        if path.startswith("/v1/responses/"):
            message += ". Replies are kept to be continued: send previous_response_id"
        if path.startswith("/v1/v1/"):
            message += ". Anthropic's SDK adds /v1 itself: give it a base_url that ends before it"
        return refuse(protocol, Problem(404, message))

    async def _make_reply(
        self, reply: Reply, protocol: WireProtocol, body: dict[str, Any], session: Session
    ) -> None:
        """Makes a call's reply, for as long as the session may last and anybody reads."""
        is_complete = False
        try:
            async with asyncio.timeout(session.seconds_left) as scope:
                await self.answer(protocol, body, session, reply)
            is_complete = reply.status < 400
        except asyncio.CancelledError:
            if session.is_closed:
                refuse(protocol, unknown_key_problem(), reply)
            raise
        except Exception as error:
            cause = session.end_for_time() if scope.expired() else error
            refuse(protocol, describe_error(cause), reply)
        finally:
            self._replies.end(reply, is_complete=is_complete)

    def _check_load(self, session: Session, key: CallKey) -> None:
        """Raises BusyError when so many calls are in flight that one more is too many."""
        limits = self.limits
        if len(self._replies.list_running(session.id)) >= limits.max_session_calls:
            problem = f"this session has {limits.max_session_calls} calls in flight: wait for one"
        elif self._replies.num_running >= limits.max_calls:
            problem = f"{limits.max_calls} calls are in flight: ask again in a moment"
        else:
            return
        self._replies.refuse(key)
        raise BusyError(problem)

    def _find_session(self, headers: Mapping[str, str]) -> Session | None:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        keys = [bearer] if scheme.lower() == "bearer" else []
        for key in (*keys, headers.get("x-api-key", "")):
            # The search for a digest takes no time that tells of the key.
            session = self._sessions.get(_digest(key))
            if session is not None:
                return session
        return None


class Gateway(BaseGateway):
    """Sessions over one engine; safe for any number of them on one event loop.

    Args:
        engine: what samples.
        tokenizer: the model's Hugging Face tokenizer, with its chat template.
        tool_call_parser: how the model writes tool calls; ``auto``: as its chat template does.
        reasoning_parser: how it writes reasoning; likewise.
        keep_reasoning: True: a turn is continued with its reasoning, also where the chat template
            strips it from the history.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Any,
        *,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        keep_reasoning: bool = False,
    ) -> None:
        super().__init__(engine.model_name, _PROTOCOLS)
        self.engine = engine
        formats = choose_formats(tokenizer, tool_call_parser, reasoning_parser)
        _log.info(formats.describe())
        self.template = ChatTemplate(tokenizer, formats, engine.max_model_len)
        self._keep_reasoning = keep_reasoning

    def build_tree(self) -> ConversationTree:
        """A tree whose prompts the model's chat template makes."""
        return ConversationTree(self.template, keep_reasoning=self._keep_reasoning)

    async def answer(
        self, protocol: WireProtocol, body: dict[str, Any], session: Session, reply: Reply
    ) -> None:
        """Lets the engine make the reply."""
        request = protocol.parse(body, session)
        _check_size(request, self.limits)
        try:
            self.template.check_shown(request.messages, request.inputs)
            if isinstance(protocol, CountTokensProtocol):
                num_tokens = len(await self._find_prompt(request, session))
                reply.set_body(protocol.format_count(num_tokens))
                return
            sampling = await self._hold_to_rules(request, session)
            call_id = f"{protocol.id_prefix}{uuid.uuid4().hex}"
            asked = (request.messages, request.inputs, sampling, request.num_choices)
            begun = await self.template.plan_beside(
                lambda: session.begin_calls(call_id, *asked),
                wait=lambda: session.wait_for_tokens(sampling, request.num_choices),
            )
        except UnshownInputError as error:
            session.user_error = error
            raise
        except ContextLengthError as error:
            session.note_error(error)
            raise
        calls = ModelCalls(self.engine, self.template, session, request, begun)
        if request.stream:
            writer = protocol.open_writer(calls)
            reply.begin_stream(writer.fail)
            await calls.stream(writer, reply)
        else:
            reply.set_body(protocol.format_reply(calls, await calls.complete()))

    async def _hold_to_rules(self, request: ModelRequest, session: Session) -> Sampling:
        """The request's sampling, under what it asks of the reply's form."""
        if request.rules == ReplyRules():
            return request.sampling
        # Whether the prompt ends inside its reasoning decides what may come first.
        prompt_end = self.template.decode_prompt_end(await self._find_prompt(request, session))
        return await constrain(request, self.template.formats, prompt_end)

    async def _find_prompt(self, request: ModelRequest, session: Session) -> Sequence[int]:
        """The token ids of a request's prompt, as a call would have them now."""
        plan = await self.template.plan_beside(
            lambda: session.tree.plan(request.messages, request.inputs)
        )
        return plan.prompt_ids


_GATEWAYS: weakref.WeakValueDictionary[tuple[Any, ...], Gateway] = weakref.WeakValueDictionary()


def get_gateway(engine: InferenceEngine, tokenizer: Any, **reading: Any) -> Gateway:
    """The gateway of an engine, shared by all who hold it: building one takes tens of ms.

    ``reading``: as :class:`Gateway` has it.
    """
    key = (id(engine), id(tokenizer), *sorted(reading.items()))
    gateway = _GATEWAYS.get(key)
    if gateway is None:
        gateway = _GATEWAYS[key] = Gateway(engine, tokenizer, **reading)
    return gateway


async def read_body(
    body: AsyncIterable[bytes], headers: Mapping[str, str], limits: Limits
) -> bytes:
    """A request's body; nothing is read of one that says that it is too large.

    Raises:
        TooLargeError: it is.
    """
    error = TooLargeError(f"the body is larger than {limits.max_body_bytes} bytes")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > limits.max_body_bytes:
        raise error
    data = bytearray()
    async for piece in body:
        data += piece
        if len(data) > limits.max_body_bytes:
            raise error
    return bytes(data)


def _check_size(request: ModelRequest, limits: Limits) -> None:
    """Refuses what would take long merely to look at."""
    for name, found, limit in (
        ("messages", len(request.messages), limits.max_messages),
        ("tools", len(request.inputs.tools), limits.max_tools),
    ):
        if found > limit:
            raise TooLargeError(f"the request has {found} {name}; allowed are {limit}", name)


def _is_retry(headers: Mapping[str, str]) -> bool:
    """Whether an SDK says that it sends this request again."""
    count = headers.get(_RETRY_HEADER, "0")
    return count.isascii() and count.isdigit() and count.strip("0") != ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def refuse(protocol: WireProtocol, problem: Problem, reply: Reply | None = None) -> Reply:
    """The reply that says what went wrong, in the protocol's shape; a stream says it at its end."""
    reply = reply or Reply(has_ended=True)
    if reply.pieces and reply.format_failure is not None:
        reply.add(reply.format_failure(problem))
    else:
        headers = {"retry-after": str(_BUSY_SECONDS)} if problem.status == 429 else _NO_RETRY
        reply.set_body(protocol.format_error(problem), problem.status, headers)
    return reply
