"""What the inspector shows, as JSON: strict (no NaN), with stable names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from agentrl_cli.inspector.list_view import StepSummary, describe_mismatches
from agentrl_cli.inspector.trajectory_query import Selection, Source
from agentrl_cli.inspector.trajectory_view import list_tokens
from agentrl_cli.prefix_mismatches import (
    MismatchSummary,
    find_prefix_mismatches,
    summarize_prefix_mismatches,
)
from agentrl_cli.records import Trajectory
from agentrl_cli.scores import compute_score
from agentrl_cli.store.trajectory_file import ProximalLogprobs

_COST_FIELDS = ("num_reprefilled_tokens", "num_dropped_tokens")
_TOKEN_FIELDS = ("prompt_ids", "completion_ids", "rollout_logprobs", "versions")


def format_steps(run: str, summaries: Sequence[StepSummary]) -> str:
    """``{"run", "steps": [...], "evals": [...], "prefix_mismatches"}``, the last over all
    steps."""
    rows = [
        ({} if s.totals is None else s.totals.to_dict())
        | {"alarms": s.alarms, "problem": s.problem}
        | locate(s.source)
        for s in summaries
    ]
    of_steps = (s.prefix_mismatches for s in summaries if not s.source.is_eval)
    return _dump(
        {
            "run": run,
            "steps": [r for r in rows if r["source"] == "step"],
            "evals": [r for r in rows if r["source"] == "eval"],
            "prefix_mismatches": describe_mismatches(sum(of_steps, MismatchSummary())),
        }
    )


def format_selection(run: str, selection: Selection) -> str:
    """``{"run", "num_matching", "trajectories": [...], "problems": [...]}``."""
    rows = [asdict(f.summary) | locate(f.source) for f in selection.found]
    return _dump(
        {
            "run": run,
            "num_matching": selection.num_matching,
            "trajectories": rows,
            "problems": selection.problems,
        }
    )


def format_trajectory(
    source: Source,
    trajectory: Trajectory,
    *,
    tokens: bool,
    trained: bool = True,
    proximal: ProximalLogprobs = MappingProxyType({}),
) -> str:
    """All fields of a trajectory; with ``tokens`` its ids, logprobs (the ``proximal`` ones are null
    where there are none), versions and mask too, which is all False where it is not ``trained``."""
    data = asdict(trajectory) | locate(source)
    data["prefix_mismatches"] = describe_mismatches(summarize_prefix_mismatches([trajectory]))
    costs = {
        one.interaction_id: asdict(one) for one in find_prefix_mismatches(trajectory.interactions)
    }
    for interaction, row in zip(trajectory.interactions, data["interactions"], strict=True):
        row["num_prompt_tokens"] = len(interaction.prompt_ids)
        row["num_completion_tokens"] = interaction.num_completion_tokens
        for name in _COST_FIELDS:
            row[name] = costs.get(interaction.id, {}).get(name, 0)
        if tokens:
            known = proximal.get(interaction.id)
            row["proximal_logprobs"] = None if known is None else known.tolist()
            row["loss_mask"] = [t.trained for t in list_tokens(interaction, is_trained=trained)]
        else:
            for name in _TOKEN_FIELDS:
                del row[name]
    return _dump(data)


def describe_outcome(trajectory: Trajectory) -> dict[str, Any]:
    """How a trajectory ended: its reward, what it was made of, and its failure."""
    return {
        "reward": trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
        "score": compute_score(trajectory),
        "final_answer": trajectory.final_answer,
        "stop_reason": trajectory.stop_reason,
        "failure": None if trajectory.failure is None else asdict(trajectory.failure),
        "prefix_mismatches": describe_mismatches(summarize_prefix_mismatches([trajectory])),
    }


def locate(source: Source) -> dict[str, Any]:
    """Where a trajectory is stored: ``{"source": "step", "step": 12, "label": null}``."""
    return {
        "source": "eval" if source.is_eval else "step",
        "step": source.step,
        "label": source.label,
    }


def format_line(value: Any) -> bytes:
    """``value`` as one line of strict JSON in UTF-8, with its end."""
    text = json.dumps(to_strict(value), ensure_ascii=False, allow_nan=False, default=repr)
    # Of a lone surrogate, which no UTF-8 holds, what JSON writes for it.
    return f"{text}\n".encode("utf-8", "backslashreplace")


def _dump(value: Any) -> str:
    # ASCII: any terminal and any reader takes it.
    return json.dumps(to_strict(value), indent=2, allow_nan=False, default=repr)


def to_strict(value: Any) -> Any:
    """``value`` as strict JSON has it: None for what is not finite, texts as keys."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): to_strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_strict(v) for v in value]
    return value
