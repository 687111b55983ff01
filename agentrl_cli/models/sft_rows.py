"""Conversations to token ids, with an exact mask of what the assistant says."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from agentrl_cli.config.import_paths import import_object
from agentrl_cli.config.sft_config import SftDatasetConfig
from agentrl_cli.errors import DatasetError, ModelError, UserInputError
from agentrl_cli.models.chat_templates import REMEDY, mark_conversation

#: Rows whose lengths are compared when batches are made: enough to waste little on padding,
#: few enough to leave the order of a curriculum as it is.
_BATCHES_PER_WINDOW = 8


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """One conversation as tokens."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True = said by the assistant, the token that ends its turn included."""


def load_rows(config: SftDatasetConfig) -> list[Mapping[str, Any]]:
    """The conversations of ``config.path``, each checked for its form.

    Raises:
        DatasetError: nothing there, or a row (numbered from 1) that cannot be used.
        ImportPathError: the function cannot be imported.
    """
    is_file = config.path.endswith(".jsonl")
    rows = _read_jsonl(Path(config.path)) if is_file else _call_function(config)
    rows = rows[: config.limit]
    if not rows:
        raise DatasetError(f"dataset.path: {config.path} has no rows: at least one is needed")
    for number, row in enumerate(rows, start=1):
        _check_row(row, f"{config.path}, row {number}")
    return rows


def encode_conversation(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    where: str,
) -> EncodedRow:
    """The tokens that serving this conversation gives, and which of them are the assistant's.

    The prompt of every assistant turn is rendered as a server would, and what follows it
    up to the end-of-turn token is the turn. Prompt and turn are tokenized apart, as they
    are when the turn is sampled.

    Raises:
        ModelError: the chat template rewrites earlier turns or does not end them, so that
            the assistant's tokens cannot be identified.
    """
    end = str(tokenizer.eos_token)
    text = render_conversation(tokenizer, messages, tools, where)
    pieces: list[tuple[str, bool]] = []
    done = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        place = f"{where}, message {index + 1}"
        prompt = render_conversation(
            tokenizer, messages[:index], tools, place, add_generation_prompt=True
        )
        if not text.startswith(prompt) or len(prompt) < done:
            raise ModelError(
                f"{place}: the chat template renders what comes before this turn differently "
                "once the turn is there (it may strip thinking or tools from earlier turns), so "
                "the assistant's tokens cannot be identified. Split the conversation into rows "
                "that end with this turn, or give the tokenizer a template that only appends"
            )
        stop = text.find(end, len(prompt))
        turn = text[len(prompt) : stop + len(end)]
        said = message.get("content")
        if stop < 0 or (isinstance(said, str) and said.strip() not in turn):
            raise ModelError(
                f"{place}: the chat template does not render this turn as it is, followed by the "
                f"end token {end!r}: found {text[len(prompt) :][:80]!r}. Remove {end!r} (or "
                "thinking that the template strips) from the message, or change the template"
            )
        pieces += [(text[done : len(prompt)], False), (turn, True)]
        done = stop + len(end)
    pieces.append((text[done:], False))
    filled = [(piece, trained) for piece, trained in pieces if piece]
    encoded = tokenizer([piece for piece, _ in filled], add_special_tokens=False)["input_ids"]
    input_ids: list[int] = []
    loss_mask: list[bool] = []
    for (_, trained), ids in zip(filled, encoded, strict=True):
        input_ids += ids
        loss_mask += [trained] * len(ids)
    return EncodedRow(tuple(input_ids), tuple(loss_mask))


def check_tools_shown(
    tokenizer: PreTrainedTokenizerFast, tools: Sequence[Mapping[str, Any]], where: str
) -> None:
    """Refuses a chat template that shows the model no tools: it would learn to call what it never
    hears of.

    Raises:
        ModelError: naming what is not shown, and the remedy.
    """
    marked = mark_conversation([{"role": "user"}], ["text"], [dict(tool) for tool in tools])
    text = render_conversation(tokenizer, marked.messages, marked.tools, where)
    missing = [what for what, role in marked.list_missing(text) if role is None]
    if missing:
        raise ModelError(
            f"{where}: the chat template does not show the model {', '.join(missing)}, so it would "
            f"be trained without. {REMEDY}"
        )


def render_conversation(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    where: str,
    *,
    add_generation_prompt: bool = False,
) -> str:
    """The conversation as the tokenizer's chat template writes it.

    Raises:
        ModelError: the template refuses it.
    """
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise ModelError(
            f"{where}: the chat template cannot render this conversation: {error}. Change the "
            "conversation, or the template of the tokenizer"
        ) from error


def build_batches(
    rows: Sequence[EncodedRow], batch_tokens: int, rng: random.Random | None
) -> Iterator[list[EncodedRow]]:
    """One epoch of batches of rows of similar length; ``rng`` shuffles, None keeps the order.

    A batch holds at most ``batch_tokens`` tokens, padding included, or one row.
    """
    ordered = list(rows)
    if rng is not None:
        rng.shuffle(ordered)
    mean_tokens = sum(len(row.input_ids) for row in ordered) / max(1, len(ordered))
    window = max(1, round(_BATCHES_PER_WINDOW * batch_tokens / max(1.0, mean_tokens)))
    for first in range(0, len(ordered), window):
        batches: list[list[EncodedRow]] = []
        width = 0
        # Equal for rows whose lengths differ by less than a fifth: among them rows stay mixed.
        # Batches sorted by exact length would consist of copies of one question, and their
        # gradients would say little about the rest.
        for row in sorted(
            ordered[first : first + window],
            key=lambda row: math.floor(4.0 * math.log2(max(1, len(row.input_ids)))),
        ):
            width = max(width, len(row.input_ids))
            if not batches or width * (len(batches[-1]) + 1) > batch_tokens:
                batches.append([])
                width = len(row.input_ids)
            batches[-1].append(row)
        if rng is not None:
            rng.shuffle(batches)
        yield from batches


def _read_jsonl(path: Path) -> list[Mapping[str, Any]]:
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is a folder, a pipe or a device")
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(
            f"dataset.path: {path} cannot be read: {error}. Give a .jsonl file, or "
            "module:function of a function that returns rows"
        ) from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{path}:{number}: not a line of JSON: {error}") from None
    return rows


def _call_function(config: SftDatasetConfig) -> list[Mapping[str, Any]]:
    build = import_object(config.path, "dataset.path")
    try:
        return list(build(**config.kwargs))
    except UserInputError:
        raise
    except Exception as error:
        raise DatasetError(
            f"dataset.path: {config.path}, called with dataset.kwargs {config.kwargs}, gave no "
            f"list of rows: {type(error).__name__}: {error}. Give module:function of a function "
            "that returns rows, or a .jsonl file"
        ) from error


def _check_row(row: Any, where: str) -> None:
    """Refuses what is no conversation, or one in which the assistant says nothing."""
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except (ValueError, RecursionError) as error:
        raise DatasetError(
            f"{where} is no text of UTF-8: {error}. A row may hold no half of a surrogate pair "
            "(such as \\ud83d), and is nested a few levels deep"
        ) from None
    row_or_nothing = row if isinstance(row, Mapping) else {}
    messages, tools = row_or_nothing.get("messages"), row_or_nothing.get("tools") or []
    if (
        not isinstance(messages, Sequence)
        or not messages
        or not all(isinstance(one, Mapping) and "role" in one for one in messages)
        or not all(isinstance(tool, Mapping) for tool in tools)
    ):
        raise DatasetError(
            f"{where}: found {str(row)[:200]}; a row is "
            '{"messages": [{"role": ..., "content": ...}, ...], "tools": [{...}, ...]}, '
            "with at least one message; tools may be left out"
        )
    if not any(message["role"] == "assistant" for message in messages):
        raise DatasetError(f"{where}: no message has the role assistant: nothing to learn here")
