"""Messages to token ids, exactly once: the chat template, and the splice of turns.

A request that continues an earlier turn gets that turn's own prompt and completion ids
and only what is new is tokenized, so the model sees, and the trainer trains, the very
tokens that were sampled. The new text is found by rendering the conversation with a
placeholder in the sampled turn's place: what follows the placeholder is what is new.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import string
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from agentrl_cli.errors import ContextLengthError, UserInputError
from agentrl_cli.models.chat_templates import REMEDY, MarkedConversation, mark_conversation
from agentrl_cli.records import Message, SharedSequence
from agentrl_cli.tracking.formats.call_scanner import REASONING_MARKS, make_encodable
from agentrl_cli.tracking.formats.format_choice import choose_formats, collect_template_text
from agentrl_cli.tracking.formats.reply_formats import ReplyFormats
from agentrl_cli.tracking.message_meaning import (
    MessageHistory,
    describe_turn,
    extract_answer,
    extract_reasoning,
    extract_text,
    holds_reasoning_in_content,
    list_own_keys,
    parse_arguments,
    write_json,
    write_reasoning,
)
from agentrl_cli.tracking.tail_rendering import Tail, TailTemplate, TemplateForms

ResultT = TypeVar("ResultT")

#: Stand for a sampled turn, and between messages, while rendering. Plain letters: no template
#: escapes them. Others in every process: in no text that an agent sends, be it this file, may they
#: be found.
PLACEHOLDER, _MESSAGE_MARK = (
    "AGENTRL" + "".join(secrets.choice(string.ascii_uppercase) for _ in range(24)) for _ in range(2)
)
#: Under which a placeholder keeps the reply that it stands for.
_SAMPLED_KEY = f"{PLACEHOLDER}REPLY"
_PROMPT_END_TOKENS = 64
#: How many answers to "does the template read this?" are kept: agents may send ever new values.
_MAX_READ_KEYS = 1000
#: A text that takes a core some ms to tokenize; longer ones are not for the event loop.
_MAX_CHARS_AT_ONCE = 16 * 2**10


#: What every template must show.
PLAIN_CONVERSATION: tuple[Message, ...] = ({"role": "user", "content": "text"},)
#: Tells whether a template reads content as parts alone, before anything is rendered with it.
_REPLIED_CONVERSATION = (
    *PLAIN_CONVERSATION, {"role": "assistant", "content": "text"}, *PLAIN_CONVERSATION
)  # fmt: skip


class TemplateError(UserInputError):
    """The model's chat template refuses these messages."""


class LongTextError(Exception):
    """The text, its one argument, is to be tokenized elsewhere than on the event loop."""


class UnshownInputError(TemplateError):
    """The model's chat template does not show what an agent sends, whatever the model does."""


@dataclass(frozen=True, slots=True)
class SplitPrompt:
    """A rendered prompt, split around its last sampled turn."""

    before: str
    after: str
    """Begins with the template's end of turn."""
    text: str
    """The whole prompt, which later prompts are compared with."""


@dataclass(frozen=True, slots=True)
class TemplateInputs:
    """What a template gets besides the messages."""

    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: tuple[tuple[str, Any], ...] = ()

    @property
    def case(self) -> Hashable:
        """Equal for inputs with which a template reads the same keys of messages."""
        return bool(self.tools), str(self.template_kwargs)


_NO_INPUTS = TemplateInputs()


class ChatTemplate:
    """A tokenizer's chat template, able to continue what was sampled.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        formats: how the model writes calls and reasoning; None: chosen by the template.
        max_model_len: of the engine: what cannot fit is not tokenized. None: no limit.
    """

    def __init__(
        self, tokenizer: Any, formats: ReplyFormats | None = None, max_model_len: int | None = None
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserInputError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template, "
                "so messages cannot become a prompt. Use the tokenizer of an instruct model "
                "(tokenizer_path=...), or add chat_template.jinja to the model's folder"
            )
        self.tokenizer = tokenizer
        self.formats = formats if formats is not None else choose_formats(tokenizer)
        self._end_ids = frozenset(tokenizer.all_special_ids)
        self._special_tokens = _list_special_tokens(tokenizer)
        self._hidden_ids = _find_hidden_ids(self._special_tokens, self.formats)
        # A run of bytes is decoded as one: what its first ones are depends on the last.
        decoder = tokenizer.backend_tokenizer.decoder
        self.decodes_in_runs = decoder is not None and b"ByteFallback" in decoder.__getstate__()
        self._backend = _find_backend(tokenizer)
        self._max_model_len = max_model_len
        #: Of the texts of one request that were tokenized elsewhere; None: all are tokenized here.
        self._encoded: dict[str, tuple[int, ...]] | None = None
        self._wants_text = False
        self._text = collect_template_text(tokenizer.chat_template)
        self._reasoning_key = _find_reasoning_key(self._text)
        self._read_keys: dict[tuple[Any, ...], bool] = {}
        self._separators: dict[str, str] = {}
        self._part_roles: frozenset[str] = frozenset()
        self._shown_kinds: set[Hashable] = set()
        self._tail_templates: dict[str, TailTemplate | None] = {}

    def render(
        self, messages: Sequence[Message], inputs: TemplateInputs, is_prompt: bool = True
    ) -> str:
        """The text of the messages; of a prompt, it ends where the assistant's turn begins.

        Raises:
            TemplateError: the template's own complaint.
        """
        try:
            return self._apply(messages, inputs, is_prompt, wants_text=self._wants_text)
        except TemplateError as error:
            if not any(message.get("tool_calls") for message in messages):
                raise
            # Most templates expect arguments as objects; DeepSeek's concatenate them as text.
            wants_text = not self._wants_text
            try:
                text = self._apply(messages, inputs, is_prompt, wants_text=wants_text)
            except TemplateError:
                raise error from error.__cause__
        self._wants_text = wants_text
        return text

    def _apply(
        self, messages: Sequence[Message], inputs: TemplateInputs, is_prompt: bool, wants_text: bool
    ) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                [self._to_template_message(m, wants_text) for m in messages],
                tools=list(inputs.tools) or None,
                add_generation_prompt=is_prompt,
                tokenize=False,
                **dict(inputs.template_kwargs),
            )
        except Exception as error:  # a template may raise anything
            raise TemplateError(
                f"the model's chat template cannot render these messages: {error}"
            ) from error
        return make_encodable(text)

    def _to_template_message(self, message: Message, wants_text: bool) -> Message:
        """A message as templates expect it: text content, or one part with it, no nulls, and
        calls in OpenAI's form, their arguments as objects, or as JSON text with ``wants_text``."""
        rendered = {k: v for k, v in message.items() if v is not None and k != _SAMPLED_KEY}
        rendered["content"] = self._join_parts(message)
        if message["role"] == "assistant":
            rendered = _place_reasoning(rendered, self._reasoning_key)
        if message["role"] == "developer":
            rendered["role"] = "system"
        calls = rendered.pop("tool_calls", None)
        if calls:
            rendered["tool_calls"] = [_to_template_call(call, wants_text) for call in calls]
        if rendered["role"] in self._part_roles:
            rendered["content"] = [{"type": "text", "text": rendered["content"]}]
        return rendered

    def _join_parts(self, message: Message) -> str:
        """The text of a message, its parts joined as vLLM has them joined: by the template where
        it shows parts, else by line breaks; those of a tool's result always by line breaks."""
        content, role = message.get("content"), message["role"]
        if role == "tool" or not isinstance(content, list) or len(content) < 2:
            return extract_text(content, "\n")
        if role not in self._separators:
            self._separators[role] = self._find_separator(role)
        return extract_text(content, self._separators[role])

    def _find_separator(self, role: str) -> str:
        """What the template puts between the parts of a message."""
        marks = [f"{PLACEHOLDER}PART{number}X" for number in range(2)]
        parts = [{"type": "text", "text": mark} for mark in marks]
        question = [] if role == "user" else [{"role": "user", "content": "x"}]
        shown = {"role": "system" if role == "developer" else role, "content": parts}
        messages = [*question, shown] if role == "assistant" else [shown, *question]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # a template may raise anything: this one takes no parts
            return "\n"
        found = re.fullmatch(f".*{marks[0]}(.*){marks[1]}.*", text, re.DOTALL)
        # A template that takes content for text may write the list itself.
        return found[1] if found and "type" not in found[1] else "\n"

    def find_unread(
        self, messages: Sequence[Message], position: int, inputs: TemplateInputs
    ) -> tuple[str, ...]:
        """The keys of a framework's own in a message that this template does not read.

        A key is read if the prompt is another one without it.

        Raises:
            TemplateError: of messages that the template refuses this is not known.
        """
        keys = list_own_keys(messages[position])
        return tuple(key for key in keys if not self._reads(messages, position, key, inputs))

    def _reads(
        self, messages: Sequence[Message], position: int, key: str, inputs: TemplateInputs
    ) -> bool:
        message = messages[position]
        # A key that the template does not name is read if it writes messages as a whole, which
        # depends neither on the key nor on its value.
        value = write_json([key, message[key]]) if key in self._text else ""
        case = (message["role"], bool(message.get("tool_calls")), inputs.case, value)
        if case not in self._read_keys:
            bare = {k: v for k, v in message.items() if k != key}
            without = [*messages[:position], bare, *messages[position + 1 :]]
            is_read = self.render(messages, inputs) != self.render(without, inputs)
            if len(self._read_keys) >= _MAX_READ_KEYS:
                self._read_keys.clear()
            self._read_keys[case] = is_read
        return self._read_keys[case]

    def check_shown(self, messages: Sequence[Message], inputs: TemplateInputs = _NO_INPUTS) -> None:
        """Returns if the template shows the model all that a request sends.

        The first request of each kind is rendered with marks in place of its texts and tools. One
        with tools is rendered as it will go on, too, so that what is wrong shows at once and not
        when the model first calls one. Content that the template reads as parts alone is given to
        it so, as vLLM does.

        Raises:
            UnshownInputError: naming what is not shown, and the remedy.
        """
        kind = _find_kind(messages, inputs)
        if kind in self._shown_kinds:
            return
        if not self._shown_kinds:
            with suppress(TemplateError):
                self._find_unshown(_REPLIED_CONVERSATION, _NO_INPUTS)
        try:
            unshown = self._find_unshown(messages, inputs)
        except TemplateError as error:
            if any(message["role"] == "assistant" for message in messages):
                # What the model said may have led there: a failure of this call alone.
                return
            raise UnshownInputError(f"{error}. {REMEDY}") from error
        if unshown:
            name = getattr(self.tokenizer, "name_or_path", "")
            raise UnshownInputError(
                f"the chat template of {name!r} does not show the model all that the agent sends: "
                f"{', '.join(unshown)} would be lost in silence, and the model would be trained "
                f"without. {REMEDY}"
            )
        self._shown_kinds.add(kind)

    def _find_unshown(self, messages: Sequence[Message], inputs: TemplateInputs) -> list[str]:
        """What of the messages and tools the template leaves out, in words.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        texts = [extract_text(message.get("content")) for message in messages]
        marked = mark_conversation(messages, texts, inputs.tools)
        missing = self._find_missing(marked, inputs)
        if marked.tools and messages[-1]["role"] != "assistant":
            # A template may want another role in between: then nothing is known of calls.
            with suppress(TemplateError):
                missing += self._find_missing(marked.with_call(), inputs)
        return list(dict.fromkeys(what for what, _ in missing))

    def _find_missing(
        self, marked: MarkedConversation, inputs: TemplateInputs
    ) -> list[tuple[str, str | None]]:
        """What the template leaves out; it gets parts from now on where that shows more."""
        inputs = replace(inputs, tools=marked.tools)
        as_text = self._part_roles
        refusal: TemplateError | None = None
        missing: list[tuple[str, str | None]] = []
        try:
            missing = marked.list_missing(self.render(marked.messages, inputs))
            unread = {role for _, role in missing if role}
        except TemplateError as error:
            refusal, unread = error, {message["role"] for message in marked.messages}
        unread = {"system" if role == "developer" else role for role in unread}
        if not unread <= as_text:
            self._part_roles = as_text | unread
            with suppress(TemplateError):
                left = marked.list_missing(self.render(marked.messages, inputs))
                if refusal is not None or len(left) < len(missing):
                    return left
            self._part_roles = as_text
        if refusal is not None:
            raise refusal
        return missing

    def render_tail(
        self,
        messages: Sequence[Message],
        num_last: int,
        inputs: TemplateInputs,
        forms: TemplateForms,
        is_prompt: bool = True,
    ) -> Tail | None:
        """The end of what :meth:`render` gives, made without the messages before it.

        None: of this template, or of these messages, only the whole tells the end.
        """
        tools = list(inputs.tools) or None
        source = self.tokenizer.get_chat_template(None, tools)
        if source not in self._tail_templates:
            self._tail_templates[source] = TailTemplate.build(source, _MESSAGE_MARK)
        template = self._tail_templates[source]
        if template is None:
            return None
        shape = (self._wants_text, self._part_roles)
        make = partial(self._to_template_message, wants_text=self._wants_text)
        shown = forms.list_forms(messages, shape, make)
        given = {**self.tokenizer.special_tokens_map, **dict(inputs.template_kwargs)}
        given |= {"tools": tools, "documents": None, "add_generation_prompt": is_prompt}
        tail = template.render(shown, min(num_last, len(shown)), **given)
        return tail and Tail(tuple(map(make_encodable, tail.texts)), (shape, tail.state))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of template text; special tokens in it become special ids.

        Raises:
            ContextLengthError: were all its tokens as long as the longest, there were too many.
            LongTextError: inside of :meth:`plan_beside`, which tokenizes it.
        """
        if self._max_model_len is not None:
            at_least = len(text) // self._max_token_chars
            if at_least > self._max_model_len:
                raise ContextLengthError(at_least, self._max_model_len, counted="at least")
        if self._encoded is None or len(text) <= _MAX_CHARS_AT_ONCE:
            return self._encode_now(text)
        if text not in self._encoded:
            raise LongTextError(text)
        return self._encoded[text]

    async def plan_beside(
        self, plan: Callable[[], ResultT], wait: Callable[[], Awaitable[None]] | None = None
    ) -> ResultT:
        """What ``plan`` returns; long texts that it tokenizes do not hold up the event loop.

        Args:
            plan: called again after each of them, so it must not change what it depends on.
            wait: awaited before each call, for what ``plan`` must find in place.
        """
        encoded: dict[str, tuple[int, ...]] = {}
        while True:
            if wait is not None:
                await wait()
            self._encoded = encoded
            try:
                return plan()
            except LongTextError as long:
                [text] = long.args
            finally:
                self._encoded = None
            encoded[text] = await asyncio.to_thread(self._encode_now, text)

    @cached_property
    def _max_token_chars(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()))

    def _encode_now(self, text: str) -> tuple[int, ...]:
        backend = self._backend
        # Whoever else uses the tokenizer may have left it padding or truncating.
        if backend is not None and backend.padding is None and backend.truncation is None:
            if len(text) <= _MAX_CHARS_AT_ONCE:
                return tuple(backend.encode(text, add_special_tokens=False).ids)
            # Of a batch alone the tokenizer lets other threads run meanwhile.
            return tuple(backend.encode_batch([text], add_special_tokens=False)[0].ids)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def select_shown(self, completion_ids: Sequence[int]) -> list[int]:
        """Sampled tokens without the special ones that mean nothing to the formats."""
        return [token_id for token_id in completion_ids if token_id not in self._hidden_ids]

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def decode_prompt_end(self, prompt_ids: Sequence[int]) -> str:
        """Enough of a prompt's end to see whether reasoning begins there."""
        return self.decode_all(prompt_ids[-_PROMPT_END_TOKENS:])

    def split_at_last_turn(
        self, skeleton: Sequence[Message], inputs: TemplateInputs
    ) -> SplitPrompt | None:
        """The texts before and after the last placeholder of a rendered skeleton.

        None when the template keeps no placeholder and no turn's own text, or refuses both.
        """
        try:
            text = self.render(skeleton, inputs)
        except TemplateError:
            # Some want to see the calls that tool messages answer.
            return self._split_at_last_reply(skeleton, inputs)
        before, found, after = text.rpartition(PLACEHOLDER)
        return SplitPrompt(before, after, text) if found else None

    def render_skeleton(
        self, skeleton: Sequence[Message], inputs: TemplateInputs, is_prompt: bool = True
    ) -> str:
        """The text of a skeleton that :meth:`split_at_last_turn` could split."""
        try:
            return self.render(skeleton, inputs, is_prompt)
        except TemplateError:
            return self.render(_show_replies(skeleton), inputs, is_prompt)

    def _split_at_last_reply(
        self, skeleton: Sequence[Message], inputs: TemplateInputs
    ) -> SplitPrompt | None:
        """As :meth:`split_at_last_turn`, with the replies in the placeholders' places."""
        last = max(i for i, message in enumerate(skeleton) if _SAMPLED_KEY in message)
        messages = _show_replies(skeleton)
        try:
            before = self.render(messages[:last], inputs)
            closed = self.render(messages[: last + 1], inputs, is_prompt=False)
            text = self.render(messages, inputs)
        except TemplateError:
            return None
        if not text.startswith(closed):
            return None
        ends = [closed.rfind(token) for token in self._special_tokens.values()]
        end = max((at for at in ends if at >= len(before)), default=len(closed))
        return SplitPrompt(before, text[end:], text)

    def encode_after(
        self, completion_ids: Sequence[int], text_after: str, finish_reason: str | None
    ) -> tuple[int, ...]:
        """The ids that follow a sampled turn's own, of the text after it.

        The text begins with the template's end of turn: it is left out when the model sampled
        an end token itself, and added when it did not (a turn that stopped for length or at a
        stop text).
        """
        after_ids = self.encode(text_after)
        last = completion_ids[-1] if completion_ids else None
        if last in after_ids[:1]:
            after_ids = after_ids[1:]
        elif finish_reason != "length" and last in self._end_ids and self._closes_turns:
            after_ids = self._drop_end(after_ids)
        return after_ids

    def _drop_end(self, after_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The ids without the first special token, and white space before it."""
        for position, token_id in enumerate(after_ids):
            if token_id in self._special_tokens:
                return after_ids[position + 1 :]
            if self.decode_all([token_id]).strip():
                break
        return after_ids

    @cached_property
    def _closes_turns(self) -> bool:
        """Whether a turn ends in a special token of its own, rather than in that which begins the
        next message: that one says who speaks, also after another end than it."""
        turn = [{"role": "user", "content": "x"}, make_placeholder(None)]
        try:
            end = self.render(turn, TemplateInputs(), is_prompt=False).rpartition(PLACEHOLDER)[2]
        except TemplateError:
            return True
        return any(token in end for token in self._special_tokens.values())


def _list_special_tokens(tokenizer: Any) -> dict[int, str]:
    """All special tokens by id, also those that are no named one such as ``eos_token``."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {i: str(token) for i, token in added.items() if token.special}
    return special | {i: tokenizer.convert_ids_to_tokens(i) for i in tokenizer.all_special_ids}


def _find_hidden_ids(special: dict[int, str], formats: ReplyFormats) -> frozenset[int]:
    """Special tokens that are not part of a reply's text."""
    shown: set[str] = set()
    if formats.tool_calls is not None:
        if formats.tool_calls.special_texts is None:
            return frozenset()
        # Where nobody parts the reasoning, the reader of calls has to see where it is.
        marks = (*REASONING_MARKS, *REASONING_MARKS.values())
        shown.update((*formats.tool_calls.special_texts, *marks))
    if formats.reasoning is not None:
        shown.update((formats.reasoning.begin, formats.reasoning.end))
    return frozenset(i for i, text in special.items() if text not in shown)


def _find_backend(tokenizer: Any) -> Any:
    """The Rust tokenizer beneath one that adds nothing to it, else None.

    Calling it directly takes a third of the time for the few tokens of a tool's result.
    """
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    encode = getattr(type(tokenizer), "_encode_plus", None)
    is_plain = encode is TokenizersBackend._encode_plus and not tokenizer.split_special_tokens
    return tokenizer.backend_tokenizer if is_plain else None


def make_placeholder(reply: Message | None) -> Message:
    """The message that stands for a sampled turn while rendering, and what was sampled."""
    bare = write_reasoning(reply or {"role": "assistant", "content": ""}, "")
    return {"role": "assistant", "content": PLACEHOLDER, _SAMPLED_KEY: bare}


def _show_replies(skeleton: Sequence[Message]) -> list[Message]:
    """The messages with the replies in the placeholders' places."""
    return [message.get(_SAMPLED_KEY, message) for message in skeleton]


def _find_kind(messages: Sequence[Message], inputs: TemplateInputs) -> Hashable:
    """Equal for requests that a template treats alike: by who speaks after whom, and how."""
    known = messages.parent if isinstance(messages, SharedSequence) else None
    history = known if isinstance(known, MessageHistory) else MessageHistory()
    turns, turn = history.turns, history.turn
    for message in messages[len(history) :]:
        before, turn = turn, describe_turn(message)
        turns |= {(before, turn)}
    keys = tuple(key for key, _ in inputs.template_kwargs)
    return turns, turn, min(len(inputs.tools), 2), keys


def _find_reasoning_key(template: str) -> str | None:
    """Where a template looks for reasoning; None: in the content."""
    if "reasoning_content" in template:
        return "reasoning_content"
    for key in ("thinking", "reasoning"):
        if re.search(rf"\.{key}\b|\[['\"]{key}['\"]\]", template):
            return key
    return None


def _to_template_call(call: dict[str, Any], wants_text: bool) -> dict[str, Any]:
    """Without what an SDK adds (``index``, ``parsed_arguments``): some templates write calls as
    they are."""
    function = call["function"]
    arguments = parse_arguments(function.get("arguments") or "{}")
    if wants_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    named = {"id": call["id"]} if call.get("id") is not None else {}
    function = {"name": function.get("name"), "arguments": arguments}
    return {**named, "type": "function", "function": function}


def _place_reasoning(message: Message, key: str | None) -> Message:
    """The assistant message with its reasoning where the template looks for it."""
    reasoning = extract_reasoning(message)
    # Inside the content every template that knows of reasoning finds it itself.
    if not reasoning or holds_reasoning_in_content(message):
        return message
    placed = write_reasoning(message, "")
    if key is not None:
        return {**placed, key: reasoning}
    return {**placed, "content": f"<think>\n{reasoning}\n</think>\n\n{extract_answer(message)}"}


def make_template_inputs(
    tools: Sequence[dict[str, Any]], template_kwargs: dict[str, Any]
) -> TemplateInputs:
    """Template inputs that can be compared with those of another request."""
    return TemplateInputs(tuple(tools), tuple(sorted(template_kwargs.items())))
