"""The tokens of one trajectory: ids, texts, log-probabilities, versions and mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.table import Table
from rich.text import Text

from agentrl_cli.errors import UserInputError
from agentrl_cli.inspector.text import clean
from agentrl_cli.records import Interaction, InteractionStatus, Trajectory

Value = TypeVar("Value")

#: Token ids to their text.
Spell = Callable[[int], str]

#: Prompt tokens shown at either end of a long prompt; --json has them all.
_PROMPT_ENDS = 24


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token of a call; prompt tokens have no logprob and no version and are not trained."""

    position: int
    token_id: int
    logprob: float | None
    version: int | None
    trained: bool


def list_tokens(interaction: Interaction) -> list[TokenRow]:
    """The prompt and completion tokens of one call, whatever of them is stored.

    Completion tokens of a completed, not greedy call are trained (in one sample, should
    branches share them); prompt tokens are not: where they were sampled by an earlier
    call, they are trained as that call's completion.
    """
    rows = [TokenRow(p, t, None, None, False) for p, t in enumerate(interaction.prompt_ids)]
    trained = interaction.status is InteractionStatus.COMPLETED and interaction.temperature > 0
    for index, token_id in enumerate(interaction.completion_ids):
        rows.append(
            TokenRow(
                len(interaction.prompt_ids) + index,
                token_id,
                _get(interaction.rollout_logprobs, index),
                _get(interaction.versions, index),
                trained,
            )
        )
    return rows


def build_token_tables(trajectory: Trajectory, spell: Spell | None) -> list[Table]:
    """A table for each call; the middle of long prompts is left out."""
    return [
        _build_table(number, interaction, spell)
        for number, interaction in enumerate(trajectory.interactions, start=1)
    ]


def load_spell(tokenizer_path: str | None, checkpoint: Path | None) -> Spell | None:
    """Spells ids with the tokenizer of a folder; without one named, of the last checkpoint.

    Raises:
        UserInputError: the folder that was named has no tokenizer.
    """
    folder = Path(tokenizer_path) if tokenizer_path is not None else checkpoint
    if folder is None:
        return None
    path = folder / "tokenizer.json"
    if not path.is_file():
        if tokenizer_path is None:
            return None
        problem = "has no tokenizer.json" if folder.is_dir() else "no such folder"
        raise UserInputError(
            f"--tokenizer {tokenizer_path}: {problem}. Allowed: a model folder, such as "
            "RUN/checkpoints/step-000050"
        )
    # Heavy, and wanted by this view alone.
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises plain Exception for a file it cannot read.
        if tokenizer_path is None:
            return None
        raise UserInputError(f"--tokenizer {path}: is no tokenizer: {error}") from None
    return lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)


def _build_table(number: int, interaction: Interaction, spell: Spell | None) -> Table:
    rows = list_tokens(interaction)
    num_prompt = len(interaction.prompt_ids)
    table = Table(
        title=Text(
            f"call {number}  {clean(interaction.id)}  {interaction.status.value}  "
            f"{num_prompt} prompt + {len(interaction.completion_ids)} completion tokens",
            style="bold",
        ),
        title_justify="left",
        box=None,
    )
    for name in ("position", "id", "text", "logprob", "version", "mask"):
        table.add_column(name, justify="left" if name == "text" else "right")
    if not rows:
        table.add_row("", "", "no token ids are stored for this call", "", "", "")
    skipped = range(_PROMPT_ENDS, max(num_prompt - _PROMPT_ENDS, _PROMPT_ENDS))
    for row in rows:
        if row.position in skipped:
            if row.position == skipped.start:
                table.add_row("...", "", f"({len(skipped)} prompt tokens, see --json)", "", "", "")
            continue
        table.add_row(
            str(row.position),
            str(row.token_id),
            Text(clean(spell(row.token_id)).replace("\n", "\\n") if spell else ""),
            "" if row.logprob is None else f"{row.logprob:.4f}",
            "" if row.version is None else str(row.version),
            "trained" if row.trained else "",
            style=None if row.trained else "dim",
        )
    return table


def _get(values: Sequence[Value], index: int) -> Value | None:
    return values[index] if index < len(values) else None
