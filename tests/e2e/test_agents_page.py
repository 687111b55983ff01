"""The examples of docs/agents.md, saved as a user would save them, and run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.import_paths import import_object

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
#: What an example imports, and the marker of the tests that need it.
FRAMEWORKS = {
    "agents": "openai_agents",
    "camel": "camel",
    "langgraph": "langgraph",
    "anthropic": "anthropic",
}
ROW = {"question": "What is measured in ohm?", "answer": "resistance", "user": "Ann"}

pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")


def list_examples() -> list[Any]:
    examples = []
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)):
        needed = [n for n in FRAMEWORKS if f"from {n}" in code or f"{n}_client" in code]
        marks = [getattr(pytest.mark, FRAMEWORKS[name]) for name in needed]
        examples.append(pytest.param(code, needed, id=str(number), marks=marks))
    return examples


def test_the_page_has_an_example_for_every_framework() -> None:
    assert {name for example in list_examples() for name in example.values[1]} == set(FRAMEWORKS)


@pytest.mark.parametrize(("code", "needed"), list_examples())
async def test_example_runs(
    code: str, needed: list[str], play_agent: Any, tool_call: Any, tmp_path: Path
) -> None:
    for name in needed:
        pytest.importorskip(name)
    path = tmp_path / "my_agent.py"
    path.write_text(code)
    replies = ["resistance"] * code.count("Are you sure?") + ["resistance"]
    if "look_up" in code:
        replies.insert(0, tool_call("look_up", '{"word": "ohm"}'))
    build = import_object(f"{path}:build", "agent_builder_path")
    played = await play_agent(build, *replies, row=ROW)
    trajectory = played.trajectory
    assert (trajectory.failure, trajectory.reward) == (None, 1.0)
    assert (trajectory.final_answer, trajectory.num_turns) == ("resistance", len(replies))
    assert played.prefix_mismatches == []
    if "look_up" in code:
        assert "unit of electrical resistance" in played.prompts[1]
