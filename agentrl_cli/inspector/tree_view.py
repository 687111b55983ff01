"""One trajectory as its conversation tree."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from rich.tree import Tree

from agentrl_cli.breaks import Break, find_breaks, format_break_cost
from agentrl_cli.inspector.text import (
    clean,
    format_message,
    format_number,
    format_versions,
    one_line,
)
from agentrl_cli.records import Interaction, InteractionStatus, Message, Trajectory


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
        parent = _find_parent(interaction, completed)
        children.setdefault(parent.id if parent else None, []).append(interaction)
    costs = {one.interaction_id: one for one in find_breaks(trajectory.interactions)}
    roots = children.get(None, [])
    for number, root in enumerate(roots, start=1):
        branch = tree
        if len(roots) > 1:
            branch = tree.add(Text(f"conversation {number} of {len(roots)}", style="bold"))
        _add_chain(branch, root, children, completed, costs)
    failed = [i for i in trajectory.interactions if i.status is not InteractionStatus.COMPLETED]
    if failed:
        branch = tree.add(Text(f"{len(failed)} calls that did not complete", style="bold red"))
        for interaction in failed:
            _add_failed(branch, interaction)
    _add_outcome(tree, trajectory)
    return tree


def _find_parent(interaction: Interaction, completed: dict[str, Interaction]) -> Interaction | None:
    """The parent, where it is stored and came before: damaged data cannot make a circle."""
    parent = completed.get(interaction.parent_id or "")
    if parent is None or (parent.started, parent.id) >= (interaction.started, interaction.id):
        return None
    return parent


def _add_chain(
    branch: Tree,
    interaction: Interaction,
    children: dict[str | None, list[Interaction]],
    completed: dict[str, Interaction],
    costs: dict[str, Break],
) -> None:
    """A turn and those that follow; iterative, as agents may take thousands of turns."""
    pending = [(branch, interaction)]
    while pending:
        branch, interaction = pending.pop(0)
        _add_turn(branch, interaction, _find_parent(interaction, completed), costs)
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
    costs: dict[str, Break],
) -> None:
    for message in find_new_messages(interaction, parent):
        branch.add(format_message(message))
    if interaction.reply is not None:
        reply = format_message(interaction.reply)
    else:
        reply = Text("assistant: (no reply is stored)", style="dim")
    branch.add(reply.append("\n  ").append(_format_turn(interaction, costs)))


def find_new_messages(interaction: Interaction, parent: Interaction | None) -> Sequence[Message]:
    """The request's messages that the parent's turn did not have; all, where history differs."""
    if parent is None:
        return interaction.messages
    known = len(parent.messages)
    # The parent's reply comes back in other words (null or "", key order), so it is counted
    # and not compared.
    if interaction.messages[:known] == parent.messages and len(interaction.messages) > known:
        return interaction.messages[known + 1 :]
    return interaction.messages


def _format_turn(interaction: Interaction, costs: dict[str, Break]) -> Text:
    parts = [
        f"{interaction.num_completion_tokens} tokens",
        f"version {format_versions(interaction.versions)}",
        f"{interaction.finish_reason or 'no finish reason'}",
    ]
    if interaction.reward is not None:
        parts.append(f"reward {format_number(interaction.reward)}")
    if interaction.turn_return is not None:
        parts.append(f"return {format_number(interaction.turn_return)}")
    text = Text("  ".join(parts) + f"  {interaction.id}", style="dim")
    cost = costs.get(interaction.id)
    if cost is not None:
        tokens = format_break_cost(cost.num_recomputed_tokens, cost.num_departed_tokens)
        text.append(f"\n  broken: {cost.cause.value}: {tokens}", style="yellow")
    return text


def _add_failed(branch: Tree, interaction: Interaction) -> None:
    text = Text(f"{interaction.status.value}: ", style="red")
    text.append(clean(interaction.error or "no error is stored"))
    node = branch.add(text.append(f"  {interaction.id}", style="dim"))
    if interaction.messages:
        last = interaction.messages[-1]
        num_before = len(interaction.messages) - 1
        before = f"... {num_before} messages before\n" if num_before else ""
        node.add(Text(before, style="dim").append(format_message(last)))


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
        text = Text(f"failed in {failure.boundary.value}: ", style="bold red")
        node = tree.add(text.append(clean(f"{failure.kind}: {failure.message}")))
        if failure.traceback:
            node.add(Text(clean(failure.traceback), style="dim"))


def _format_head(trajectory: Trajectory, title: str) -> Text:
    text = Text(clean(trajectory.id), style="bold")
    agent = f"  agent {trajectory.agent_name}" if trajectory.agent_name else ""
    return text.append(
        clean(
            f"  {title}  task {trajectory.task_id}{agent}  {trajectory.num_turns} turns  "
            f"{trajectory.num_completion_tokens} tokens  {trajectory.num_tool_calls} tool calls  "
            f"{trajectory.seconds:.1f} s"
        ),
        style="dim",
    )
