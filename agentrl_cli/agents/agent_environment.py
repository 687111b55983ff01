"""The environment of agents: what SDKs read there leads to each trajectory's own session.

Agents in this process share its environment, and often clients too: made at import, by a builder
that is called once, or kept by a framework. So all of them get one address and one key, which lead
nowhere by themselves; a request gets those of its trajectory when it leaves. Which one that is, a
context variable tells: in the agent's tasks, and in threads that are handed its context.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agentrl_cli.errors import BuilderError, InlineLimitError, RewardError

if TYPE_CHECKING:
    from agentrl_cli.tracking.gateway import BaseGateway

#: By these the SDKs of OpenAI and Anthropic, LangChain, CAMEL and LiteLLM find a model.
_OPENAI_URLS = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_BASE_URL")
_ANTHROPIC_URLS = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE", "ANTHROPIC_API_URL")
#: These would be sent beside the key and be taken for it, or lead the call elsewhere.
_REMOVED = ("ANTHROPIC_AUTH_TOKEN", "OPENAI_PROXY", "ANTHROPIC_PROXY")
_FAMILIES = ((*_OPENAI_URLS, "OPENAI_API_KEY"), (*_ANTHROPIC_URLS, "ANTHROPIC_API_KEY"))
MODEL_VARIABLES = (*_FAMILIES[0], *_FAMILIES[1], *_REMOVED)
#: Any name is served; this one is no model of OpenAI's.
_SERVED_MODEL = "policy"
_HOST = "model.agentrl.invalid"
_URL, _KEY = f"http://{_HOST}/v1", "agentrl-knows-the-session"
_STRAY = (
    "a call of the model does not tell whose trajectory it belongs to. Such are calls from threads "
    "that were started without their caller's context (asyncio.to_thread hands it over), and those "
    "of HTTP clients other than httpx: give them the base_url and api_key that a function can name "
    "in its signature, or set rollout.agent_mode: subprocess"
)
#: How long the event loop may take to answer a thread before it is held to wait for that thread.
_LOOP_SECONDS = 30.0


class StrayCallError(InlineLimitError):
    """A call of the model of which nobody can tell whose trajectory it belongs to."""


class EarlyCallError(BaseException):
    """A call of the model where there is no trajectory; SDKs would repeat it for an Exception."""


@dataclass(frozen=True, slots=True)
class _Route:
    """The way to one trajectory's session."""

    gateway: BaseGateway
    api_key: str
    loop: asyncio.AbstractEventLoop

    def find_base_url(self) -> str:
        """The gateway's address, its socket opened if need be.

        Raises:
            StrayCallError: its event loop waits for this thread, and so would never answer it.
        """
        if asyncio._get_running_loop() is self.loop:
            return self.gateway.open_socket()

        async def open_socket() -> str:
            return self.gateway.open_socket()

        opening = asyncio.run_coroutine_threadsafe(open_socket(), self.loop)
        try:
            return opening.result(_LOOP_SECONDS)
        except TimeoutError:
            raise StrayCallError(
                f"for {_LOOP_SECONDS:g} seconds the event loop that has to answer the model's "
                "call did nothing: it waits for the very thread that makes the call. Await the "
                "async form (LangGraph: ainvoke, CAMEL: astep), or write the agent as a plain def, "
                "which gets a thread of its own, or set rollout.agent_mode: subprocess"
            ) from None


@dataclass(frozen=True, slots=True)
class _Place:
    """What code finds in the environment, and where its calls of the model go."""

    changes: Mapping[str, str | None] = field(default_factory=dict)
    """None: the variable is hidden."""
    route: _Route | None = None
    error: BaseException | None = None
    """Raised by a call where there is no route."""


_place: ContextVar[_Place | None] = ContextVar("agentrl_place", default=None)
#: Agents that are being built or run. Meanwhile threads without a context belong to one of them.
_agents: list[_Place] = []


class _AgentEnviron(type(os.environ)):  # type: ignore[misc]
    """``os.environ`` as the code that reads it should see it; the process's own stays as it is."""

    def __getitem__(self, name: str) -> str:
        changes = _find_place().changes
        if name not in changes:
            return str(super().__getitem__(name))
        value = changes[name]
        if value is None:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: str) -> None:
        # Agents as tutorials write them set a key of their own first.
        if name not in _find_place().changes:
            super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        if name not in _find_place().changes:
            super().__delitem__(name)

    def __iter__(self) -> Iterator[str]:
        changes = _find_place().changes
        own = [name for name in super().__iter__() if name not in changes]
        return iter(own + [name for name, value in changes.items() if value is not None])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def list_changes(
    environment: Mapping[str, str], base_url: str, api_key: str
) -> dict[str, str | None]:
    """What differs from ``environment`` for an agent whose model is at ``base_url``.

    None stands for a variable that is taken away.
    """
    changes: dict[str, str | None] = {
        **dict.fromkeys(_REMOVED),
        **dict.fromkeys(_OPENAI_URLS, base_url),
        # Anthropic's SDK adds /v1 itself.
        **dict.fromkeys(_ANTHROPIC_URLS, base_url.removesuffix("/v1")),
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_API_KEY": api_key,
        # The OpenAI Agents SDK would send traces to OpenAI with the session's key, and with every
        # call the settings of OpenAI's newest model, which it takes for an agent without one.
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "OPENAI_DEFAULT_MODEL": _SERVED_MODEL,
    }
    # The way to this machine must not lead through a proxy.
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in environment.get(name, "").split(",") if host]
        changed = dict.fromkeys([*hosts, "127.0.0.1", "localhost", _HOST])
        changes[name] = ",".join(changed)
    return changes


@contextmanager
def running_environment(gateway: BaseGateway, api_key: str) -> Iterator[None]:
    """Inside the block an agent runs in this event loop, and its calls go to its session."""
    route = _Route(gateway, api_key, asyncio.get_running_loop())
    with _enter_agent(route, None):
        yield


@contextmanager
def building_environment() -> Iterator[None]:
    """Inside the block agents are imported and built: clients that they make are the right ones.

    Raises:
        BuilderError: one of them is used there.
    """
    error = EarlyCallError(
        "the model was called while the agent was imported or built, when there is no trajectory "
        "yet. Call it where the agent runs on a row, in what the builder returns"
    )
    try:
        with _enter_agent(None, error):
            yield
    except EarlyCallError as raised:
        raise BuilderError(str(raised)) from raised


@contextmanager
def reward_environment() -> Iterator[None]:
    """Inside the block the environment is the user's own: a judge is not the trained model.

    Where it has no key, it is the agents': one file may hold an agent, its client and the reward.

    Raises:
        RewardError: such a client is used.
    """
    error = EarlyCallError(
        "a reward function called a model through a client that was made for the agent, or through "
        "an environment that names no model. Give a judge a client with a base_url and api_key of "
        "its own"
    )
    with _enter(_Place()):
        own = {**os.environ}
    changes = list_changes(own, _URL, _KEY)
    missing = [f for f in _FAMILIES if not any(name in own for name in f)]
    lent = {name: changes[name] for family in missing for name in family}
    try:
        with _enter(_Place(lent, None, error)):
            yield
    except EarlyCallError as raised:
        raise RewardError(str(raised)) from raised


@contextmanager
def _enter_agent(route: _Route | None, error: BaseException | None) -> Iterator[None]:
    with _enter(_Place()):
        changes = list_changes(os.environ, _URL, _KEY)
    place = _Place(changes, route, error)
    _agents.append(place)
    try:
        with _enter(place):
            yield
    finally:
        _agents.remove(place)


@contextmanager
def _enter(place: _Place) -> Iterator[None]:
    _install()
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def _find_place() -> _Place:
    place = _place.get()
    if place is not None:
        return place
    with suppress(IndexError):
        # Of one of several agents: the environment is the same for all, and the way is not known.
        return _Place(_agents[-1].changes)
    return _Place()


def _find_route() -> _Route:
    place = _find_place()
    if place.route is not None:
        return place.route
    if place.error is not None:
        raise place.error
    raise StrayCallError(_STRAY)


@cache
def _install() -> None:
    """Once in a process; without an agent nothing of it has an effect."""
    os.environ.__class__ = _AgentEnviron
    sys.addaudithook(_check_lookup)
    _change_requests(_lead)


def keep_no_connections() -> None:
    """For a process that gives each agent an event loop of its own, and its address in the
    environment: frameworks keep clients from one agent to the next (LangChain does), and a
    connection cannot be used in another event loop than the one that opened it."""

    def close(request: Any) -> None:
        # Of these variables it is the one without a path.
        if str(request.url).startswith(os.environ.get(_ANTHROPIC_URLS[0], _URL)):
            request.headers["connection"] = "close"

    _change_requests(close)


def _change_requests(change: Callable[[Any], None]) -> None:
    """Has ``change`` called with every request that an HTTP client of this process sends."""
    for name in ("httpx2", "httpx"):
        if importlib.util.find_spec(name) is not None:
            _change_requests_of(importlib.import_module(name), change)


def _change_requests_of(library: Any, change: Callable[[Any], None]) -> None:
    send, send_async = library.Client.send, library.AsyncClient.send

    @functools.wraps(send)
    def changed(client: Any, request: Any, **options: Any) -> Any:
        change(request)
        return send(client, request, **options)

    @functools.wraps(send_async)
    async def changed_async(client: Any, request: Any, **options: Any) -> Any:
        change(request)
        return await send_async(client, request, **options)

    library.Client.send, library.AsyncClient.send = changed, changed_async


def _lead(request: Any) -> None:
    """Sends a request that is on its way to agents' common address to its trajectory's own."""
    if request.url.host != _HOST:
        return
    route = _find_route()
    address = urlsplit(route.find_base_url())
    request.url = request.url.copy_with(host=address.hostname, port=address.port)
    for header in ("authorization", "x-api-key"):
        if header in request.headers:
            request.headers[header] = request.headers[header].replace(_KEY, route.api_key)
    # Clients are shared by threads and event loops; kept connections belong to one. And only a
    # new one is refused where it would block the event loop that it waits for.
    request.headers["connection"] = "close"


def _check_lookup(event: str, arguments: tuple[Any, ...]) -> None:
    """Stops what is on its way to agents' common address by any other library."""
    if event == "socket.getaddrinfo" and arguments[0] in (_HOST, _HOST.encode()):
        _find_route()
        raise StrayCallError(_STRAY)
