"""``agentrl compare``: a model before and after, and one behind an endpoint, on the same tasks."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.config_file import load_config
from agentrl_cli.store.run_folder import RunFolder

COMPARE = ("compare", "--config", "c.yaml", "base", "runs/demo/t0")
KEY = "sk-agentrl-of-this-test"
NUM_TASKS = 12
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def folder(folder: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, with a run that has a checkpoint; the agent counts its attempts."""
    monkeypatch.chdir(folder)
    agent = (folder / "agent.py").read_text()
    count = '        open("attempts.txt", "a").write("1")\n        return'
    (folder / "agent.py").write_text(agent.replace("        return", count))
    with (folder / "c.yaml").open("a") as config:
        config.write("rollout: {max_retries: 0}\n")
    rows = [json.dumps({"question": f"What is 1 plus {n}?"}) for n in range(NUM_TASKS)]
    (folder / "tasks.jsonl").write_text("\n".join(rows))
    with (
        RunFolder.create_or_resume(load_config("c.yaml")) as run,
        run.new_checkpoint(1) as checkpoint,
    ):
        shutil.copytree(tiny, checkpoint, dirs_exist_ok=True)
    return folder


def read_json(printed: str) -> dict[str, Any]:
    """What stdout got, between the lines of stderr."""
    found, _ = json.JSONDecoder().raw_decode(printed[printed.index("{\n") :])
    return dict(found)


def test_what_was_evaluated_is_kept_and_an_endpoint_takes_part(
    folder: Path, start: Callable[..., Any], finish: Callable[..., str]
) -> None:
    def count_attempts() -> int:
        return len((folder / "attempts.txt").read_text())

    # Nobody listens there yet: the two before it are evaluated and kept.
    dead = start(*COMPARE, "api:http://127.0.0.1:9/v1#tiny", OPENAI_API_KEY=KEY)
    # Its message ends with the agent's traceback, as of every evaluation that fails as a whole.
    assert dead.process.wait(300) == 1, dead.text
    assert count_attempts() == 2 * NUM_TASKS
    server = start("serve", "--config", "c.yaml", AGENTRL_API_KEY=KEY)
    server.wait_for(" -d ")
    address = re.search(r"OPENAI_BASE_URL=(\S+)", server.text)
    assert address is not None
    endpoint = f"api:{address[1]}#tiny"

    # The run brings the configuration that the first command was given as a file.
    everything = ("--json", "--markdown", "table.md")
    text = finish(*COMPARE[:1], *COMPARE[3:], endpoint, *everything, OPENAI_API_KEY=KEY)
    assert count_attempts() == 3 * NUM_TASKS
    assert "base was evaluated before, as base-" in text
    assert "runs/demo/t0 was evaluated before, as t0-step-000001-" in text
    assert f"model 3 of 3: {endpoint}" in text
    assert KEY not in text
    assert len((folder / "table.md").read_text().split("\n\n")[0].splitlines()) == 5

    found = read_json(text)
    assert [model["report"]["num_tasks"] for model in found["models"]] == [NUM_TASKS] * 3
    for comparison in found["comparisons"]:
        assert (comparison["num_tasks"], comparison["num_unpaired"]) == (NUM_TASKS, 0)
    # Both sample: the same weights do not give the same replies.
    flips = [f for c in found["comparisons"] for f in c["newly_passed"] + c["newly_failed"]]
    for command in flips[0]["show"][1:] if flips else ():
        assert f"task {flips[0]['task_id']}" in finish(*shlex.split(command)[1:], "1")
