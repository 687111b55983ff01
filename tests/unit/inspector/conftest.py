from __future__ import annotations

from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.records import (
    Boundary,
    Failure,
    Interaction,
    InteractionStatus,
    MismatchCause,
    Trajectory,
)
from agentrl_cli.store.run_folder import RunFolder


def message(role: str, content: str | None, **extra: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | extra


CALL = message(
    "assistant",
    None,
    tool_calls=[
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "calculate", "arguments": '{"expression": "17*23"}'},
        }
    ],
)
QUESTION = message("user", "What is 17 x 23?")
RESULT = message("tool", "391", tool_call_id="call_1")


def make_forked() -> Trajectory:
    """Two turns, then two branches of the second; one failed call; one with edited history."""
    first = Interaction(
        id="c1",
        messages=(QUESTION,),
        reply=CALL,
        prompt_ids=(1, 2, 3),
        completion_ids=(4, 5),
        rollout_logprobs=(-0.5, -0.25),
        versions=(3, 4),
        finish_reason="tool_calls",
        started=1,
        ended=2,
        turn_return=1.0,
    )
    branches = tuple(
        Interaction(
            id=name,
            parent_id="c1",
            extends_parent=name == "c2",
            mismatch_cause=None if name == "c2" else MismatchCause.RETOKENIZED,
            messages=(QUESTION, CALL | {"content": ""}, RESULT),
            reply=message("assistant", text),
            prompt_ids=(1, 2, 3, 4, 5, 6),
            completion_ids=(7,),
            rollout_logprobs=(-0.125,),
            versions=(4,),
            finish_reason="stop",
            started=started,
            ended=started + 1,
            reward=reward,
            turn_return=reward,
        )
        for name, text, started, reward in (("c2", "391", 3, 1.0), ("c3", "It is 391.", 5, 0.5))
    )
    failed = Interaction(
        id="c4",
        messages=(QUESTION, message("user", "again")),
        status=InteractionStatus.FAILED,
        error="the engine died",
        started=7,
    )
    return Trajectory(
        id="000001.000/0",
        group_id="000001.000",
        task_id="5",
        step=1,
        task={"question": "What is 17 x 23?", "answer": "391"},
        agent_name="solver",
        interactions=(first, *branches, failed),
        reward=1.0,
        reward_parts={"exact": 1.0},
        final_answer="391",
        seconds=2.0,
    )


def make_simple(
    step: int, index: int, reward: float | None, boundary: Boundary | None = None
) -> Trajectory:
    failure = Failure(boundary=boundary, kind="X", message="went wrong") if boundary else None
    calls = (Interaction(id="c", completion_ids=(1,) * (index + 1), versions=(0,) * (index + 1)),)
    return Trajectory(
        id=f"{step:06d}.000/{index}",
        group_id=f"{step:06d}.000",
        task_id=str(index % 2),
        sample_index=index,
        step=step,
        agent_name="a" if index % 2 else "b",
        interactions=calls,
        reward=reward,
        failure=failure,
        seconds=float(10 - index),
    )


@pytest.fixture
def forked() -> Trajectory:
    return make_forked()


@pytest.fixture
def config(run_config) -> ExperimentConfig:
    return run_config()


@pytest.fixture
def folder(config: ExperimentConfig):
    """Two steps and two evaluations."""
    with RunFolder.create_or_resume(config) as run:
        run.write_trajectories(1, [make_forked(), make_simple(1, 1, 0.0)])
        run.write_trajectories(
            2,
            [
                make_simple(2, 0, 0.5),
                make_simple(2, 1, None, Boundary.TIMEOUT),
                make_simple(2, 2, float("nan"), Boundary.TOOL),
                make_simple(2, 3, 1.0),
            ],
        )
        run.append_metrics({"step": 1})
        run.write_eval(0, [make_simple(0, 0, 0.0)], {})
        run.write_eval(2, [make_simple(900, 0, 1.0)], {}, label="manual")
        run.flush()
        yield run
