from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from agentrl_cli.records import Boundary, Failure, Interaction, Trajectory
from agentrl_cli.store.run_folder import RunFolder

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\u202e\x1b[31m"


@pytest.fixture
def hostile_folder(config: Any) -> Iterator[RunFolder]:
    """A run whose every text would like to be markup."""
    message = {"role": HOSTILE, "content": HOSTILE, "name": HOSTILE}
    call = Interaction(
        id=HOSTILE, messages=(message,), reply=message, completion_ids=(1,), turn_return=1.0
    )
    failure = Failure(boundary=Boundary.TOOL, kind=HOSTILE, message=HOSTILE, traceback=HOSTILE)
    with RunFolder.create_or_resume(config) as run:
        run.write_trajectories(
            1,
            [
                Trajectory(
                    id=HOSTILE, group_id=HOSTILE, task_id=HOSTILE, agent_name=HOSTILE,
                    task={HOSTILE: HOSTILE, "question": HOSTILE}, interactions=(call,),
                    reward=1.0, reward_parts={HOSTILE: 1.0}, final_answer=HOSTILE,
                    failure=failure, step=1,
                )
            ],
        )  # fmt: skip
        run.flush()
        yield run
