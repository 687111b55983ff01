"""Runs a checked request on the engine: sample, read, record, write the reply, whole or streamed.

Sampled tokens become the text, reasoning and tool calls of a reply, and what APIs report of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

from tokenizers.decoders import DecodeStream

from agentrl_cli.engine.protocol import Generation, InferenceEngine, join_pieces
from agentrl_cli.log import get_logger
from agentrl_cli.records import Interaction, Message
from agentrl_cli.tracking.formats.call_scanner import ParsedText
from agentrl_cli.tracking.formats.reply_formats import ReasoningParser, ReplyContext, TextParser
from agentrl_cli.tracking.protocols.model_request import (
    ModelRequest,
    Problem,
    build_assistant_message,
)
from agentrl_cli.tracking.replay import Reply
from agentrl_cli.tracking.session import OpenCall, Session
from agentrl_cli.tracking.structured_output import warn_of_invalid
from agentrl_cli.tracking.template import ChatTemplate

ResultT = TypeVar("ResultT")

_log = get_logger(__name__)


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

    def write(self, index: int, parsed: ParsedText, generation: Generation | None) -> bytes:
        """What a choice got, with the tokens; None: text held back until no more could come."""

    def end_choice(self, choice: Choice) -> bytes:
        """A choice is on record."""

    def end(self) -> bytes:
        """All choices have ended."""

    def fail(self, problem: Problem) -> bytes:
        """The stream breaks off."""


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
        return self.calls[0].asked.id

    @property
    def created(self) -> int:
        """Unix time of arrival, in whole seconds."""
        return int(self.calls[0].asked.started_at)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that every choice continues."""
        return len(self.calls[0].plan.prompt_ids)

    async def complete(self) -> list[Choice]:
        """All choices, recorded together: of a reply that is never given, none is.

        Raises:
            EngineError: a choice failed; the others are cancelled.
        """
        with self._recording_failure():
            generations = await _run_all([self._generate(call) for call in self.calls])
            parsed = [
                self.open_reader(call).read(generation.completion_ids)
                for call, generation in zip(self.calls, generations, strict=True)
            ]
        return [self._record(n, generations[n], parsed[n]) for n in range(len(self.calls))]

    async def stream(self, writer: StreamWriter, reply: Reply) -> None:
        """Writes text as soon as it is certain; each choice ends with its record.

        A choice is recorded before its end is written: clients hang up right after it.
        """
        with self._recording_failure():
            await _run_all([self._stream(n, writer, reply) for n in range(len(self.calls))])
        reply.add(writer.end())

    @contextmanager
    def _recording_failure(self) -> Iterator[None]:
        """Puts on record what no reply will hold, and what never got to run."""
        try:
            yield
        except BaseException as error:
            for call in self.calls:
                self.session.fail_call(call, error)
            raise

    def open_reader(self, call: OpenCall) -> ReplyReader:
        """A reader of what the call samples."""
        return ReplyReader(self.template, self.request, call.plan.prompt_ids)

    async def _generate(self, call: OpenCall) -> Generation:
        return self.session.take_finished_turn(call) or await self.engine.generate(
            call.plan.prompt_ids, call.sampling, session_id=self.session.id
        )

    def _open_stream(self, call: OpenCall) -> AsyncGenerator[Generation]:
        finished = self.session.take_finished_turn(call)
        if finished is not None:
            return _yield_one(finished)
        ids, sampling = call.plan.prompt_ids, call.sampling
        return self.engine.stream(ids, sampling, session_id=self.session.id)  # type: ignore[return-value]

    async def _stream(self, index: int, writer: StreamWriter, reply: Reply) -> None:
        call = self.calls[index]
        reader = self.open_reader(call)
        whole = ParsedText()
        pieces: list[Generation] = []
        async with aclosing(self._open_stream(call)) as generations:
            async for generation in generations:
                if not pieces:
                    reply.add(writer.begin_choice(index))
                pieces.append(generation)
                parsed = reader.feed(generation.completion_ids)
                whole.add(parsed)
                reply.add(writer.write(index, parsed, generation))
        rest = reader.finish()
        whole.add(rest)
        reply.add(writer.write(index, rest, None))
        choice = self._record(index, join_pieces(pieces), whole)
        reply.add(writer.end_choice(choice))

    def _record(self, index: int, generation: Generation, parsed: ParsedText) -> Choice:
        call = self.calls[index]
        finish_reason: str = generation.finish_reason or "stop"
        # A reply that was cut off stays one, also where a call in it is complete.
        if parsed.tool_calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        message = build_assistant_message(parsed.content, parsed.tool_calls, parsed.reasoning)
        if call.sampling.structural_tag is not None and finish_reason != "length":
            warn_of_invalid(self.request, message)
        interaction = self.session.complete_call(
            *(call, generation, message, finish_reason),
            has_malformed_call=parsed.has_malformed_call,
        )
        return Choice(index, interaction, generation)


async def _yield_one(generation: Generation) -> AsyncGenerator[Generation]:
    yield generation


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


class ReplyReader:
    """Reads one reply; the result does not depend on the pieces in which it came.

    Args:
        template: whose tokenizer decodes, and whose formats are read.
        request: whose stop texts end the reply; not those of the sampling under its rules: the end
            of a single call is part of it.
        prompt_ids: what the reply continues: it may end inside reasoning.
    """

    def __init__(
        self, template: ChatTemplate, request: ModelRequest, prompt_ids: Sequence[int]
    ) -> None:
        self._template = template
        self._stop = request.sampling.stop
        self._parser = _build_parser(template, request, prompt_ids)
        self._decoder: DecodeStream | None = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._num_decoded = 0
        self._held = ""
        self._stopped = False

    def feed(self, completion_ids: Sequence[int]) -> ParsedText:
        """What further tokens add."""
        shown = self._template.select_shown(completion_ids)
        self._ids += shown
        text = self._decode(shown)
        self._num_decoded += len(text)
        return self._parse(self._pass_before_stop(text))

    def finish(self) -> ParsedText:
        """What was held back, when no more tokens will come."""
        # An incomplete character appears only when the whole text is decoded.
        rest = self._template.decode_all(self._ids)[self._num_decoded :]
        parsed = self._parse(self._pass_before_stop(rest) + self._held)
        if self._parser is not None:
            parsed.add(self._parser.finish())
        return parsed

    def read(self, completion_ids: Sequence[int]) -> ParsedText:
        """All of a reply at once."""
        parsed = self.feed(completion_ids)
        parsed.add(self.finish())
        return parsed

    def _parse(self, text: str) -> ParsedText:
        return self._parser.feed(text) if self._parser is not None else ParsedText(text)

    def _decode(self, token_ids: list[int]) -> str:
        text = ""
        # A run of bytes is decoded as one: what its first ones are depends on the last.
        one_by_one = [[token_id] for token_id in token_ids]
        for part in one_by_one if self._template.decodes_in_runs else filter(None, [token_ids]):
            if self._decoder is None:
                break
            try:
                text += self._decoder.step(self._template.tokenizer.backend_tokenizer, part) or ""
            except Exception as error:  # of the tokenizers library, which has no class of its own
                _log.debug("the reply is decoded at its end: %s", error)
                self._decoder = None
        return text

    def _pass_before_stop(self, text: str) -> str:
        """The text that is certain not to belong to a stop text."""
        if self._stopped:
            return ""
        text, self._held = self._held + text, ""
        if not self._stop:
            return text
        starts = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if starts:
            self._stopped = True
            return text[: min(starts)]
        longest = max(len(stop) for stop in self._stop) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                self._held = text[-length:]
                return text[:-length]
        return text


def _build_parser(
    template: ChatTemplate, request: ModelRequest, prompt_ids: Sequence[int]
) -> TextParser | None:
    formats = template.formats
    calls, reasoning = formats.tool_calls, formats.reasoning
    prompt_end = template.decode_prompt_end(prompt_ids)
    is_inside = reasoning is not None and reasoning.is_inside(prompt_end)
    parser = None
    # Without tools, text that looks like a call is text.
    if calls is not None and (request.parse_tools or calls.reads_reasoning):
        tools = request.inputs.tools if request.parse_tools else ()
        left = "" if is_inside else prompt_end
        parser = calls.build_parser(ReplyContext(tools=tools, prompt_end=left))
    if reasoning is None:
        return parser
    return ReasoningParser(reasoning, is_inside=is_inside, answer=parser)


def format_token_logprobs(template: ChatTemplate, generation: Generation) -> list[dict[str, Any]]:
    """One object for each sampled token, the end token included; nats.

    Both of OpenAI's APIs write them so.
    """
    # Empty unless they were asked for.
    top = generation.top_logprobs or ((),) * len(generation.completion_ids)
    return [
        {
            **_format_token(template, token_id, logprob),
            "top_logprobs": [_format_token(template, *other) for other in others],
        }
        for token_id, logprob, others in zip(
            generation.completion_ids, generation.rollout_logprobs, top, strict=True
        )
    ]


class TextLogprobs:
    """The logprobs of a reply's text alone: not of its reasoning, its calls and their markers.

    Args:
        template: whose tokens they are.
        reader: a new one of that reply.
    """

    def __init__(self, template: ChatTemplate, reader: ReplyReader) -> None:
        self._template = template
        self._reader = reader
        self._end_ids = frozenset(template.tokenizer.all_special_ids)
        self._held: list[dict[str, Any]] = []
        """Of tokens that are not known to be text yet."""

    def feed(self, generation: Generation) -> list[dict[str, Any]]:
        """Those of what further tokens add to the text."""
        logprobs = []
        reported = format_token_logprobs(self._template, generation)
        # One by one: a token counts as text if it yields text.
        for token_id, report in zip(generation.completion_ids, reported, strict=True):
            if token_id not in self._end_ids:
                self._held.append(report)
            logprobs += self._take(self._reader.feed((token_id,)))
        return logprobs

    def finish(self) -> list[dict[str, Any]]:
        """Those of text that was held back until the end."""
        return self._take(self._reader.finish())

    def _take(self, parsed: ParsedText) -> list[dict[str, Any]]:
        if not (parsed.content or parsed.reasoning or parsed.tool_calls):
            return []
        held, self._held = self._held, []
        num_bytes = len(parsed.content.encode())
        first = len(held)
        # What stands before the text is a marker, such as the end of the reasoning.
        while num_bytes > 0 and first > 0:
            first -= 1
            num_bytes -= len(held[first]["bytes"])
        return held[first:]


def count_reasoning_tokens(
    template: ChatTemplate, generation: Generation, reply: Message | None
) -> int:
    """How many tokens were sampled until a reply's reasoning was complete; 0 without any."""
    text = (reply or {}).get("reasoning_content") or ""
    if not text:
        return 0
    completion_ids = generation.completion_ids
    low, high = 0, len(completion_ids)
    while low < high:
        middle = (low + high) // 2
        if text in template.decode_all(template.select_shown(completion_ids[:middle])):
            high = middle
        else:
            low = middle + 1
    return low


def _format_token(template: ChatTemplate, token_id: int, logprob: float) -> dict[str, Any]:
    spelled = _spell(template, token_id)
    return {
        "token": spelled.decode("utf-8", "replace"),
        "logprob": logprob,
        "bytes": list(spelled),
    }


def _spell(template: ChatTemplate, token_id: int) -> bytes:
    """The bytes of one token, which need not be whole characters."""
    tokenizer = template.tokenizer
    token = tokenizer.convert_ids_to_tokens(token_id)
    table = _build_byte_table()
    if (
        token is not None
        and token not in tokenizer.get_added_vocab()
        and "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        and all(character in table for character in token)
    ):
        return bytes(table[character] for character in token)
    return tokenizer.decode([token_id]).encode("utf-8", "replace")


@cache
def _build_byte_table() -> Mapping[str, int]:
    """The byte that each character of a byte-level vocabulary stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
