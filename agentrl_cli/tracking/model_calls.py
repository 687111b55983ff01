"""Runs a checked request on the engine: sample, record, hand out, whole or piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from agentrl_cli.engine.protocol import Generation, InferenceEngine
from agentrl_cli.records import Interaction, Message
from agentrl_cli.tracking.model_request import ModelRequest
from agentrl_cli.tracking.reply_text import ReplyReader
from agentrl_cli.tracking.session import Call, Session
from agentrl_cli.tracking.template import ChatTemplate
from agentrl_cli.tracking.tool_calls import ParsedText


@dataclass(frozen=True, slots=True)
class Piece:
    """What a choice of a streamed reply got."""

    index: int
    parsed: ParsedText
    """What is new; nothing in the first piece, which says that the choice began."""
    generation: Generation | None
    """The tokens that came; None: text that was held back until no more tokens could come."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One completed choice of a reply."""

    index: int
    interaction: Interaction
    generation: Generation


@dataclass(frozen=True, slots=True)
class ModelCalls:
    """The calls of one request: one for each choice."""

    engine: InferenceEngine
    template: ChatTemplate
    session: Session
    request: ModelRequest
    calls: Sequence[Call]

    @property
    def id(self) -> str:
        """What the reply is called on the wire."""
        return self.calls[0].id

    @property
    def started_at(self) -> float:
        """Unix time of arrival, seconds."""
        return self.calls[0].started_at

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that every choice continues."""
        return len(self.calls[0].plan.prompt_ids)

    async def complete(self) -> list[Choice]:
        """All choices, recorded together: of a reply that is never given, none is.

        Raises:
            EngineError: a choice failed; the others are cancelled.
        """
        works = [self._generate(call) for call in self.calls]
        try:
            # Nearly every request asks for one choice, which needs no task of its own.
            generations = [await works[0]] if len(works) == 1 else await _gather(works)
            parsed = [
                self.open_reader(call).read(generation.completion_ids)
                for call, generation in zip(self.calls, generations, strict=True)
            ]
        except BaseException as error:
            self._fail_rest(error)
            raise
        return [
            self._record(index, call, generations[index], parsed[index])
            for index, call in enumerate(self.calls)
        ]

    async def stream(self) -> AsyncGenerator[Piece | Choice]:
        """Text as soon as it is certain; each choice ends with its record.

        A choice is recorded before it is yielded: clients hang up right after the end.
        """
        streams = [self._stream(index, call) for index, call in enumerate(self.calls)]
        merged = streams[0] if len(streams) == 1 else _merge(streams)
        try:
            async with aclosing(merged):
                async for item in merged:
                    yield item
        except BaseException as error:
            self._fail_rest(error)
            raise

    async def _generate(self, call: Call) -> Generation:
        try:
            return await self.engine.generate(
                call.plan.prompt_ids, call.sampling, session_id=self.session.id
            )
        except BaseException as error:
            self.session.fail_call(call, error)
            raise

    def _fail_rest(self, error: BaseException) -> None:
        """Puts on record what no reply will hold, and what never got to run."""
        for call in self.calls:
            self.session.fail_call(call, error)

    def open_reader(self, call: Call) -> ReplyReader:
        """A reader of what the call samples."""
        return ReplyReader(
            self.template,
            # Not those of the call's own sampling: the end of a single call is part of it.
            self.request.sampling.stop,
            self.request.parse_tools,
            tools=self.request.inputs.tools,
            prompt_ids=call.plan.prompt_ids,
        )

    async def _stream(self, index: int, call: Call) -> AsyncGenerator[Piece | Choice]:
        reader = self.open_reader(call)
        whole = ParsedText()
        pieces: list[Generation] = []
        try:
            stream = self.engine.stream(
                call.plan.prompt_ids, call.sampling, session_id=self.session.id
            )
            async with aclosing(stream) as generations:  # type: ignore[type-var]
                async for generation in generations:
                    if not pieces:
                        yield Piece(index, ParsedText(), None)
                    pieces.append(generation)
                    parsed = reader.feed(generation.completion_ids)
                    whole.add(parsed)
                    yield Piece(index, parsed, generation)
            rest = reader.finish()
            whole.add(rest)
            yield Piece(index, rest, None)
        except BaseException as error:
            self.session.fail_call(call, error)
            raise
        yield self._record(index, call, _join(pieces), whole)

    def _record(self, index: int, call: Call, generation: Generation, parsed: ParsedText) -> Choice:
        finish_reason = "tool_calls" if parsed.tool_calls else generation.finish_reason or "stop"
        interaction = self.session.complete_call(
            call, generation, build_reply(parsed), finish_reason
        )
        return Choice(index, interaction, generation)


def build_reply(parsed: ParsedText) -> Message:
    """The assistant message of a completion, as chat completions write it."""
    content = parsed.content or (None if parsed.tool_calls else "")
    reply: Message = {"role": "assistant", "content": content}
    if parsed.tool_calls:
        reply["tool_calls"] = parsed.tool_calls
    if parsed.reasoning:
        reply["reasoning_content"] = parsed.reasoning
    return reply


def _join(pieces: list[Generation]) -> Generation:
    last = pieces[-1]
    return Generation(
        completion_ids=tuple(t for p in pieces for t in p.completion_ids),
        rollout_logprobs=tuple(x for p in pieces for x in p.rollout_logprobs),
        versions=tuple(v for p in pieces for v in p.versions),
        finish_reason=last.finish_reason,
        stop_text=last.stop_text,
        top_logprobs=tuple(t for p in pieces for t in p.top_logprobs),
    )


async def _gather(works: list[Coroutine[Any, Any, Generation]]) -> list[Generation]:
    """What all return; when one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _merge(
    streams: Sequence[AsyncIterator[Piece | Choice]],
) -> AsyncGenerator[Piece | Choice]:
    """What all streams yield, as it comes; when one fails, the others are cancelled."""
    queue: asyncio.Queue[Piece | Choice | BaseException | None] = asyncio.Queue()

    async def run(stream: AsyncIterator[Piece | Choice]) -> None:
        try:
            async with aclosing(stream):  # type: ignore[type-var]
                async for item in stream:
                    queue.put_nowait(item)
            queue.put_nowait(None)
        except BaseException as error:
            queue.put_nowait(error)
            raise

    tasks = [asyncio.ensure_future(run(stream)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
