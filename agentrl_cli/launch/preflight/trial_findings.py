"""What the trajectories of a trial say about the agent, the reward and the training to come."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RolloutFailedError
from agentrl_cli.evaluate.eval_report import compute_reward_interval, has_passed
from agentrl_cli.launch.preflight.findings import (
    Finding,
    Severity,
    describe_error,
    note,
    split_advice,
)
from agentrl_cli.launch.preflight.trial import Trial
from agentrl_cli.log import format_count
from agentrl_cli.prefix_mismatches import REMEDIES, summarize_prefix_mismatches
from agentrl_cli.records import Boundary, FailureCause, InteractionStatus, StopReason, Trajectory
from agentrl_cli.rollout.rollout_failures import ADVICE
from agentrl_cli.scores import compute_group_statistics, compute_score, compute_statistics

#: Below it nearly all groups are without signal, and so they are above the other.
LOW_PASS_RATE, HIGH_PASS_RATE = 0.05, 0.95
#: Of the seconds that all trajectories took together, or of one trajectory.
_MAX_STALL_SECONDS = 1.0
#: Calls for the same prompt that an agent makes to choose among their replies.
_MAX_SAME_PROMPT = 3
_SLOW_REWARD_SHARE = 0.5
_MANY_CUT_SHARE = 0.25
_LAST_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')

_BUDGETS = {
    StopReason.MAX_TURNS: "rollout.max_turns",
    StopReason.MAX_TOKENS: "rollout.max_tokens_per_trajectory",
    StopReason.MAX_SECONDS: "rollout.timeout_seconds",
    StopReason.MAX_MODEL_LEN: "engine.max_model_len",
}


def find_in_trial(config: ExperimentConfig, trial: Trial) -> list[Finding]:
    """Everything that a trial tells."""
    return [
        *_find_stalls(trial),
        *_find_end(trial),
        *_find_uncalled_model(trial),
        *_find_failures(config, trial),
        *_find_repeated_calls(trial),
        *_find_reward_problems(config, trial),
        *_find_cut_replies(config, trial),
        *_find_budgets(config, trial),
        *_find_mismatches(trial),
        *judge_rewards(trial.trajectories, is_stand_in=trial.is_stand_in),
    ]


def _find_end(trial: Trial) -> Iterator[Finding]:
    if trial.error is not None and not isinstance(trial.error, RolloutFailedError):
        yield describe_error(trial.error)
    if trial.is_late:
        num_left = trial.num_planned - len(trial.trajectories)
        yield Finding(
            code="trial_unfinished",
            severity=Severity.WARNING if trial.trajectories else Severity.ERROR,
            found=f"{num_left} of {trial.num_planned} trajectories were not finished in "
            f"{trial.seconds:.0f} seconds",
            where="agentrl check",
            remedy="Type --timeout-seconds with a larger number, or --tasks with a smaller one; "
            "if the agent should be faster than this, look for what it waits for",
        )


def _find_uncalled_model(trial: Trial) -> Iterator[Finding]:
    silent = [t for t in trial.trajectories if t.failure is None and not t.interactions]
    if not silent:
        return
    yield Finding(
        code="model_not_called",
        severity=Severity.ERROR,
        found=f"{_share(silent, trial)} called the model through agentrl not once, so there is no "
        "token of them to train on",
        where="the agent",
        remedy="Does the agent give its client a base_url or a key of another API? Leave them out, "
        "and the client leads to agentrl; or take agentrl's: def build(client, model), or async "
        "def solve(data, client, model)",
    )


def _find_failures(config: ExperimentConfig, trial: Trial) -> Iterator[Finding]:
    """One finding for each boundary and kind of exception."""
    kinds: dict[tuple[Boundary, str, FailureCause], list[Trajectory]] = {}
    for trajectory in trial.trajectories:
        failure = trajectory.failure
        if failure is not None:
            alike = (failure.boundary, failure.kind, failure.cause)
            kinds.setdefault(alike, []).append(trajectory)
    places = {
        Boundary.AGENT: config.agent_builder_path or config.workflow_path,
        Boundary.REWARD: config.reward_fn_path,
    }
    for (boundary, kind, cause), failed in kinds.items():
        first = failed[0].failure
        assert first is not None
        # The policy may learn otherwise.
        is_policy = cause is FailureCause.POLICY
        what, advice = split_advice(first.message)
        if boundary is Boundary.REWARD and "did not finish in" in first.message:
            yield _describe_late_reward(config, trial, failed)
            continue
        yield Finding(
            code=f"failure_{boundary.value}",
            severity=Severity.NOTE if is_policy else Severity.ERROR,
            found=f"{_share(failed, trial)} failed at the boundary '{boundary.value}' with {kind}: "
            f"{what}"
            + (
                f" (what the policy sampled: scored {config.rollout.policy_failure_reward})"
                if is_policy
                else ""
            ),
            where=_find_line(first.traceback) or places.get(boundary) or f"the {boundary.value}",
            remedy="" if is_policy else advice or ADVICE[boundary],
        )


def _describe_late_reward(
    config: ExperimentConfig, trial: Trial, failed: Sequence[Trajectory]
) -> Finding:
    limit = config.rollout.reward_timeout_seconds
    return Finding(
        code="reward_too_slow",
        severity=Severity.ERROR,
        found=f"the reward function did not finish in {limit:g} seconds for "
        f"{_share(failed, trial)}, which stay unscored",
        where=config.reward_fn_path or "the reward",
        remedy=f"Type rollout.reward_timeout_seconds={4 * limit:g}, or make it faster: load models "
        "and data once when its module is imported, not at each call",
    )


def _find_stalls(trial: Trial) -> Iterator[Finding]:
    num = max(1, len(trial.trajectories))
    for place, seconds in sorted(trial.stalls.items(), key=lambda stall: -stall[1]):
        is_long = seconds / num >= _MAX_STALL_SECONDS or seconds >= _MAX_STALL_SECONDS * 3
        yield Finding(
            code="event_loop_blocked",
            severity=Severity.ERROR if is_long else Severity.WARNING,
            found=f"this line blocked the event loop for {seconds:.1f} seconds in all, in a trial "
            f"of {trial.num_planned} trajectories: meanwhile no other trajectory can do anything",
            where=place,
            remedy="Write await asyncio.sleep(...) for time.sleep, an async client for a blocking "
            "one, await asyncio.to_thread(f, ...) for other functions that block; or def instead "
            "of async def for the agent, which then runs in a thread; or type "
            "rollout.agent_mode=subprocess",
        )


def _find_repeated_calls(trial: Trial) -> Iterator[Finding]:
    num_retries = sum(session.num_retries for session in trial.sessions)
    if num_retries:
        yield Finding(
            code="sdk_retries",
            severity=Severity.WARNING,
            found=f"the agent's SDK sent {format_count(num_retries, 'call')} again: it had given "
            "up waiting for the reply, or the connection broke",
            where="the agent's client",
            remedy="Raise or remove the timeout of the agent's client (timeout=600): while "
            "training, replies take longer than those of an API",
        )
    num_refused = 0
    for session in trial.sessions:
        num_answered = len(session.interactions) + session.num_retries
        num_refused += max(0, session.num_requests - num_answered)
    ignored = [t for t in trial.trajectories if t.failure is None or _is_late(t)]
    if num_refused > 2 * max(1, len(trial.sessions)) and ignored:
        yield _describe_refused(trial, num_refused)
    counts = Counter(_count_repeats(t) for t in trial.trajectories)
    most = max(counts, default=0)
    if most > _MAX_SAME_PROMPT:
        num = sum(count for repeats, count in counts.items() if repeats > _MAX_SAME_PROMPT)
        yield Finding(
            code="call_repeated",
            severity=Severity.WARNING,
            found=f"{num} of {len(trial.trajectories)} trajectories asked the model the very same "
            f"thing up to {most} times: each reply is sampled, counts against the budgets and is "
            "trained on",
            where="the agent",
            remedy="Let the agent catch only errors that it can do something about, and give up "
            "after a few: what it raises is recorded as its failure. Or tell the model what was "
            "wrong with its reply before asking again",
        )


def _describe_refused(trial: Trial, num_refused: int) -> Finding:
    return Finding(
        code="errors_swallowed",
        severity=Severity.ERROR,
        found=f"{format_count(num_refused, 'call')} of the agent in "
        f"{len(trial.sessions)} trajectories were refused, and it went on calling: it swallows the "
        "errors of its client",
        where="the agent",
        remedy="Let the agent catch only errors that it can do something about (not except "
        "Exception around a model call), and stop when a call is refused",
    )


def _is_late(trajectory: Trajectory) -> bool:
    return trajectory.failure is not None and trajectory.failure.boundary is Boundary.TIMEOUT


def _count_repeats(trajectory: Trajectory) -> int:
    """How often the prompt that was asked most often was asked."""
    asked = Counter(
        json.dumps([list(i.messages), i.tools], sort_keys=True, default=repr)
        for i in trajectory.interactions
    )
    return max(asked.values(), default=0)


def _find_reward_problems(config: ExperimentConfig, trial: Trial) -> Iterator[Finding]:
    where = config.reward_fn_path or "the agent's reward"
    kinds = Counter(score.returned for score in trial.scores)
    unscored = {kind: kinds[kind] for kind in ("None", "NaN") if kinds[kind]}
    if unscored:
        listed = ", ".join(f"{kind} {count} times" for kind, count in unscored.items())
        is_all = sum(unscored.values()) == len(trial.scores)
        yield Finding(
            code="reward_missing",
            severity=Severity.ERROR if is_all else Severity.WARNING,
            found=f"of {format_count(len(trial.scores), 'call')} the reward function returned "
            f"{listed}: those trajectories are unscored and not trained on",
            where=where,
            remedy="Return a number on every path through the function (0.0 for an answer that "
            "cannot be read); None is for what cannot be judged",
        )
    others = sorted(set(kinds) - {"None", "NaN", "float", "int"})
    if others:
        found = f"the reward function returned {', '.join(others)}, which counts as a number "
        yield note("reward_type", where, found + "(True is 1.0, False 0.0)")
    slowest = max((score.run_seconds for score in trial.scores), default=0.0)
    limit = config.rollout.reward_timeout_seconds
    if slowest > _SLOW_REWARD_SHARE * limit:
        yield Finding(
            code="reward_slow",
            severity=Severity.WARNING,
            found=f"the reward function took up to {slowest:.1f} of the {limit:g} seconds that it "
            "has, and is called by many trajectories at a time while training",
            where=where,
            remedy=f"Type rollout.reward_timeout_seconds={4 * limit:g}, or make it faster",
        )


def _find_cut_replies(config: ExperimentConfig, trial: Trial) -> Iterator[Finding]:
    if trial.is_stand_in:
        return
    replies = [
        i
        for t in trial.trajectories
        for i in t.interactions
        if i.status is InteractionStatus.COMPLETED
    ]
    cut = [i for i in replies if i.finish_reason == "length"]
    if len(cut) <= _MANY_CUT_SHARE * len(replies) or not cut:
        return
    limit = config.gconfig.max_tokens
    yield Finding(
        code="replies_cut",
        severity=Severity.ERROR if len(cut) == len(replies) else Severity.WARNING,
        found=f"{len(cut)} of {len(replies)} replies were cut off by their token limit "
        f"(gconfig.max_tokens: {limit}): answers and tool calls that do not end cannot be read",
        where="gconfig.max_tokens",
        remedy=f"Type gconfig.max_tokens={max(256, 4 * limit)}; if the agent sends a max_tokens of "
        "its own, raise that too",
    )


def _find_budgets(config: ExperimentConfig, trial: Trial) -> Iterator[Finding]:
    limits = {
        StopReason.MAX_TURNS: config.rollout.max_turns,
        StopReason.MAX_TOKENS: config.rollout.max_tokens_per_trajectory,
        StopReason.MAX_SECONDS: config.rollout.timeout_seconds,
        StopReason.MAX_MODEL_LEN: config.engine.max_model_len,
    }
    reached = Counter(t.stop_reason for t in trial.trajectories if t.stop_reason is not None)
    for reason, count in reached.items():
        key, limit = _BUDGETS[reason], limits[reason]
        yield Finding(
            code="budget_reached",
            severity=Severity.NOTE if trial.is_stand_in else Severity.WARNING,
            found=f"{count} of {len(trial.trajectories)} trajectories reached {key} ({limit:g})",
            where=key,
            remedy=f"Type {key}={2 * limit:g}, or let the agent stop earlier",
        )


def _find_mismatches(trial: Trial) -> Iterator[Finding]:
    summary = summarize_prefix_mismatches(trial.trajectories)
    for cause, totals in summary.by_cause.items():
        share = totals.num_turns / max(1, summary.num_replaying_turns)
        yield Finding(
            code=f"prefix_mismatch_{cause.value}",
            severity=Severity.WARNING,
            found=f"{totals.num_turns} of {summary.num_replaying_turns} turns that go on from an "
            f"earlier one ({share:.0%}) could not continue its tokens ({cause.value}): "
            f"{totals.num_reprefilled_tokens:,} tokens were computed again, "
            f"{totals.num_dropped_tokens:,} sampled ones are not in the context of later turns. "
            "Each of these turns begins a training sample of its own, so a step costs more and "
            "credit reaches the turns before it by the reward alone",
            where="the agent's conversation",
            remedy=REMEDIES[cause],
        )


def judge_rewards(trajectories: Sequence[Trajectory], *, is_stand_in: bool) -> list[Finding]:
    """The verdict on the base pass rate, and on whether rewards differ at all."""
    scored = [t for t in trajectories if compute_score(t) is not None]
    by_task: dict[str, list[float]] = {}
    for t in scored:
        by_task.setdefault(t.task_id, []).append(t.reward or 0.0)
    rewards = [reward for of_task in by_task.values() for reward in of_task]
    if not rewards:
        return []
    rate = sum(map(has_passed, rewards)) / len(rewards)
    interval = compute_reward_interval([*by_task.values()])
    span = "" if interval is None else f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})"
    groups = compute_group_statistics(scored).values()
    measured = (
        f"mean reward {math.fsum(rewards) / len(rewards):.3f}{span}, pass rate {rate:.0%} of "
        f"{format_count(len(rewards), 'scored attempt')}; rewards differ inside "
        f"{sum(group.has_signal for group in groups)} of {format_count(len(groups), 'group')}"
    )
    verdict = _judge_stand_in(rewards) if is_stand_in else _judge_spread(rewards, rate)
    finding = replace(verdict, found=f"{measured}: {verdict.found}", where="the reward")
    return [finding]


def _are_equal(rewards: Sequence[float]) -> bool:
    return not compute_statistics(rewards).deviation


def _judge_stand_in(rewards: Sequence[float]) -> Finding:
    verdict = "it says nothing: the built-in model answered in place of yours"
    if _are_equal(rewards):
        verdict += f". All rewards are {rewards[0]:g}, which may be the model's doing"
    return Finding(code="base_pass_rate", severity=Severity.NOTE, found=verdict)


def _judge_spread(rewards: Sequence[float], rate: float) -> Finding:
    is_binary, are_equal = {*rewards} <= {0.0, 1.0}, _are_equal(rewards)
    code = "base_pass_rate"
    if is_binary and rate < LOW_PASS_RATE:
        verdict = "nothing to learn from: it hardly ever succeeds"
        remedy = (
            "Choose easier tasks (agentrl eval --save-tasks FILE.jsonl, then "
            "train_dataset.min_pass_rate=0.1), give rewards for parts of the way, begin from a "
            "stronger model.path, or warm it up with agentrl sft. To measure more exactly, type "
            "--tasks 64"
        )
    elif is_binary and rate > HIGH_PASS_RATE:
        verdict = "nothing left to learn: it nearly always succeeds"
        remedy = (
            "Choose harder tasks (agentrl eval --save-tasks FILE.jsonl, then "
            "train_dataset.max_pass_rate=0.9), or a stricter reward"
        )
    elif are_equal:
        code, verdict = "reward_constant", f"nothing to learn: every reward is {rewards[0]:g}"
        remedy = (
            "Let the reward function tell good answers from bad ones: groups whose rewards are "
            "equal have advantage 0. Call it on a right and on a wrong answer of your own"
        )
    else:
        return Finding(code=code, severity=Severity.NOTE, found="fine: it can learn")
    if are_equal and is_binary:
        remedy += (
            ". Or the reward function does not tell answers apart: call it on a right and on a "
            "wrong one"
        )
    return Finding(code=code, severity=Severity.WARNING, found=verdict, remedy=remedy)


def _share(some: Sequence[Trajectory], trial: Trial) -> str:
    return f"{len(some)} of {len(trial.trajectories)} trajectories"


def _find_line(traceback: str) -> str:
    """The user's innermost line of a traceback, which begins with code of the user's."""
    frames = _LAST_LINE.findall(traceback)
    if not frames:
        return ""
    file, line, function = frames[0]
    return f"{file}:{line} in {function}"
