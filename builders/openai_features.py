"""More of the OpenAI Agents SDK: responses, streams, guardrails, and memory over several runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agents import (
    Agent,
    GuardrailFunctionOutput,
    RunContextWrapper,
    Runner,
    SQLiteSession,
    output_guardrail,
)
from openai import AsyncOpenAI

from agentrl_cli import AgentRun, build_run_config
from agentrl_cli.agents.openai_agents import AgentApi
from builders.calculator_agent import build_calculator_agent


def build_calculator_run(api: AgentApi = "responses", delivery: Any = "whole") -> AgentRun:
    """The calculator's agent through ``/v1/responses``, or as ``agent_builder_kwargs`` say."""
    return AgentRun(build_calculator_agent(), api=api, delivery=delivery)


@output_guardrail
async def refuse_words(
    context: RunContextWrapper[Any], agent: Agent[Any], output: Any
) -> GuardrailFunctionOutput:
    """Trips when the answer has no digit: the run ends, and the reward judges an empty answer."""
    del context, agent
    has_digit = any(character.isdigit() for character in str(output))
    return GuardrailFunctionOutput(output_info=None, tripwire_triggered=not has_digit)


def build_guarded_agent() -> Agent:
    """The calculator's agent, held to numbers by a guardrail."""
    agent = build_calculator_agent()
    agent.output_guardrails.append(refuse_words)
    return agent


class Conversation:
    """Asks twice in one conversation that a session remembers."""

    async def run(
        self, data: Mapping[str, Any], client: AsyncOpenAI, model: str, max_turns: int
    ) -> str:
        """The second answer."""
        # In memory, and new for every trajectory: what one remembers is not another's.
        session = SQLiteSession("this trajectory")
        config = build_run_config(client, model)
        try:
            for text in (data["question"], "Are you sure? Calculate, and answer again."):
                result = await Runner.run(
                    build_calculator_agent(),
                    text,
                    session=session,
                    run_config=config,
                    max_turns=max_turns,
                )
        finally:
            session.close()
        return str(result.final_output)


def build_conversation() -> Conversation:
    """An agent with a memory over two runs."""
    return Conversation()
