"""Runs a checked chat request: sample, record, answer, streamed or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any

from agentrl_cli.engine.protocol import Generation, InferenceEngine
from agentrl_cli.records import Interaction
from agentrl_cli.tracking.chat_reply import (
    build_reply,
    format_choice,
    format_chunk,
    format_completion,
    format_delta,
    format_logprobs,
    format_usage,
)
from agentrl_cli.tracking.chat_request import ChatRequest
from agentrl_cli.tracking.reply_text import ReplyReader, read_reply
from agentrl_cli.tracking.session import Call, Session
from agentrl_cli.tracking.template import ChatTemplate
from agentrl_cli.tracking.tool_calls import ParsedText

#: The record of one choice, and its log-probabilities as they are answered, if asked for.
_Choice = tuple[Interaction, dict[str, Any] | None]


async def complete_chat(
    engine: InferenceEngine,
    template: ChatTemplate,
    session: Session,
    request: ChatRequest,
    calls: list[Call],
) -> dict[str, Any]:
    """The body of the reply, all choices recorded.

    Raises:
        EngineError: a choice failed; the others are cancelled.
    """
    works = [_complete_call(engine, template, session, request, call) for call in calls]
    # Nearly every request asks for one choice, which needs no task of its own.
    choices = [await works[0]] if len(works) == 1 else await _gather_choices(works)
    num_completion_tokens = sum(len(i.completion_ids) for i, _ in choices)
    return format_completion(
        calls[0].id,
        int(calls[0].started_at),
        engine.model_name,
        [
            format_choice(index, interaction.reply or {}, interaction.finish_reason or "", logprobs)
            for index, (interaction, logprobs) in enumerate(choices)
        ],
        format_usage(len(calls[0].plan.prompt_ids), num_completion_tokens),
    )


async def _gather_choices(works: list[Coroutine[Any, Any, _Choice]]) -> list[_Choice]:
    """What all return; when one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _complete_call(
    engine: InferenceEngine,
    template: ChatTemplate,
    session: Session,
    request: ChatRequest,
    call: Call,
) -> _Choice:
    try:
        generation = await engine.generate(
            call.plan.prompt_ids, call.sampling, session_id=session.id
        )
    except BaseException as error:
        session.fail_call(call, error)
        raise
    parsed = read_reply(template, generation, call.sampling.stop, request.parse_tools)
    interaction = _record(session, call, generation, parsed)
    return interaction, format_logprobs(template, generation) if request.logprobs else None


def _record(
    session: Session, call: Call, generation: Generation, parsed: ParsedText
) -> Interaction:
    finish_reason = "tool_calls" if parsed.tool_calls else generation.finish_reason or "stop"
    reply = build_reply(parsed.content, parsed.tool_calls)
    return session.complete_call(call, generation, reply, finish_reason)


async def stream_chat(
    engine: InferenceEngine,
    template: ChatTemplate,
    session: Session,
    request: ChatRequest,
    calls: list[Call],
) -> AsyncIterator[bytes]:
    """Server-sent events, a token's text as soon as it is certain.

    Every choice is recorded before its last event is written: clients hang up right
    after the end.
    """
    created = int(time.time())
    queue: asyncio.Queue[list[dict[str, Any]] | BaseException | None] = asyncio.Queue()
    interactions: list[Interaction] = []

    async def run(index: int, call: Call) -> None:
        try:
            source = _stream_call(engine, template, session, request, index, call)
            async with aclosing(source) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Interaction):
                        interactions.append(piece)
                    else:
                        queue.put_nowait(piece)
            queue.put_nowait(None)
        except BaseException as error:
            queue.put_nowait(error)
            raise

    tasks = [asyncio.ensure_future(run(i, call)) for i, call in enumerate(calls)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield format_chunk(calls[0].id, created, engine.model_name, item)
        if request.include_usage:
            num_tokens = sum(len(i.completion_ids) for i in interactions)
            usage = format_usage(len(calls[0].plan.prompt_ids), num_tokens)
            yield format_chunk(calls[0].id, created, engine.model_name, [], usage)
        yield b"data: [DONE]\n\n"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stream_call(
    engine: InferenceEngine,
    template: ChatTemplate,
    session: Session,
    request: ChatRequest,
    index: int,
    call: Call,
) -> AsyncGenerator[list[dict[str, Any]] | Interaction, None]:
    """The deltas of one choice, then its record, then its last delta."""
    reader = ReplyReader(template, call.sampling.stop, request.parse_tools)
    whole = ParsedText()
    pieces: list[Generation] = []
    first_delta: dict[str, Any] = {"role": "assistant", "content": ""}
    try:
        stream = engine.stream(call.plan.prompt_ids, call.sampling, session_id=session.id)
        async with aclosing(stream) as generations:  # type: ignore[type-var]
            async for piece in generations:
                if not pieces:
                    yield [format_delta(index, first_delta)]
                pieces.append(piece)
                logprobs = format_logprobs(template, piece) if request.logprobs else None
                deltas = _build_deltas(whole, reader.feed(piece.completion_ids))
                if logprobs is not None and not deltas:
                    deltas = [{}]
                for delta in deltas:
                    yield [format_delta(index, delta, None, logprobs)]
                    logprobs = None
        for delta in _build_deltas(whole, reader.finish()):
            yield [format_delta(index, delta)]
    except BaseException as error:
        session.fail_call(call, error)
        raise
    interaction = _record(session, call, _join_pieces(pieces), whole)
    yield interaction
    yield [format_delta(index, {}, interaction.finish_reason)]


def _build_deltas(whole: ParsedText, parsed: ParsedText) -> list[dict[str, Any]]:
    """What a piece adds, as deltas; adds it to ``whole`` too."""
    deltas: list[dict[str, Any]] = []
    if parsed.content:
        deltas.append({"content": parsed.content})
    for call in parsed.tool_calls:
        number = len(whole.tool_calls) + len(deltas) - bool(parsed.content)
        deltas.append({"tool_calls": [{"index": number, **call}]})
    whole.content += parsed.content
    whole.tool_calls.extend(parsed.tool_calls)
    return deltas


def _join_pieces(pieces: list[Generation]) -> Generation:
    last = pieces[-1]
    return Generation(
        completion_ids=tuple(t for p in pieces for t in p.completion_ids),
        rollout_logprobs=tuple(x for p in pieces for x in p.rollout_logprobs),
        versions=tuple(v for p in pieces for v in p.versions),
        finish_reason=last.finish_reason,
        stop_text=last.stop_text,
    )
