"""A gateway to an endpoint elsewhere: calls are passed on as they are, and recorded.

There are no token ids, so nothing of it can be trained on; it serves to evaluate the
same agent on another model.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import openai
from openai import AsyncOpenAI, AsyncStream
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.responses import JSONResponse, Response, StreamingResponse

from agentrl_cli.engine.protocol import Generation, Sampling
from agentrl_cli.errors import EngineError
from agentrl_cli.records import Message
from agentrl_cli.tracking.chat_protocol import ChatProtocol
from agentrl_cli.tracking.chat_request import parse_messages
from agentrl_cli.tracking.gateway import BaseGateway, refuse
from agentrl_cli.tracking.request_fields import drop_nulls
from agentrl_cli.tracking.session import Call, Session
from agentrl_cli.tracking.template import TemplateInputs, make_template_inputs
from agentrl_cli.tracking.tool_request import parse_tools
from agentrl_cli.tracking.tree import ConversationTree
from agentrl_cli.tracking.wire import WireProtocol, describe_error

#: What the endpoint speaks is passed on as it is.
_PROTOCOL = ChatProtocol()
_LIMIT_KEYS = ("max_tokens", "max_completion_tokens")
#: What is shorter (EMPTY, none) is no secret, and may be a word of a message.
_MIN_SECRET_LENGTH = 8


class _NoTemplate:
    """Stands where a chat template would: the endpoint makes the prompt, out of our sight."""

    def render(self, messages: Any, inputs: TemplateInputs) -> str:
        return ""

    def render_past(self, messages: Any, inputs: TemplateInputs) -> str:
        return ""

    def encode(self, text: str) -> tuple[int, ...]:
        return ()

    def split_at_last_turn(self, skeleton: Any, inputs: TemplateInputs) -> None:
        return None

    def join(
        self, prompt_ids: Any, completion_ids: Any, text_after: str, finish_reason: str | None
    ) -> tuple[int, ...]:
        return ()


class EndpointGateway(BaseGateway):
    """Sessions over an OpenAI-compatible endpoint.

    Args:
        base_url: the endpoint, ending in ``/v1``.
        api_key: its key; sessions have keys of their own.
        model_name: its model, whatever name the agent asks for.
        timeout_seconds: deadline of one call.
        max_retries: how often a call is repeated when the endpoint is busy or unreachable.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        model_name: str,
        *,
        timeout_seconds: float,
        max_retries: int,
    ) -> None:
        super().__init__(model_name, [_PROTOCOL])
        self._upstream = AsyncOpenAI(
            base_url=base_url, api_key=api_key, timeout=timeout_seconds, max_retries=max_retries
        )

    def build_tree(self) -> ConversationTree:
        """A tree without tokens: who continues whom is known by the messages alone."""
        return ConversationTree(_NoTemplate())

    async def close(self) -> None:
        """Closes the connections to the endpoint too."""
        await super().close()
        await self._upstream.close()

    async def answer(
        self, protocol: WireProtocol, body: dict[str, Any], session: Session
    ) -> Response:
        """The endpoint's own answer."""
        messages = parse_messages(body)
        tools = parse_tools(body)
        sampling = Sampling(max_tokens=session.sampling.max_tokens)
        await session.wait_for_tokens(sampling, 1)
        [call] = session.begin_calls(
            f"call-{uuid.uuid4().hex}", messages, make_template_inputs(tools, {}), sampling, 1
        )
        body = {**_list_defaults(session.sampling), **drop_nulls(body), "model": self.model_name}
        body |= _limit_length(body, call.sampling.max_tokens)
        try:
            if body.get("stream"):
                return await self._stream(session, call, body)
            completion = await self._upstream.post(
                "/chat/completions", body=body, cast_to=ChatCompletion
            )
            _record(session, call, completion)
        except BaseException as error:
            return _refuse(session, call, error, self._upstream.api_key)
        return JSONResponse(completion.model_dump(mode="json", exclude_unset=True))

    async def _stream(self, session: Session, call: Call, body: dict[str, Any]) -> Response:
        stream = await self._upstream.post(
            "/chat/completions",
            body=body,
            cast_to=ChatCompletion,
            stream=True,
            stream_cls=AsyncStream[ChatCompletionChunk],
        )
        events = _pass_on(session, call, stream, self._upstream.api_key)
        return StreamingResponse(events, media_type="text/event-stream")


async def _pass_on(
    session: Session, call: Call, stream: AsyncStream[ChatCompletionChunk], api_key: str
) -> AsyncIterator[bytes]:
    """The endpoint's events; the reply is recorded before the last is written."""
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    try:
        async with stream:
            async for chunk in stream:
                state.handle_chunk(chunk)
                data = chunk.model_dump_json(exclude_unset=True)
                yield f"data: {data}\n\n".encode()
        _record(session, call, state.get_final_completion())
    except (asyncio.CancelledError, GeneratorExit) as error:
        session.fail_call(call, error)
        raise
    except Exception as error:  # the SDK asserts what it expects of a stream
        cause = _hide(f"{type(error).__name__}: {error}", api_key)
        broken = EngineError(f"the endpoint's stream broke off: {cause}")
        session.fail_call(call, broken)
        raise broken from error
    yield b"data: [DONE]\n\n"


def _record(session: Session, call: Call, completion: ChatCompletion) -> None:
    """Records the reply under its own id, by which rewards name it.

    Raises:
        EngineError: it is no chat completion; the SDK does not look.
    """
    try:
        choice = completion.choices[0]
        said = choice.message.model_dump(mode="json", exclude_none=True, exclude={"parsed"})
    except (AttributeError, IndexError, TypeError):
        raise EngineError(
            f"the endpoint's reply is no chat completion: {completion!r:.200}"
        ) from None
    reply: Message = {**said, "role": "assistant"}
    generation = Generation(completion_ids=(), rollout_logprobs=(), versions=(), finish_reason=None)
    # Some endpoints give every reply the same id, or none.
    if completion.id and all(i.id != completion.id for i in session.interactions):
        call.id = completion.id
    num_tokens = completion.usage.completion_tokens if completion.usage is not None else 0
    session.complete_call(
        call, generation, reply, choice.finish_reason or "stop", num_reported_tokens=num_tokens
    )


def _refuse(session: Session, call: Call, error: BaseException, api_key: str) -> Response:
    """The endpoint's refusal in its own words, or ours when it gave no answer."""
    error.args = tuple(_hide(a, api_key) if isinstance(a, str) else a for a in error.args)
    if isinstance(error, openai.APIStatusError):
        session.fail_call(call, error)
        return Response(
            _hide(error.response.text, api_key),
            status_code=error.status_code,
            media_type="application/json",
            headers={"x-should-retry": "false"},
        )
    if isinstance(error, openai.APIError):
        error = EngineError(f"the endpoint did not answer: {error}")
    if isinstance(error, EngineError):
        session.fail_call(call, error)
        return refuse(_PROTOCOL, describe_error(error))
    session.fail_call(call, error)
    raise error


def _hide(text: str, api_key: str) -> str:
    """The text without the endpoint's key: what it says is stored, and shown to the agent."""
    return text if len(api_key) < _MIN_SECRET_LENGTH else text.replace(api_key, "***")


def _list_defaults(sampling: Sampling) -> dict[str, Any]:
    """gconfig's sampling where the agent does not say; neutral values are left to the endpoint."""
    defaults: dict[str, Any] = {}
    if sampling.temperature != 1.0:
        defaults["temperature"] = sampling.temperature
    if sampling.top_p != 1.0:
        defaults["top_p"] = sampling.top_p
    return defaults


def _limit_length(body: Mapping[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """The keys that hold a reply to ``max_tokens``: those that the agent uses, if it does."""
    if max_tokens is None:
        return {}
    used = [key for key in _LIMIT_KEYS if key in body] or ["max_completion_tokens"]
    asked = {key: body.get(key, max_tokens) for key in used}
    # What is no number is for the endpoint to refuse.
    return {k: min(v, max_tokens) if isinstance(v, int) else v for k, v in asked.items()}
