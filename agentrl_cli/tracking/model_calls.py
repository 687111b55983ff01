"""Runs a checked request on the engine: sample, record, write the reply, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from agentrl_cli.engine.protocol import Generation, InferenceEngine, join_pieces
from agentrl_cli.records import Interaction
from agentrl_cli.tracking.formats.call_scanner import ParsedText
from agentrl_cli.tracking.protocols.model_request import (
    ModelRequest,
    Problem,
    build_assistant_message,
)
from agentrl_cli.tracking.replay import Reply
from agentrl_cli.tracking.reply_text import ReplyReader
from agentrl_cli.tracking.session import OpenCall, Session
from agentrl_cli.tracking.template import ChatTemplate

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Choice:
    """One completed choice of a reply."""

    index: int
    interaction: Interaction
    generation: Generation


class StreamWriter(Protocol):
    """Writes the events of one streamed reply; nothing where there is nothing to say yet."""

    def begin_choice(self, index: int) -> bytes:
        """The first tokens of a choice came."""
        ...

    def write(self, index: int, parsed: ParsedText, generation: Generation | None) -> bytes:
        """What a choice got, with the tokens; None: text held back until no more could come."""
        ...

    def end_choice(self, choice: Choice) -> bytes:
        """A choice is on record."""
        ...

    def end(self) -> bytes:
        """All choices have ended."""
        ...

    def fail(self, problem: Problem) -> bytes:
        """The stream breaks off."""
        ...


@dataclass(frozen=True, slots=True)
class ModelCalls:
    """The calls of one request: one for each choice."""

    engine: InferenceEngine
    template: ChatTemplate
    session: Session
    request: ModelRequest
    calls: Sequence[OpenCall]

    @property
    def id(self) -> str:
        """What the reply is called on the wire."""
        return self.calls[0].id

    @property
    def created(self) -> int:
        """Unix time of arrival, in whole seconds."""
        return int(self.calls[0].started_at)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that every choice continues."""
        return len(self.calls[0].plan.prompt_ids)

    async def complete(self) -> list[Choice]:
        """All choices, recorded together: of a reply that is never given, none is.

        Raises:
            EngineError: a choice failed; the others are cancelled.
        """
        try:
            generations = await _run_all([self._generate(call) for call in self.calls])
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

    async def stream(self, writer: StreamWriter, reply: Reply) -> None:
        """Writes text as soon as it is certain; each choice ends with its record.

        A choice is recorded before its end is written: clients hang up right after it.
        """
        try:
            await _run_all(
                [self._stream(index, call, writer, reply) for index, call in enumerate(self.calls)]
            )
        except BaseException as error:
            self._fail_rest(error)
            raise
        await reply.add(writer.end())

    async def _generate(self, call: OpenCall) -> Generation:
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

    def open_reader(self, call: OpenCall) -> ReplyReader:
        """A reader of what the call samples."""
        return ReplyReader(
            self.template,
            # Not those of the call's own sampling: the end of a single call is part of it.
            self.request.sampling.stop,
            self.request.parse_tools,
            tools=self.request.inputs.tools,
            prompt_ids=call.plan.prompt_ids,
        )

    async def _stream(self, index: int, call: OpenCall, writer: StreamWriter, reply: Reply) -> None:
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
                        await reply.add(writer.begin_choice(index))
                    pieces.append(generation)
                    parsed = reader.feed(generation.completion_ids)
                    whole.add(parsed)
                    await reply.add(writer.write(index, parsed, generation))
            rest = reader.finish()
            whole.add(rest)
            await reply.add(writer.write(index, rest, None))
        except BaseException as error:
            self.session.fail_call(call, error)
            raise
        choice = self._record(index, call, join_pieces(pieces), whole)
        await reply.add(writer.end_choice(choice))

    def _record(
        self, index: int, call: OpenCall, generation: Generation, parsed: ParsedText
    ) -> Choice:
        finish_reason = "tool_calls" if parsed.tool_calls else generation.finish_reason or "stop"
        message = build_assistant_message(parsed.content, parsed.tool_calls, parsed.reasoning)
        interaction = self.session.complete_call(call, generation, message, finish_reason)
        return Choice(index, interaction, generation)


async def _run_all(works: list[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """What all return; when one fails, the others are cancelled."""
    if len(works) == 1:
        # Nearly every request asks for one choice, which needs no task of its own.
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
