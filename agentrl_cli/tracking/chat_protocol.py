"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from agentrl_cli.engine.protocol import Generation
from agentrl_cli.tracking.chat_reply import (
    format_choice,
    format_chunk,
    format_completion,
    format_delta,
    format_error,
    format_event,
    format_usage,
)
from agentrl_cli.tracking.chat_request import parse_chat_request
from agentrl_cli.tracking.model_calls import Choice, ModelCalls, Piece
from agentrl_cli.tracking.model_request import ModelRequest
from agentrl_cli.tracking.session import Session
from agentrl_cli.tracking.token_report import count_tokens_until, format_token_logprobs
from agentrl_cli.tracking.wire import Problem


class ChatProtocol:
    """OpenAI's chat completions; see :class:`~agentrl_cli.tracking.wire.WireProtocol`."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"

    def parse(self, body: dict[str, Any], session: Session) -> ModelRequest:
        """The request; see :func:`parse_chat_request`."""
        return parse_chat_request(body, session.sampling)

    def format_reply(self, calls: ModelCalls, choices: Sequence[Choice]) -> dict[str, Any]:
        """A ``chat.completion``."""
        return format_completion(
            calls.id,
            int(calls.started_at),
            calls.engine.model_name,
            [self._format_choice(calls, choice) for choice in choices],
            _format_usage(calls, choices),
        )

    def _format_choice(self, calls: ModelCalls, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if calls.request.logprobs:
            logprobs = _format_logprobs(calls, choice.generation)
        interaction = choice.interaction
        return format_choice(
            choice.index, interaction.reply or {}, interaction.finish_reason or "", logprobs
        )

    async def stream_events(self, calls: ModelCalls) -> AsyncGenerator[bytes]:
        """``chat.completion.chunk`` events, and the end mark."""
        writer = _ChunkWriter(calls)
        choices: list[Choice] = []
        async with aclosing(calls.stream()) as items:
            async for item in items:
                if isinstance(item, Choice):
                    choices.append(item)
                    yield writer.write_end(item)
                    continue
                for chunk in writer.write_piece(item):
                    yield chunk
        if calls.request.include_usage:
            yield writer.write([], _format_usage(calls, choices))
        yield b"data: [DONE]\n\n"

    def format_error(self, problem: Problem) -> dict[str, Any]:
        """OpenAI's error object."""
        return format_error(problem.message, problem.kind, param=problem.param, code=problem.code)

    def format_stream_error(self, problem: Problem, num_events: int) -> bytes:
        """The same as an event."""
        return format_event(self.format_error(problem))


class _ChunkWriter:
    """Writes the chunks of one streamed reply."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls
        self._num_tool_calls: dict[int, int] = {}

    def write_piece(self, piece: Piece) -> list[bytes]:
        """The chunks for what a choice got; none where nothing can be shown yet."""
        index = piece.index
        if index not in self._num_tool_calls:
            self._num_tool_calls[index] = 0
            return [self.write([format_delta(index, {"role": "assistant", "content": ""})])]
        logprobs = None
        if self._calls.request.logprobs and piece.generation is not None:
            logprobs = _format_logprobs(self._calls, piece.generation)
        deltas = self._build_deltas(piece)
        if logprobs is not None and not deltas:
            deltas = [{}]
        chunks = []
        for delta in deltas:
            chunks.append(self.write([format_delta(index, delta, None, logprobs)]))
            logprobs = None
        return chunks

    def write_end(self, choice: Choice) -> bytes:
        """The last chunk of a choice."""
        return self.write([format_delta(choice.index, {}, choice.interaction.finish_reason)])

    def write(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        """One chunk; where usage is asked for, all but the last say null."""
        calls = self._calls
        said = {"usage": usage} if calls.request.include_usage else {}
        chunk = format_chunk(
            calls.id, int(calls.started_at), calls.engine.model_name, choices, **said
        )
        return format_event(chunk)

    def _build_deltas(self, piece: Piece) -> list[dict[str, Any]]:
        parsed = piece.parsed
        deltas: list[dict[str, Any]] = []
        if parsed.reasoning:
            deltas.append({"reasoning_content": parsed.reasoning})
        if parsed.content:
            deltas.append({"content": parsed.content})
        for call in parsed.tool_calls:
            number = self._num_tool_calls[piece.index]
            self._num_tool_calls[piece.index] += 1
            deltas.append({"tool_calls": [{"index": number, **call}]})
        return deltas


def _format_logprobs(calls: ModelCalls, generation: Generation) -> dict[str, Any]:
    return {"content": format_token_logprobs(calls.template, generation), "refusal": None}


def _format_usage(calls: ModelCalls, choices: Sequence[Choice]) -> dict[str, Any]:
    num_reasoning_tokens = sum(
        count_tokens_until(
            calls.template,
            choice.generation.completion_ids,
            (choice.interaction.reply or {}).get("reasoning_content") or "",
        )
        for choice in choices
    )
    num_tokens = sum(len(choice.generation.completion_ids) for choice in choices)
    return format_usage(calls.num_prompt_tokens, num_tokens, num_reasoning_tokens)
