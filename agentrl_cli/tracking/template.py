"""Messages to token ids, exactly once: the chat template, and the splice of turns.

A request that continues an earlier turn gets that turn's own prompt and completion ids
and only what is new is tokenized, so the model sees, and the trainer trains, the very
tokens that were sampled. The new text is found by rendering the conversation with a
placeholder in the sampled turn's place: what follows the placeholder is what is new.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentrl_cli.errors import UserInputError
from agentrl_cli.records import Message
from agentrl_cli.tracking.formats.call_scanner import make_encodable
from agentrl_cli.tracking.formats.format_choice import choose_formats, collect_template_text
from agentrl_cli.tracking.formats.reply_formats import ReplyFormats
from agentrl_cli.tracking.tail_rendering import Tail, TailTemplate

#: Stand for a sampled turn, and between messages, while rendering. Plain letters: no template
#: escapes them. Others in every process: in no text that an agent sends, be it this file, may they
#: be found.
PLACEHOLDER, _MESSAGE_MARK = (
    "AGENTRL" + "".join(secrets.choice(string.ascii_uppercase) for _ in range(24)) for _ in range(2)
)
#: Under which a placeholder keeps the reply that it stands for.
_SAMPLED_KEY = f"{PLACEHOLDER}REPLY"
_PROMPT_END_TOKENS = 64
#: Also where the opening tag was in the prompt.
_REASONING = re.compile(r"<think>.*?</think>\s*|^.*?</think>\s*", re.DOTALL)
#: Keys under which reasoning comes back; the first is the canonical one.
_REASONING_KEYS = ("reasoning_content", "reasoning")


class TemplateError(UserInputError):
    """The model's chat template refuses these messages."""


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


class ChatTemplate:
    """A tokenizer's chat template, able to continue what was sampled.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        formats: how the model writes calls and reasoning; None: chosen by the template.
    """

    def __init__(self, tokenizer: Any, formats: ReplyFormats | None = None) -> None:
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
        self._wants_text = False
        self._tail_templates: dict[str, TailTemplate | None] = {}
        self._reasoning_key = _find_reasoning_key(collect_template_text(tokenizer.chat_template))

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
                [_to_template_message(m, self._reasoning_key, wants_text) for m in messages],
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
        shown = forms.list_forms(messages, self._reasoning_key, self._wants_text)
        given = {**self.tokenizer.special_tokens_map, **dict(inputs.template_kwargs)}
        given |= {"tools": tools, "documents": None, "add_generation_prompt": is_prompt}
        tail = template.render(shown, min(num_last, len(shown)), **given)
        return tail and Tail(tuple(map(make_encodable, tail.texts)), tail.state)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of template text; special tokens in it become special ids."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def select_shown(self, completion_ids: Sequence[int]) -> list[int]:
        """Sampled tokens without the special ones that mean nothing to the formats."""
        return [token_id for token_id in completion_ids if token_id not in self._hidden_ids]

    def decode_reply(self, completion_ids: Sequence[int]) -> str:
        """The text of a completion, without its end token."""
        return self.decode_all(self.select_shown(completion_ids))

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

    def _split_at_last_reply(
        self, skeleton: Sequence[Message], inputs: TemplateInputs
    ) -> SplitPrompt | None:
        """As :meth:`split_at_last_turn`, with the replies in the placeholders' places."""
        last = max(i for i, message in enumerate(skeleton) if _SAMPLED_KEY in message)
        messages = [message.get(_SAMPLED_KEY, message) for message in skeleton]
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
        shown.update(formats.tool_calls.special_texts)
    if formats.reasoning is not None:
        shown.update((formats.reasoning.begin, formats.reasoning.end))
    return frozenset(i for i, text in special.items() if text not in shown)


def make_placeholder(reply: Message | None) -> Message:
    """The message that stands for a sampled turn while rendering, and what was sampled."""
    bare = write_reasoning(reply or {"role": "assistant", "content": ""}, "")
    return {"role": "assistant", "content": PLACEHOLDER, _SAMPLED_KEY: bare}


def _find_reasoning_key(template: str) -> str | None:
    """Where a template looks for reasoning; None: in the content."""
    if "reasoning_content" in template:
        return "reasoning_content"
    for key in ("thinking", "reasoning"):
        if re.search(rf"\.{key}\b|\[['\"]{key}['\"]\]", template):
            return key
    return None


class TemplateForms:
    """Messages as templates expect them, each made once."""

    def __init__(self) -> None:
        #: By the message's address, which no other has while it is held beside its form.
        self._known: dict[bool, dict[int, tuple[Message, Message]]] = {False: {}, True: {}}

    def list_forms(
        self, messages: Iterable[Message], reasoning_key: str | None, wants_text: bool
    ) -> list[Message]:
        """The forms of ``messages``; one that is its own form already is not copied."""
        known, forms = self._known[wants_text], []
        for message in messages:
            found = known.get(id(message))
            if found is None:
                form = _to_template_message(message, reasoning_key, wants_text)
                found = (message, message if form == message else form)
                known[id(message)] = found
            forms.append(found[1])
        return forms


def _to_template_message(message: Message, reasoning_key: str | None, wants_text: bool) -> Message:
    """A message as templates expect it: text content, no nulls, and arguments as objects, or as
    JSON text with ``wants_text``."""
    rendered = {k: v for k, v in message.items() if v is not None and k != _SAMPLED_KEY}
    rendered["content"] = extract_text(message.get("content"))
    if message["role"] == "assistant":
        rendered = _place_reasoning(rendered, reasoning_key)
    if message["role"] == "developer":
        rendered["role"] = "system"
    if message.get("tool_calls"):
        rendered["tool_calls"] = [
            {**call, "function": _to_template_function(call["function"], wants_text)}
            for call in message["tool_calls"]
        ]
    else:
        rendered.pop("tool_calls", None)
    return rendered


def _to_template_function(function: dict[str, Any], wants_text: bool) -> dict[str, Any]:
    arguments = parse_arguments(function.get("arguments") or "{}")
    if wants_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": arguments}


def _place_reasoning(message: Message, key: str | None) -> Message:
    """The assistant message with its reasoning where the template looks for it."""
    reasoning = extract_reasoning(message)
    # Inside the content every template that knows of reasoning finds it itself.
    if not reasoning or "</think>" in message["content"]:
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


def extract_text(content: Any) -> str:
    """The text of a message's ``content``: null, a string, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)


def extract_reasoning(message: Message) -> str:
    """The reasoning of an assistant message, from a key of its own or inside the content.

    Empty: it has none, or came back without it.
    """
    for key in _REASONING_KEYS:
        reasoning = message.get(key)
        if isinstance(reasoning, str) and reasoning.strip():
            return reasoning.strip()
    head, found, _ = extract_text(message.get("content")).partition("</think>")
    return head.strip().removeprefix("<think>").strip() if found else ""


def holds_reasoning_in_content(message: Message) -> bool:
    """Whether an assistant message has its reasoning between tags in its content."""
    return "</think>" in extract_text(message.get("content"))


def extract_answer(message: Message) -> str:
    """The text of an assistant message without its reasoning."""
    text = extract_text(message.get("content"))
    if "</think>" in text and not any(message.get(key) for key in _REASONING_KEYS):
        return _REASONING.sub("", text).lstrip()
    return text.lstrip()


def write_reasoning(message: Message, reasoning: str) -> Message:
    """The assistant message with ``reasoning``, in the canonical form."""
    bare = {key: value for key, value in message.items() if key not in _REASONING_KEYS}
    bare["content"] = extract_answer(message)
    return {**bare, _REASONING_KEYS[0]: reasoning} if reasoning else bare


def parse_arguments(arguments: Any, **options: Any) -> Any:
    """Tool arguments as JSON data; text that is not JSON stays text.

    ``options``: as ``json.loads`` has them.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments, **options)
    except (ValueError, RecursionError):
        # Brackets nested without end are no arguments either.
        return arguments
