"""A gateway to an endpoint elsewhere: calls are passed on as they are, and recorded.

There are no token ids, so nothing of it can be trained on; it serves to evaluate the
same agent on another model.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import openai
from openai import AsyncOpenAI, AsyncStream
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentrl_cli.engine.protocol import Generation, Sampling
from agentrl_cli.errors import EngineError
from agentrl_cli.records import Message
from agentrl_cli.tracking.gateway import BaseGateway, WireProtocol
from agentrl_cli.tracking.message_meaning import list_own_keys
from agentrl_cli.tracking.protocols.chat import ChatProtocol, format_event, parse_conversation
from agentrl_cli.tracking.replay import Reply
from agentrl_cli.tracking.session import OpenCall, Session
from agentrl_cli.tracking.template import ChatTemplate, TemplateInputs, make_template_inputs
from agentrl_cli.tracking.tree import ConversationTree

#: What the endpoint speaks is passed on as it is.
_PROTOCOL = ChatProtocol()
_LIMIT_KEYS = ("max_tokens", "max_completion_tokens")
#: Shorter ones (EMPTY, none) are not secret, and may occur in any message.
_MIN_SECRET_LENGTH = 8


class _NoTemplate(ChatTemplate):
    """Stands where a chat template would: the endpoint builds the prompt itself."""

    def __init__(self) -> None:
        """Needs no tokenizer."""

    def render(self, messages: Any, inputs: TemplateInputs, is_prompt: bool = True) -> str:
        return ""

    def encode(self, text: str) -> tuple[int, ...]:
        return ()

    def find_unread(
        self, messages: Sequence[Message], position: int, inputs: TemplateInputs
    ) -> tuple[str, ...]:
        return tuple(list_own_keys(messages[position]))

    def render_tail(self, *_: Any) -> None:
        return None

    def split_at_last_turn(self, skeleton: Any, inputs: TemplateInputs) -> None:
        return None


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
        """A tree without tokens: calls are linked by their messages alone."""
        return ConversationTree(_NoTemplate())

    async def close(self) -> None:
        """Closes the connections to the endpoint too."""
        await super().close()
        await self._upstream.close()

    async def answer(
        self, protocol: WireProtocol, body: dict[str, Any], session: Session, reply: Reply
    ) -> None:
        """Passes on the endpoint's own reply."""
        messages, tools = parse_conversation(body)
        sampling = Sampling(max_tokens=session.sampling.max_tokens)
        await session.wait_for_tokens(sampling, 1)
        [call] = session.begin_calls(
            f"call-{uuid.uuid4().hex}", messages, make_template_inputs(tools, {}), sampling, 1
        )
        given = {key: value for key, value in body.items() if value is not None}
        body = {**_list_defaults(session.sampling), **given, "model": self.model_name}
        body |= _limit_length(body, call.sampling.max_tokens)
        try:
            if body.get("stream"):
                await self._stream(session, call, body, reply)
                return
            completion = await self._upstream.post(
                "/chat/completions", body=body, cast_to=ChatCompletion
            )
            _record(session, call, completion)
            reply.set_body(completion.model_dump(mode="json", exclude_unset=True))
        except BaseException as error:
            self._refuse(session, call, error, reply)

    async def _stream(
        self, session: Session, call: OpenCall, body: dict[str, Any], reply: Reply
    ) -> None:
        stream = await self._upstream.post(
            "/chat/completions",
            body=body,
            cast_to=ChatCompletion,
            stream=True,
            stream_cls=AsyncStream[ChatCompletionChunk],
        )
        reply.begin_stream(lambda problem: format_event(_PROTOCOL.format_error(problem)))
        state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
        try:
            async with stream:
                async for chunk in stream:
                    state.handle_chunk(chunk)
                    data = chunk.model_dump_json(exclude_unset=True)
                    reply.add(f"data: {data}\n\n".encode())
            # Before the last event is written: clients hang up right after it.
            _record(session, call, state.get_final_completion())
        except Exception as error:  # the SDK asserts what it expects of a stream
            cause = f"{type(error).__name__}: {error}"
            raise EngineError(f"the endpoint's stream broke off: {cause}") from error
        reply.add(b"data: [DONE]\n\n")

    def _refuse(self, session: Session, call: OpenCall, error: BaseException, reply: Reply) -> None:
        """The endpoint's refusal in its own words; raises where it gave no answer."""
        error.args = tuple(self._hide(a) if isinstance(a, str) else a for a in error.args)
        if isinstance(error, openai.APIStatusError):
            session.fail_call(call, error)
            text = self._hide(error.response.text).encode()
            reply.set_body(text, error.status_code, {"x-should-retry": "false"})
            return
        if isinstance(error, openai.APIError):
            error = EngineError(f"the endpoint did not answer: {error}")
        session.fail_call(call, error)
        raise error

    def _hide(self, text: str) -> str:
        """The text without the endpoint's key: what it says is stored, and shown to the agent."""
        key = self._upstream.api_key
        return text if len(key) < _MIN_SECRET_LENGTH else text.replace(key, "***")


def _record(session: Session, call: OpenCall, completion: ChatCompletion) -> None:
    """Records the reply under its own id, by which rewards name it.

    Raises:
        EngineError: it is not a chat completion; the SDK does not check.
    """
    try:
        choice = completion.choices[0]
        said = choice.message.model_dump(mode="json", exclude_none=True, exclude={"parsed"})
    except (AttributeError, IndexError, TypeError):
        raise EngineError(
            f"the endpoint's reply is not a chat completion: {completion!r:.200}"
        ) from None
    reply: Message = {**said, "role": "assistant"}
    generation = Generation(completion_ids=(), rollout_logprobs=(), versions=(), finish_reason=None)
    # Some endpoints give every reply the same id, or none.
    if completion.id and all(i.id != completion.id for i in session.interactions):
        call.asked = replace(call.asked, id=completion.id)
    num_tokens = completion.usage.completion_tokens if completion.usage is not None else 0
    session.complete_call(
        call, generation, reply, choice.finish_reason or "stop", num_reported_tokens=num_tokens
    )


def _list_defaults(sampling: Sampling) -> dict[str, Any]:
    """gconfig's sampling where the agent does not say; neutral values are left to the endpoint."""
    values = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    return {key: value for key, value in values.items() if value != 1.0}


def _limit_length(body: Mapping[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """The keys that hold a reply to ``max_tokens``: those that the agent uses, if it does."""
    if max_tokens is None:
        return {}
    used = [key for key in _LIMIT_KEYS if key in body] or ["max_completion_tokens"]
    asked = {key: body.get(key, max_tokens) for key in used}
    # The endpoint refuses what is not a number.
    return {k: min(v, max_tokens) if isinstance(v, int) else v for k, v in asked.items()}
