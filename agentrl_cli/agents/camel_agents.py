"""Agents of CAMEL: a ChatAgent (or a subclass), and two that play roles, on the tracking client."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from agentrl_cli.agents.agent_runner import (
    AgentCall,
    AgentOutcome,
    AgentRunner,
    find_input,
    run_in_thread,
)
from agentrl_cli.errors import BuilderError, DatasetError
from agentrl_cli.tracking.message_meaning import extract_text

if TYPE_CHECKING:
    from camel.agents import ChatAgent
    from camel.responses import ChatAgentResponse
    from camel.societies import RolePlaying

#: With this the player of the user says that the task is done; CAMEL's prompts ask for it.
_TASK_DONE = "CAMEL_TASK_DONE"
#: Kinds of ChatAgent that put the task into a prompt of their own, in a ``run`` that blocks.
_PROMPTING_KINDS = ("TaskPlannerAgent", "TaskSpecifyAgent")


class CamelAgentRunner(AgentRunner):
    """Runs one step of a ``ChatAgent``, with as many model calls and tools as it takes.

    An agent that CAMEL itself ends (a token limit, ``stop_event``) has said nothing.

    Raises:
        BuilderError: the agent does not speak to the tracked model.
    """

    framework = "CAMEL"
    keeps_history = True

    def __init__(self, agent: ChatAgent, key: str) -> None:
        check_tracked(agent, key)
        self._agent = agent

    async def run(self, call: AgentCall) -> AgentOutcome:
        """The agent's answer to one row."""
        asked = find_input(call.row)
        agent: Any = self._agent
        if isinstance(asked, str) and type(agent).__name__ in _PROMPTING_KINDS:
            text = await run_in_thread(lambda: agent.run(asked), f"CAMEL {type(agent).__name__}")
            return AgentOutcome(final_answer=str(text))
        if not isinstance(asked, str):
            asked = _load_history(self._agent, asked)
        answer = await _finish_step(self._agent, await self._agent.astep(asked))
        return AgentOutcome(final_answer=answer)


class RolePlayingRunner(AgentRunner):
    """Lets two agents talk until the user's player says that the task is done.

    Every run gets players of its own; the answer is the assistant's last message. Rounds are
    limited to half of ``rollout.max_turns``: each takes a call of both players.

    Raises:
        BuilderError: a player does not speak to the tracked model.
    """

    framework = "CAMEL"
    keeps_history = True

    def __init__(self, society: RolePlaying, key: str) -> None:
        for player in (society.assistant_agent, society.user_agent):
            check_tracked(player, key)
        self._society = society

    async def run(self, call: AgentCall) -> AgentOutcome:
        """The assistant's last message in the play about one row."""
        task = find_input(call.row)
        if not isinstance(task, str):
            raise DatasetError(
                "two CAMEL agents that play roles need a task as text: the row holds messages. "
                "Name the text 'question', 'prompt' or 'input'"
            )
        society = await run_in_thread(lambda: self._assign(task), "CAMEL RolePlaying")
        message = await society.ainit_chat()
        answer: str | None = None
        for _ in range(max(1, call.max_turns // 2)):
            assistant, user = await society.astep(message)
            if not user.msgs or not assistant.msgs:
                break
            message, answer = assistant.msgs[0], assistant.msgs[0].content
            if _TASK_DONE in user.msgs[0].content or assistant.terminated or user.terminated:
                break
        return AgentOutcome(final_answer=answer or "")

    def _assign(self, task: str) -> RolePlaying:
        """New players, with the task in their system prompts; specifying it may block."""
        society = self._society
        if society.model is None:
            # CAMEL would make OpenAI's for players that it replaces a moment later.
            society.model = society.assistant_agent.model_backend.current_model
        return society.clone(task)


def check_tracked(agent: ChatAgent, key: str) -> None:
    """Refuses an agent whose calls would go elsewhere: not where the environment leads.

    Raises:
        BuilderError: saying what it speaks to, and what to write.
    """
    if any(_is_tracked(backend) for backend in agent.model_backend.models):
        return
    found = ", ".join(type(backend).__name__ for backend in agent.model_backend.models)
    raise BuilderError(
        f"{key}: the {type(agent).__name__} speaks to {found}, so nothing of it would be recorded. "
        "Leave out url and api_key (CAMEL then takes those that agentrl sets in the environment), "
        "or write: from agentrl_cli import TrackedCamelModel; def build(client, model): return "
        "ChatAgent(..., model=TrackedCamelModel(client, model))"
    )


def _is_tracked(backend: Any) -> bool:
    if hasattr(backend, "tracked_client"):
        return True
    base_url = str(getattr(getattr(backend, "_client", None), "base_url", ""))
    leads = [os.environ.get(name) for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL")]
    return base_url.rstrip("/") in leads


def _load_history(agent: ChatAgent, messages: list[dict[str, Any]]) -> str:
    """Puts all but the last message into the agent's memory; returns the last one's text."""
    from camel.messages import BaseMessage
    from camel.types import OpenAIBackendRole

    *earlier, last = messages
    if last["role"] != "user":
        raise DatasetError(
            f"the row's last message has the role {last['role']!r}; a CAMEL agent answers a user"
        )
    for message in earlier:
        text = extract_text(message.get("content"), "\n")
        if message["role"] in ("system", "developer"):
            agent.append_to_system_message(text) if agent.system_message else (
                agent.update_system_message(text)
            )
        elif message["role"] == "user":
            agent.update_memory(BaseMessage.make_user_message("User", text), OpenAIBackendRole.USER)
        elif message["role"] == "assistant" and not message.get("tool_calls"):
            agent.update_memory(
                BaseMessage.make_assistant_message("assistant", text), OpenAIBackendRole.ASSISTANT
            )
        else:
            raise DatasetError(
                "the row's messages hold tool calls or their results, which a CAMEL agent cannot "
                "be given; allowed are messages of system, user and assistant with text"
            )
    return extract_text(last.get("content"), "\n")


async def _finish_step(agent: ChatAgent, response: Any) -> str:
    """The text that a step ended with; empty: it gave none."""
    if not hasattr(response, "__aiter__"):
        return _read_text(response)
    async for piece in response:
        # Pieces of every reply come; what counts is in the agent's memory afterwards.
        _raise_streamed_error(agent, piece)
    said = agent.chat_history[-1]
    return extract_text(said.get("content")) if said["role"] == "assistant" else ""


def _raise_streamed_error(agent: ChatAgent, response: ChatAgentResponse) -> None:
    """Raises the error that a streaming agent turned into an answer."""
    problem = (response.info or {}).get("error")
    if not problem:
        return
    for backend in agent.model_backend.models:
        error = getattr(backend, "last_error", None)
        if error is not None:
            raise error
    raise RuntimeError(f"CAMEL could not finish the step: {problem}")


def _read_text(response: ChatAgentResponse) -> str:
    """The text of the last message; empty where CAMEL ended the agent itself."""
    return str(response.msgs[-1].content or "") if response.msgs else ""
