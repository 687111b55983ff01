"""Every framework, by every protocol that it speaks, streamed and not, wherever it runs.

Each cell is one conversation of four turns and four tool calls, text beside the first and two at
once in the third, and one check: what is exported is what the engine sampled, token by token.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.agents.agent_building import AgentSource
from agentrl_cli.config.import_paths import import_object
from agentrl_cli.errors import BuilderError
from agentrl_cli.records import InteractionStatus, Trajectory

AGENTS = Path(__file__).with_name("matrix_agents.py")

pytestmark = [
    pytest.mark.slow,
    # CAMEL's advice about the example's tool, whose schema the built-in model was made for.
    pytest.mark.filterwarnings("ignore:Parameter description is missing:UserWarning"),
    # LangGraph 1 points to LangChain's agents, which are another package.
    pytest.mark.filterwarnings("ignore:create_react_agent has been moved"),
]


@dataclasses.dataclass(frozen=True)
class Framework:
    """A row of the matrix."""

    package: str
    marker: str
    protocols: tuple[str, ...]
    builder: str
    mismatches: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    """By delivery: the causes of the mismatches that the framework makes; none elsewhere."""


PROTOCOLS = {"chat": "chatcmpl-", "responses": "resp_", "messages": "msg_"}
"""What the ids of their replies begin with."""
DELIVERIES = ("whole", "streamed")
MODES = ("inline", "subprocess", "external")
FRAMEWORKS = {
    "openai-agents": Framework(
        "agents",
        "openai_agents",
        ("chat", "responses"),
        "builders.openai_features.build_calculator_run",
    ),
    "camel": Framework(
        "camel",
        "camel",
        ("chat",),
        "builders.camel_agent.build_chat_agent",
        # It sends a streamed turn back without the text that stood beside its tool call.
        mismatches={"streamed": ["history_edited"]},
    ),
    "langgraph": Framework(
        "langgraph",
        "langgraph",
        ("chat", "responses"),
        "builders.langgraph_agent.build_calculator_graph",
    ),
    "openai": Framework("openai", "slow", ("chat", "responses"), f"{AGENTS}:build_function"),
    "openai-blocking": Framework(
        "openai", "slow", ("chat", "responses"), f"{AGENTS}:build_blocking_function"
    ),
    "anthropic": Framework("anthropic", "anthropic", ("messages",), f"{AGENTS}:build_anthropic"),
    "anthropic-blocking": Framework(
        "anthropic", "anthropic", ("messages",), f"{AGENTS}:build_blocking_anthropic"
    ),
}
CELLS = [
    pytest.param(
        framework, protocol, delivery, mode,
        id=f"{framework}-{protocol}-{delivery}-{mode}",
        marks=getattr(pytest.mark, FRAMEWORKS[framework].marker),
    )
    for framework in FRAMEWORKS
    for mode in MODES
    for protocol in FRAMEWORKS[framework].protocols
    for delivery in DELIVERIES
]  # fmt: skip


def list_agents(framework: str) -> dict[str, Any]:
    """The ``agents`` of a configuration: one for each protocol and delivery."""
    row = FRAMEWORKS[framework]
    return {
        f"{protocol}-{delivery}": {
            "agent_builder_path": row.builder,
            "agent_builder_kwargs": {"delivery": delivery}
            # CAMEL's builder has no choice to offer.
            | ({} if framework == "camel" else {"api": protocol}),
        }
        for protocol in row.protocols
        for delivery in DELIVERIES
    }


def play_elsewhere(
    service: Any, run_program: Callable[..., str], framework: str, protocol: str, delivery: str
) -> Trajectory:
    """A program's session. A framework's first cell is a process of its own, as all would be."""
    question = "What is 20 + 22?"
    is_first = (protocol, delivery) == (FRAMEWORKS[framework].protocols[0], DELIVERIES[0])

    def start_process(session: Mapping[str, Any]) -> str:
        done = subprocess.run(
            [sys.executable, str(AGENTS), framework, protocol, delivery, question],
            env=os.environ
            | {
                "OPENAI_BASE_URL": session["base_urls"]["openai"],
                "OPENAI_API_KEY": session["api_key"],
                "ANTHROPIC_BASE_URL": session["base_urls"]["anthropic"],
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        # CAMEL writes its warnings before the answer.
        return done.stdout.splitlines()[-1]

    def run_here(session: Mapping[str, Any]) -> str:
        urls = session["base_urls"]
        place = import_object(f"{AGENTS}:Place", "the matrix")(
            urls["openai"], urls["anthropic"], session["api_key"], session["model"]
        )
        return run_program(framework, protocol, delivery, question, place)

    return service.play(start_process if is_first else run_here)


@pytest.mark.parametrize(("framework", "protocol", "delivery", "mode"), CELLS)
def test_every_cell_trains_what_was_sampled(
    engine: Any, request: pytest.FixtureRequest, run_program: Callable[..., str],
    check_tensors: Callable[..., None],
    framework: str, protocol: str, delivery: str, mode: str,
) -> None:  # fmt: skip
    row = FRAMEWORKS[framework]
    pytest.importorskip(row.package)
    engine.sampled.clear()
    engine.deliveries.clear()
    if mode == "external":
        service = request.getfixturevalue("online_service")
        trajectory = play_elsewhere(service, run_program, framework, protocol, delivery)
    else:
        own = request.getfixturevalue("own_agents")
        trajectory = own.play(mode, list_agents(framework), f"{protocol}-{delivery}")
    assert trajectory.failure is None
    assert (trajectory.reward, trajectory.final_answer) == (1.0, "It is 42.")
    assert (trajectory.num_turns, trajectory.num_tool_calls) == (4, 4)
    assert all(i.id.startswith(PROTOCOLS[protocol]) for i in trajectory.interactions)
    assert engine.deliveries == [delivery] * 4
    mismatches = [i.mismatch_cause for i in trajectory.interactions if i.mismatch_cause is not None]
    assert mismatches == row.mismatches.get(delivery, [])
    assert [i.extends_parent for i in trajectory.interactions].count(True) == 3 - len(mismatches)
    # Broken or not, the outcome reaches every turn.
    assert [i.turn_return for i in trajectory.interactions] == [1.0] * 4
    check_tensors([trajectory], engine)


@pytest.mark.parametrize(
    "change",
    [
        lambda i: {"completion_ids": i.completion_ids[::-1]},
        lambda i: {"rollout_logprobs": (0.0, *i.rollout_logprobs[1:])},
        lambda i: {"versions": tuple(v + 1 for v in i.versions)},
        lambda i: {"prompt_ids": i.prompt_ids[1:]},
        lambda _: {"temperature": 0.0},
        lambda _: {"status": InteractionStatus.FAILED},
    ],
)
@pytest.mark.parametrize("turn", [0, 3])
def test_the_check_of_every_cell_finds_what_was_not_sampled(
    engine: Any, own_agents: Any, check_tensors: Callable[..., None], turn: int, change: Any
) -> None:
    engine.sampled.clear()
    trajectory = own_agents.play("inline", list_agents("openai"), "chat-whole")
    check_tensors([trajectory], engine)
    interactions = list(trajectory.interactions)
    interactions[turn] = dataclasses.replace(interactions[turn], **change(interactions[turn]))
    wrong = dataclasses.replace(trajectory, interactions=tuple(interactions))
    with pytest.raises(AssertionError):
        check_tensors([wrong], engine)


@pytest.mark.openai_agents
def test_openai_agents_refuse_messages() -> None:
    pytest.importorskip("agents")
    builder = import_object(FRAMEWORKS["openai-agents"].builder, "k")
    with pytest.raises(BuilderError, match=r"api='messages'\): allowed are chat and responses"):
        AgentSource(builder, {"api": "messages"}, "k")
