"""Failures as data: which boundary an exception crossed, and when failures stop a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl_cli.agents.agent_runner import BoundaryError
from agentrl_cli.blocking_clients import IN_PROCESS_URL, BlockingCallError
from agentrl_cli.config.user_code import format_user_traceback
from agentrl_cli.errors import (
    AgentrlError,
    ContextLengthError,
    EngineError,
    InlineLimitError,
    RolloutFailedError,
)
from agentrl_cli.log import get_logger
from agentrl_cli.records import Boundary, Failure, FailureCause, StopReason, Trajectory
from agentrl_cli.rollout.policy_failures import (
    find_cause,
    is_raised_for_replies,
    list_refused,
    walk_causes,
)

if TYPE_CHECKING:
    from agentrl_cli.tracking.session import Session

_MAX_TRACEBACK_CHARS = 8_000
_SHOWN_LINES, _FIRST_LINES = 12, 5

#: What to do about failures, by the boundary that they crossed.
ADVICE = {
    Boundary.AGENT: "Run the agent on one task of your own to see it fail, fix it, start again. "
    "For a reply that it cannot use, let it return a reward (return 0.0)",
    Boundary.TOOL: "Let the tool return its errors as text, so that the model can react to them",
    Boundary.REWARD: "Call the reward function on one answer of your own, fix it, start again",
    Boundary.ENGINE: "See the engine's log in the run folder. For prompts that are too long, "
    "raise engine.max_model_len",
    Boundary.GATEWAY: "The gateway refused the agent's requests: its message says which field or "
    "message to change in the agent",
    Boundary.TIMEOUT: "Raise rollout.timeout_seconds, or lower rollout.max_concurrent so that each "
    "trajectory gets a larger share of the engine",
    Boundary.BUDGET: "Raise rollout.max_turns or rollout.max_tokens_per_trajectory, or let the "
    "agent stop earlier",
}


class AgentRunError(Exception):
    """What an agent raised in a process of its own.

    Attributes:
        failure: the same, as the process described it.
        refused: the texts that a parser refused there.
    """

    def __init__(self, failure: Failure, refused: Sequence[str] = ()) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.refused = refused


def describe_failure(
    error: BaseException,
    *,
    boundary: Boundary | None = None,
    sessions: Sequence[Session] | None = None,
    own_urls: Collection[str] | None = None,
) -> Failure:
    """The failure that ``error`` was, attributed once.

    Args:
        error: what ended the rollout.
        boundary: the boundary, where the place of the exception tells (the reward).
        sessions: know which budget or engine error was behind a call that failed, and what the
            policy has sampled. None: not here, so that whose doing it was is decided elsewhere.
        own_urls: the gateway's addresses: an error of a call to another one is the agent's.
            None: not known, so every call counts as its.
    """
    chain = list(walk_causes(error))
    remote = next((e for e in chain if isinstance(e, AgentRunError)), None)
    failure = remote.failure if remote else _describe_chain(chain, boundary, own_urls)
    if sessions is None:
        return failure
    for session in sessions:
        failure = _attribute(failure, session)
    refused = remote.refused if remote else list_refused(error)
    return replace(failure, cause=find_cause(failure, sessions, refused))


def _describe_chain(
    chain: Sequence[BaseException], boundary: Boundary | None, own_urls: Collection[str] | None
) -> Failure:
    """The failure by the error, the first of the chain, and its causes alone."""
    error = shown = chain[0]
    is_own_call, explanation = _explain_call(chain, own_urls)
    if boundary is None:
        carrier = next((e for e in chain if isinstance(e, BoundaryError)), None)
        engine_error = next((e for e in chain if isinstance(e, EngineError)), None)
        if carrier is not None:
            boundary, shown = carrier.boundary, carrier.original
        elif isinstance(error, DeadlineError):
            boundary = Boundary.TIMEOUT
        elif engine_error is not None:
            boundary, shown = Boundary.ENGINE, engine_error
        else:
            boundary = Boundary.GATEWAY if is_own_call else Boundary.AGENT
    return Failure(
        boundary=boundary,
        kind=type(shown).__name__,
        message=str(shown) + (explanation if shown is error else ""),
        cause=(
            FailureCause.POLICY
            if any(map(is_raised_for_replies, chain))
            else FailureCause.SURROUNDINGS
        ),
        traceback=format_user_traceback(
            error,
            # An error of agentrl's own says all that there is to say.
            without_user_code="nothing" if isinstance(shown, AgentrlError) else "everything",
        )[-_MAX_TRACEBACK_CHARS:],
    )


def _attribute(failure: Failure, session: Session) -> Failure:
    """The failure by what the session knows of the calls."""
    boundary, engine_error = failure.boundary, session.engine_error
    if session.budget_exceeded is not None:
        is_time = session.stop_reason is StopReason.MAX_SECONDS
        if boundary is Boundary.GATEWAY:
            boundary = Boundary.TIMEOUT if is_time else Boundary.BUDGET
        if boundary is Boundary.BUDGET or (boundary is Boundary.TIMEOUT and is_time):
            message = f"{session.budget_exceeded} was reached: {failure.message}"
            return replace(failure, boundary=boundary, message=message)
    elif boundary is Boundary.GATEWAY and engine_error is not None:
        kind, message = type(engine_error).__name__, str(engine_error)
        is_budget = isinstance(engine_error, ContextLengthError) and session.is_used_up
        boundary = Boundary.BUDGET if is_budget else Boundary.ENGINE
        return replace(failure, boundary=boundary, kind=kind, message=message)
    return failure


def check_batch_worked(trajectories: Sequence[Trajectory], what: str) -> None:
    """Stops a run in which nothing works; ``what`` names the batch.

    Raises:
        RolloutFailedError: every trajectory failed at the same boundary with the same
            exception class, none of them through the policy's doing, and none has a reward; or
            none made a call of the model; or none has a reward though agents ended as they should.
    """
    ended = [t for t in trajectories if t.failure is None]
    kept = "The trajectories are kept in the run folder: agentrl inspect-trajectories shows them."
    if ended and not any(t.interactions for t in trajectories):
        # The agents spoke, if at all, to another model: there is no token.
        raise RolloutFailedError(
            f"{what}: none of {len(trajectories)} trajectories called the model through agentrl, "
            "so there is nothing to measure or to learn from. Does the agent give its client a "
            "base_url or a key of another API? Leave them out, and the client leads to agentrl; or "
            "take agentrl's: def build(client, model), or async def solve(data, client, model). "
            + kept,
            trajectories,
        )
    if any(t.reward is not None for t in trajectories):
        return
    if ended:
        raise RolloutFailedError(
            f"{what}: none of {len(trajectories)} trajectories has a reward, and {len(ended)} of "
            "them ended without an error, so there is nothing to measure or to learn from. Let "
            "the function of reward_fn_path return a number (None leaves a trajectory unscored), "
            "or without one let the agent return it or call client.set_final_reward. " + kept,
            trajectories,
        )
    failures = [t.failure for t in trajectories if t.failure is not None]
    if len({(f.boundary, f.kind, f.cause) for f in failures}) != 1:
        return
    first = failures[0]
    if first.cause is FailureCause.POLICY:
        # It may learn otherwise.
        return
    lines = first.traceback.rstrip().splitlines()
    if len(lines) > _SHOWN_LINES:
        # The user's own line stands at the beginning, what was raised at the end.
        lines = [*lines[:_FIRST_LINES], "...", *lines[_FIRST_LINES - _SHOWN_LINES :]]
    raise RolloutFailedError(
        f"{what}: all {len(trajectories)} trajectories failed in the same way, at the boundary "
        f"'{first.boundary}' with {first.kind}: {first.message}\n"
        + "\n".join(f"  | {line}" for line in lines)
        + f"\n{ADVICE[first.boundary]}. {kept}",
        trajectories,
    )


ResultT = TypeVar("ResultT")

_log = get_logger(__name__)

#: How long cancelled code may take to clean up before it is left behind.
GRACE_SECONDS = 5.0


class DeadlineError(Exception):
    """The deadline of a trajectory passed."""


async def run_with_deadline(
    coroutine: Coroutine[Any, Any, ResultT],
    seconds: float,
    what: str,
    *,
    grace: float = 0.0,
    describe_late: Callable[[], str] | None = None,
) -> ResultT:
    """The coroutine's result, or a DeadlineError when it takes longer.

    ``asyncio.timeout`` waits until the cancelled code has ended, which is never when an
    agent catches CancelledError and continues; here such code is cancelled again, then abandoned.
    ``grace`` are seconds after the deadline in which it may still end by itself;
    ``describe_late`` gives a clause to add to the error, once the code has ended.

    Raises:
        DeadlineError: the deadline passed.
    """
    task = asyncio.ensure_future(_contain_exit(coroutine, what))
    try:
        await asyncio.wait({task}, timeout=seconds + grace)
    except asyncio.CancelledError:
        await _end(task, what)
        raise
    if task.done():
        if task.cancelled():
            # Not our doing: something inside cancelled the task that it ran in.
            raise RuntimeError(f"{what} cancelled itself (asyncio.CancelledError)")
        return task.result()
    await _end(task, what)
    more = describe_late() if describe_late is not None else ""
    raise DeadlineError(f"{what} did not finish in {seconds:g} seconds{more}")


async def _contain_exit(coroutine: Coroutine[Any, Any, ResultT], what: str) -> ResultT:
    """The coroutine's result; asyncio would end the whole event loop for a ``sys.exit()``."""
    try:
        return await coroutine
    except SystemExit as error:
        raise RuntimeError(f"{what} called exit({error.code!r})") from error
    except InlineLimitError as error:
        raise BlockingCallError(str(error)) from error


async def _end(task: asyncio.Task[Any], what: str) -> None:
    """Cancels a task until it has ended, for a while."""
    for _ in range(5):
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_SECONDS / 5)
        if task.done():
            if not task.cancelled() and task.exception() is not None:
                _log.debug("%s raised while it was cancelled", what, exc_info=task.exception())
            return
    _log.warning("%s ignored five cancellations and was left running", what)


def _explain_call(
    chain: Sequence[BaseException], own_urls: Collection[str] | None
) -> tuple[bool, str]:
    """Whether a call of the gateway failed, and what its error leaves out, as a clause."""
    error = next((e for e in chain if _is_api_error(e)), None)
    if error is None:
        return False, ""
    # Empty: the error does not say.
    url = str(getattr(getattr(error, "request", None), "url", ""))
    if url and own_urls is not None and not url.startswith(tuple(own_urls)):
        return False, (
            f" (the call went to {url}, not to agentrl. For the model that is trained, "
            "take the client that agentrl gives, or its base_url and api_key)"
        )
    is_unreachable = any(type(e).__name__ == "ConnectError" for e in chain)
    if is_unreachable and url.startswith(str(IN_PROCESS_URL)):
        return True, (
            f" ({url} is answered through `client` and `http_client` alone: for a client "
            "of its own, a function names base_url in its signature)"
        )
    return True, ""


def _is_api_error(error: BaseException) -> bool:
    """Whether an SDK raised it for a call's sake; known by name, not to load what nobody uses."""
    return any(
        t.__name__ == "APIError" and t.__module__.partition(".")[0] in ("openai", "anthropic")
        for t in type(error).__mro__
    )
