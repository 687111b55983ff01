"""Messages to token ids, exactly once: the chat template, and the splice of turns.

A request that continues an earlier turn gets that turn's own prompt and completion ids
and only what is new is tokenized, so the model sees, and the trainer trains, the very
tokens that were sampled. The new text is found by rendering the conversation with a
placeholder in the sampled turn's place: what follows the placeholder is what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_cli.errors import UserInputError
from agentrl_cli.records import Message
from agentrl_cli.tracking.matching import extract_text, parse_arguments
from agentrl_cli.tracking.parsers.choosing import choose_formats
from agentrl_cli.tracking.parsers.formats import ReplyFormats

#: Stands for a sampled turn while rendering. Plain letters: no template escapes them.
PLACEHOLDER = "AGENTRLSAMPLEDTURN"


class TemplateError(UserInputError):
    """The model's chat template refuses these messages."""


@dataclass(frozen=True, slots=True)
class TemplateInputs:
    """What a template gets besides the messages."""

    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: tuple[tuple[str, Any], ...] = ()


class ChatTemplate:
    """A tokenizer's chat template, able to continue what was sampled.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        formats: how the model writes calls and thoughts; None: chosen by the template.
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
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._hidden_ids = _find_hidden_ids(tokenizer, self.formats)

    def render(self, messages: Sequence[Message], inputs: TemplateInputs) -> str:
        """The prompt text, ending where the assistant's turn begins.

        Raises:
            TemplateError: the template's own complaint.
        """
        try:
            return self.tokenizer.apply_chat_template(
                [_to_template_message(m) for m in messages],
                tools=list(inputs.tools) or None,
                add_generation_prompt=True,
                tokenize=False,
                **dict(inputs.template_kwargs),
            )
        except Exception as error:  # a template may raise anything
            raise TemplateError(
                f"the model's chat template cannot render these messages: {error}"
            ) from error

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

    def split_at_last_turn(
        self, skeleton: Sequence[Message], inputs: TemplateInputs
    ) -> tuple[str, str] | None:
        """The texts before and after the last placeholder of a rendered skeleton.

        None when the template does not keep the placeholder, or refuses it.
        """
        try:
            text = self.render(skeleton, inputs)
        except TemplateError:
            return None
        before, found, after = text.rpartition(PLACEHOLDER)
        return (before, after) if found else None

    def join(
        self,
        prompt_ids: tuple[int, ...],
        completion_ids: tuple[int, ...],
        text_after: str,
        finish_reason: str | None,
    ) -> tuple[int, ...]:
        """A sampled turn's own ids, followed by the ids of the text after it.

        The text begins with the template's end of turn: its first token is left out when
        the model sampled an end token itself, and added when it did not (a turn that
        stopped for length or at a stop text).
        """
        after_ids = self.encode(text_after)
        if completion_ids and after_ids:
            sampled_end = finish_reason != "length" and completion_ids[-1] in self._special_ids
            if completion_ids[-1] == after_ids[0] or (
                sampled_end and after_ids[0] in self._special_ids
            ):
                after_ids = after_ids[1:]
        return prompt_ids + completion_ids + after_ids


def _find_hidden_ids(tokenizer: Any, formats: ReplyFormats) -> frozenset[int]:
    """Special tokens that are not part of a reply's text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {i: str(token) for i, token in added.items() if token.special}
    special |= {i: tokenizer.convert_ids_to_tokens(i) for i in tokenizer.all_special_ids}
    shown: set[str] = set()
    if formats.tool_calls is not None:
        if formats.tool_calls.special_texts is None:
            return frozenset()
        shown.update(formats.tool_calls.special_texts)
    if formats.reasoning is not None:
        shown.update((formats.reasoning.syntax.begin, formats.reasoning.syntax.end))
    return frozenset(i for i, text in special.items() if text not in shown)


def make_placeholder() -> Message:
    """The message that stands for a sampled turn while rendering."""
    return {"role": "assistant", "content": PLACEHOLDER}


def _to_template_message(message: Message) -> Message:
    """A message as templates expect it: text content, arguments as objects, no nulls."""
    rendered = {k: v for k, v in message.items() if v is not None}
    rendered["content"] = extract_text(message.get("content"))
    if message["role"] == "developer":
        rendered["role"] = "system"
    if message.get("tool_calls"):
        rendered["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": parse_arguments(call["function"].get("arguments") or "{}"),
                },
            }
            for call in message["tool_calls"]
        ]
    else:
        rendered.pop("tool_calls", None)
    return rendered


def make_template_inputs(
    tools: Sequence[dict[str, Any]], template_kwargs: dict[str, Any]
) -> TemplateInputs:
    """Template inputs that can be compared with those of another request."""
    return TemplateInputs(tuple(tools), tuple(sorted(template_kwargs.items())))
