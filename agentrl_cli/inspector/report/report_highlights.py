"""What to look at first: the few things of a run that most likely need a person's attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl_cli.inspector.list_view import format_ranges
from agentrl_cli.inspector.report.report_columns import Numbers, RunColumns

#: Examples of each thing.
_NUM_EXAMPLES = 5

#: Title and explanation of what counts trajectories, and the list's filter for all of them.
_COUNTED: Mapping[str, tuple[str, str, str]] = {
    "surroundings": (
        "Failures of the surroundings",
        "An engine, tool, reward function or deadline failed: these are unscored, and teach "
        "nothing.",
        "cause=surroundings",
    ),
    "policy": (
        "Failures that the policy caused",
        "A tool that does not exist, arguments that were refused, a budget used up.",
        "cause=policy",
    ),
    "malformed": (
        "Malformed tool calls",
        "The reply begins a tool call that cannot be read as one.",
        "malformed=any",
    ),
    "cut": (
        "Replies cut off at their length limit",
        "The last reply reached gconfig.max_tokens: often scored as wrong, whatever it would have "
        "said.",
        "cut=any",
    ),
    "mismatch": (
        "Prefix mismatches",
        "The agent or the template changed what was sampled, and the conversation forked.",
        "mismatch=any",
    ),
    "unscored": (
        "Unscored trajectories without a failure",
        "The reward function gave no number.",
        "unscored=any",
    ),
}


def find_highlights(
    run: RunColumns,
    alarms: Mapping[int, Sequence[str]],
    evals: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Titles with explanations, counts and examples; the most urgent first.

    Args:
        run: all trajectories.
        alarms: the names of those that were active in each step.
        evals: as ``read_evals`` of ``report_data.py`` gives them.
    """
    found = [*_list_alarms(alarms), *_find_regressions(run, evals)]
    found += _count_kinds(run)
    found += _find_spread(run)
    found += _find_unlikely(run)
    found += _find_gaps(run)
    return found


def _list_alarms(alarms: Mapping[int, Sequence[str]]) -> list[dict[str, Any]]:
    steps: dict[str, list[int]] = {}
    for step, names in sorted(alarms.items()):
        for name in names:
            steps.setdefault(name, []).append(step)
    if not steps:
        return []
    # The last to be active first.
    items = [
        {"text": f"{name}: active in steps {format_ranges(active)}", "step": active[-1]}
        for name, active in sorted(steps.items(), key=lambda pair: -pair[1][-1])
    ]
    why = "What was seen, and what to type, is in the run's log logs/trainer.log."
    return [_describe("alarms", "Alarms of the run", why, len(items), items)]


def _find_regressions(run: RunColumns, evals: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tasks that the evaluation before the last passed, and the last did not."""
    made = [e for e in evals if e["label"] is None and e["taskRewards"]]
    if len(made) < 2:
        return []
    before, after = made[-2:]
    bar = after["threshold"] - 1e-9
    lost = [
        task
        for task, reward in after["taskRewards"].items()
        if reward < bar and before["taskRewards"].get(task, reward) >= bar
    ]
    if not lost:
        return []
    link = f"#/evaluations?before={before['key']}&after={after['key']}"
    tasks = {text: code for code, text in enumerate(run.texts["task"])}
    start, stop = run.starts[after["source"]], run.starts[after["source"] + 1]
    of_eval = run.columns["task"][start:stop]
    items: list[dict[str, Any]] = []
    for task in lost[:_NUM_EXAMPLES]:
        rows = np.flatnonzero(of_eval == tasks.get(task, -2))
        if len(rows):
            items.append(_place(run, start + int(rows[0])) | {"text": f"task {task}"})
    why = f"These tasks passed in {before['name']} and fail in {after['name']}."
    return [_describe("regressions", "Regressions in evaluations", why, len(lost), items, link)]


def _count_kinds(run: RunColumns) -> list[dict[str, Any]]:
    columns = run.columns
    cause, mismatches = columns["cause"], columns["mismatches"]
    codes = {text: code for code, text in enumerate(run.texts["cause"])}
    are = {
        "surroundings": cause == codes.get("surroundings", -2),
        "policy": cause == codes.get("policy", -2),
        "malformed": columns["malformed"] > 0,
        "cut": columns["cut"] > 0,
        "mismatch": mismatches > 0,
        "unscored": np.isnan(columns["score"]) & (cause < 0),
    }
    found = []
    for name, (title, why, query) in _COUNTED.items():
        rows = np.flatnonzero(are[name])
        if len(rows):
            # Steps come before evaluations: the newest of the step that was trained last.
            trained = rows[~run.is_eval[rows]]
            newest = (trained if len(trained) else rows)[: -_NUM_EXAMPLES - 1 : -1]
            items = [_place(run, int(row)) | {"text": _say(run, name, row)} for row in newest]
            link = f"#/trajectories?from=all&{query}"
            found.append(_describe(name, title, why, len(rows), items, link, run.num_rows))
    return found


def _say(run: RunColumns, name: str, row: int) -> str:
    """What an example says of itself, beside its name."""
    columns, texts = run.columns, run.texts
    if name in ("surroundings", "policy"):
        parts = [("boundary", columns["boundary"][row]), ("kind", columns["kind"][row])]
        known = [texts[column][code] for column, code in parts if code >= 0]
        failure = columns["failure"][row]
        message = texts["failure"][failure] if failure >= 0 else ""
        return ": ".join([*known, message[:120]])
    if name == "mismatch":
        return f"{texts['mismatch'][columns['mismatch'][row]]}".replace(" ", ", ")
    question = columns["question"][row]
    return texts["question"][question][:120] if question >= 0 else ""


def _find_spread(run: RunColumns) -> list[dict[str, Any]]:
    """The groups of the training whose scores differ most, the newest first."""
    scores = run.columns["score"]
    rows = np.flatnonzero(~run.is_eval & ~np.isnan(scores))
    if not len(rows):
        return []
    # One group may be in one step alone, but names may come again in other runs' evaluations.
    numbers = run.source_numbers[rows] * (len(run.texts["group"]) + 1) + run.columns["group"][rows]
    _, first, of_row = np.unique(numbers, return_index=True, return_inverse=True)
    deviations = _compute_deviations(scores[rows], of_row)
    largest = np.lexsort((first, deviations))[::-1][:_NUM_EXAMPLES]
    items = [
        _place(run, int(rows[first[n]]), is_group=True) | {"text": f"deviation {deviations[n]:.3f}"}
        for n in largest
        if deviations[n] > 1e-9
    ]
    if not items:
        return []
    count = int((deviations > 1e-9).sum())
    why = "The same task went well and badly: compare where the attempts part."
    link = "#/map?color=spread"
    return [_describe("spread", "Groups whose scores differ most", why, count, items, link)]


def _compute_deviations(values: Numbers, groups: Numbers) -> Numbers:
    """The unbiased deviation of the values of each group; 0 for one value."""
    counts = np.bincount(groups)
    means = np.bincount(groups, values) / counts
    squares = np.bincount(groups, (values - means[groups]) ** 2)
    deviations: Numbers = np.sqrt(squares / np.maximum(counts - 1, 1))
    return deviations


def _find_unlikely(run: RunColumns) -> list[dict[str, Any]]:
    lowest = run.columns["logprob_min"]
    rows = np.flatnonzero(~np.isnan(lowest))
    if not len(rows):
        return []
    worst = rows[np.argsort(lowest[rows], kind="stable")[:_NUM_EXAMPLES]]
    items = [
        _place(run, int(row)) | {"text": f"{lowest[row]:.2f} nats".replace("-", "−")}
        for row in worst
    ]
    why = "Each has a token that the policy itself thought unlikely: a typo, a wrong turn, or luck."
    link = "#/trajectories?from=all&sort=logprob_min&order=asc"
    return [_describe("logprobs", "Least likely tokens", why, len(items), items, link)]


def _find_gaps(run: RunColumns) -> list[dict[str, Any]]:
    """Where the engine and the trainer disagree most."""
    gaps = run.columns["logprob_gap_max"]
    rows = np.flatnonzero(gaps > 0)
    if not len(rows):
        return []
    worst = rows[np.argsort(-gaps[rows], kind="stable")[:_NUM_EXAMPLES]]
    items = [_place(run, int(row)) | {"text": f"{gaps[row]:.2g} nats"} for row in worst]
    title = "Largest gaps between engine and trainer"
    why = (
        "|rollout − proximal| of one token: how far the engine's logprob, when it was sampled, is "
        "from the trainer's before the update. Rounding makes hundredths, older weights more."
    )
    link = "#/trajectories?from=all&sort=logprob_gap_max"
    return [_describe("gaps", title, why, len(items), items, link)]


def _place(run: RunColumns, row: int, *, is_group: bool = False) -> dict[str, Any]:
    """Where an example is, for a link that works before the page has its columns."""
    columns, texts = run.columns, run.texts
    group = texts["group"][columns["group"][row]]
    if is_group:
        return {"row": row, "group": group, "name": f"task {texts['task'][columns['task'][row]]}"}
    own = columns["id"][row]
    return {
        "row": row,
        "name": texts["id"][own] if own >= 0 else f"{group}/{columns['sample'][row]}",
    }


def _describe(
    kind: str,
    title: str,
    why: str,
    count: int,
    items: list[dict[str, Any]],
    link: str | None = None,
    total: int | None = None,
) -> dict[str, Any]:
    return {
        "kind": kind, "title": title, "why": why, "count": count, "total": total, "items": items,
        "link": link,
    }  # fmt: skip
