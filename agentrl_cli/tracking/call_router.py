"""The way from a request to what answers it, short for what nearly every request is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Router
from starlette.types import Receive, Scope, Send

#: Answers a request that was POSTed to the path that is given beside it.
CallHandler = Callable[[str, Request], Awaitable[Response]]


class CallRouter(Router):
    """Starlette's router, which model calls need not pass: it takes as long as reading one.

    Not Starlette around it: its middlewares answer exceptions, of which none come this far.

    Args:
        call_paths: where model calls are POSTed.
        answer_call: answers them.
        routes: all others.
    """

    def __init__(
        self, call_paths: Iterable[str], answer_call: CallHandler, routes: list[BaseRoute]
    ) -> None:
        super().__init__(routes=routes)
        self._call_paths = frozenset(call_paths)
        self._answer_call = answer_call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope.get("method") != "POST" or scope["path"] not in self._call_paths:
            await super().__call__(scope, receive, send)
            return
        response = await self._answer_call(scope["path"], Request(scope, receive, send))
        await response(scope, receive, send)
