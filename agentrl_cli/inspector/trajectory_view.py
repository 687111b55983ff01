"""One trajectory: its conversation tree, and the tokens of its calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import eq
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from agentrl_cli.errors import UserInputError
from agentrl_cli.inspector.safe_text import (
    format_message,
    format_number,
    format_versions,
    one_line,
)
from agentrl_cli.inspector.trajectory_query import Source
from agentrl_cli.log import clean, format_count
from agentrl_cli.prefix_mismatches import (
    PrefixMismatch,
    find_prefix_mismatches,
    format_mismatch_cost,
)
from agentrl_cli.records import (
    Interaction,
    InteractionStatus,
    Trajectory,
    find_new_messages,
)
from agentrl_cli.scores import compute_group_statistics, compute_score
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.trajectory_file import ProximalLogprobs, find_matches, read_trajectory

#: In the metadata of rendered text: the id of the call that it shows.
CALL_ID = "call_id"


def build_tree(trajectory: Trajectory, title: str) -> Tree:
    """The conversations of a trajectory: turns in order, a branch where the tree forks."""
    tree = Tree(_format_head(trajectory, title), guide_style="dim")
    task = {k: v for k, v in trajectory.task.items() if v is not None}
    for name, value in task.items():
        tree.add(Text(f"{clean(str(name))}: ", style="dim").append(one_line(str(value), 300)))
    completed = {
        i.id: i for i in trajectory.interactions if i.status is InteractionStatus.COMPLETED
    }
    children: dict[str | None, list[Interaction]] = {}
    for interaction in completed.values():
        parent = find_parent(interaction, completed)
        children.setdefault(parent.id if parent else None, []).append(interaction)
    costs = {one.interaction_id: one for one in find_prefix_mismatches(trajectory.interactions)}
    roots = children.get(None, [])
    for number, root in enumerate(roots, start=1):
        branch = tree
        if len(roots) > 1:
            branch = tree.add(Text(f"conversation {number} of {len(roots)}", style="bold"))
        _add_chain(branch, root, children, completed, costs)
    failed = [i for i in trajectory.interactions if i.status is not InteractionStatus.COMPLETED]
    if failed:
        branch = tree.add(
            Text(f"{format_count(len(failed), 'call')} that did not complete", style="bold red")
        )
        for interaction in failed:
            _add_failed(branch, interaction)
    _add_outcome(tree, trajectory)
    return tree


def find_parent(interaction: Interaction, completed: dict[str, Interaction]) -> Interaction | None:
    """The parent, where it is stored and came before: damaged data cannot make a cycle."""
    parent = completed.get(interaction.parent_id or "")
    if parent is None or (parent.started, parent.id) >= (interaction.started, interaction.id):
        return None
    return parent


def _add_chain(
    branch: Tree,
    interaction: Interaction,
    children: dict[str | None, list[Interaction]],
    completed: dict[str, Interaction],
    costs: dict[str, PrefixMismatch],
) -> None:
    """A turn and those that follow; iterative, as agents may take thousands of turns."""
    pending = [(branch, interaction)]
    while pending:
        branch, interaction = pending.pop(0)
        _add_turn(branch, interaction, find_parent(interaction, completed), costs)
        following = children.get(interaction.id, [])
        if len(following) == 1:
            # On the same level: only forks are indented.
            pending.insert(0, (branch, following[0]))
            continue
        forks = []
        for number, child in enumerate(following, start=1):
            name = Text(f"branch {number} of {len(following)}", style="bold yellow")
            forks.append((branch.add(name), child))
        pending = forks + pending


def _add_turn(
    branch: Tree,
    interaction: Interaction,
    parent: Interaction | None,
    costs: dict[str, PrefixMismatch],
) -> None:
    for message in find_new_messages(interaction, parent):
        branch.add(_mark(format_message(message), interaction))
    if interaction.reply is not None:
        reply = format_message(interaction.reply)
    else:
        reply = Text("assistant: (no reply is stored)", style="dim")
    branch.add(_mark(reply.append("\n  ").append(_format_turn(interaction, costs)), interaction))


def _format_turn(interaction: Interaction, costs: dict[str, PrefixMismatch]) -> Text:
    parts = [
        format_count(interaction.num_completion_tokens, "token"),
        f"version {format_versions(interaction.versions)}",
        f"{interaction.finish_reason or 'no finish reason'}",
    ]
    if interaction.reward is not None:
        parts.append(f"reward {format_number(interaction.reward)}")
    if interaction.turn_return is not None:
        parts.append(f"return {format_number(interaction.turn_return)}")
    text = Text(clean("  ".join([*parts, interaction.id])), style="dim")
    if interaction.has_malformed_call:
        text.append("\n  malformed tool call: read as text", style="yellow")
    cost = costs.get(interaction.id)
    if cost is not None:
        tokens = format_mismatch_cost(cost.num_reprefilled_tokens, cost.num_dropped_tokens)
        text.append(f"\n  prefix mismatch: {cost.cause.value}: {tokens}", style="yellow")
    return text


def _add_failed(branch: Tree, interaction: Interaction) -> None:
    text = Text(f"{interaction.status.value}: ", style="red")
    text.append(clean(interaction.error or "no error is stored"))
    node = branch.add(_mark(text.append(f"  {clean(interaction.id)}", style="dim"), interaction))
    if interaction.messages:
        last = interaction.messages[-1]
        num_before = len(interaction.messages) - 1
        before = f"... {format_count(num_before, 'message')} before\n" if num_before else ""
        asked = Text(before, style="dim").append(format_message(last))
        node.add(_mark(asked, interaction))


def _mark(text: Text, interaction: Interaction) -> Text:
    """The text, which knows wherever it is rendered which call it is of."""
    text.apply_meta({CALL_ID: interaction.id})
    return text


def _add_outcome(tree: Tree, trajectory: Trajectory) -> None:
    if trajectory.final_answer is not None:
        tree.add(Text("final answer: ", style="bold").append(clean(trajectory.final_answer)))
    parts = "  ".join(f"{k} {format_number(v)}" for k, v in trajectory.reward_parts.items())
    reward = Text(f"reward: {format_number(trajectory.reward)}", style="bold")
    tree.add(reward.append(f"  {clean(parts)}" if parts else "", style="dim"))
    if trajectory.replaced_by is not None:
        why = f"not trained on: its group scored alike, and {trajectory.replaced_by} replaced it"
        tree.add(Text(clean(why), style="yellow"))
    if trajectory.stop_reason is not None:
        tree.add(Text(f"stopped by its budget: {trajectory.stop_reason}", style="yellow"))
    failure = trajectory.failure
    if failure is not None:
        place = f"{failure.boundary.value} (cause: {failure.cause.value})"
        text = Text(f"failed in {place}: ", style="bold red")
        node = tree.add(text.append(clean(f"{failure.kind}: {failure.message}")))
        if failure.traceback:
            node.add(Text(clean(failure.traceback), style="dim"))


def _format_head(trajectory: Trajectory, title: str) -> Text:
    text = Text(clean(trajectory.id), style="bold")
    agent = f"  agent {trajectory.agent_name}" if trajectory.agent_name else ""
    return text.append(
        clean(
            f"  {title}  task {trajectory.task_id}{agent}  "
            f"{format_count(trajectory.num_turns, 'turn')}  "
            f"{format_count(trajectory.num_completion_tokens, 'token')}  "
            f"{format_count(trajectory.num_tool_calls, 'tool call')}  {trajectory.seconds:.1f} s"
        ),
        style="dim",
    )


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
    proximal_logprob: float | None = None
    """Of the trainer, before the update; None: it has computed none."""

    @property
    def gap(self) -> float | None:
        """|rollout - proximal|, nats."""
        if self.logprob is None or self.proximal_logprob is None:
            return None
        gap = abs(self.logprob - self.proximal_logprob)
        return None if math.isnan(gap) else gap


def find_untrained_reason(folder: RunFolder, source: Source, trajectory: Trajectory) -> str | None:
    """Why none of its tokens is trained on, in words; None: they are, unless :func:`list_tokens`
    says otherwise of a call."""
    if source.is_eval:
        return "it is of an evaluation"
    if trajectory.replaced_by is not None:
        return f"its group was replaced by {trajectory.replaced_by}"
    if compute_score(trajectory) is None:
        return "it has no reward"
    if source.step not in {int(line.get("step", 0)) for line in folder.read_metrics()}:
        return f"step {source.step} has not been trained yet"
    algorithm = folder.load_config().train.algorithm
    if algorithm.compares_within_groups and not algorithm.trains_without_advantage:
        path = source.find_file(folder)
        same_group = {"group_id": partial(eq, trajectory.group_id)}
        group = compute_group_statistics(
            read_trajectory(path, number) for number in find_matches(path, same_group).numbers
        )
        if not group[trajectory.group_id].has_signal:
            return "its group scored alike: the advantage is 0"
    return None


def list_tokens(
    interaction: Interaction,
    *,
    is_trained: bool = True,
    proximal: ProximalLogprobs = MappingProxyType({}),
) -> list[TokenRow]:
    """The prompt and completion tokens of one call, whatever of them is stored.

    Of a trajectory that is trained, completion tokens of a completed, not greedy call with a
    return are (in one sample, should branches share them); prompt tokens are not: where they were
    sampled by an earlier call, they are trained as that call's completion.
    """
    rows = [TokenRow(p, t, None, None, False) for p, t in enumerate(interaction.prompt_ids)]
    trained = (
        is_trained
        and interaction.status is InteractionStatus.COMPLETED
        and interaction.temperature > 0
        and interaction.turn_return is not None
    )
    proximal_logprobs = [*map(float, proximal.get(interaction.id, ()))]
    for index, token_id in enumerate(interaction.completion_ids):
        rows.append(
            TokenRow(
                len(interaction.prompt_ids) + index,
                token_id,
                _get(interaction.rollout_logprobs, index),
                _get(interaction.versions, index),
                trained,
                _get(proximal_logprobs, index),
            )
        )
    return rows


def build_token_tables(
    trajectory: Trajectory,
    spell: Spell | None,
    *,
    is_trained: bool = True,
    proximal: ProximalLogprobs = MappingProxyType({}),
) -> list[Table]:
    """A table for each call; the middle of long prompts is left out."""
    return [
        _build_table(number, interaction, spell, is_trained, proximal)
        for number, interaction in enumerate(trajectory.interactions, start=1)
    ]


def load_spell(run: RunFolder, tokenizer_path: str | None) -> Spell | None:
    """Decodes ids with the tokenizer in a folder; by default, of the run's last checkpoint, and
    None where that has none.

    Raises:
        UserInputError: the folder that was named has no tokenizer.
    """
    if tokenizer_path is not None:
        folder = Path(tokenizer_path)
    elif (latest := run.latest_checkpoint()) is not None:
        folder = latest[1]
        run.fetch(folder / "tokenizer.json")
    else:
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
        raise UserInputError(f"--tokenizer {path}: is not a tokenizer: {error}") from None
    return lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)


def _build_table(
    number: int,
    interaction: Interaction,
    spell: Spell | None,
    is_trained: bool,
    proximal: ProximalLogprobs,
) -> Table:
    rows = list_tokens(interaction, is_trained=is_trained, proximal=proximal)
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
    has_gaps = any(row.gap is not None for row in rows)
    gap_column = ["gap"] if has_gaps else []
    for name in ("position", "id", "text", "logprob", *gap_column, "version", "mask"):
        table.add_column(name, justify="left" if name == "text" else "right")
    if not rows:
        table.add_row("", "", "no token ids are stored for this call")
    skipped = range(_PROMPT_ENDS, max(num_prompt - _PROMPT_ENDS, _PROMPT_ENDS))
    for row in rows:
        if row.position in skipped:
            if row.position == skipped.start:
                table.add_row("...", "", f"({len(skipped)} prompt tokens, see --json)")
            continue
        table.add_row(
            str(row.position),
            str(row.token_id),
            Text(clean(spell(row.token_id)).replace("\n", "\\n") if spell else ""),
            "" if row.logprob is None else f"{row.logprob:z.4f}",
            *(["" if row.gap is None else f"{row.gap:.4f}"] if has_gaps else []),
            "" if row.version is None else str(row.version),
            "trained" if row.trained else "",
            style=None if row.trained else "dim",
        )
    return table


def _get(values: Sequence[Value], index: int) -> Value | None:
    return values[index] if index < len(values) else None
