"""Agents of the OpenAI Agents SDK: run by its own Runner, on the tracking client."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from openai import AsyncOpenAI

from agentrl_cli.agents.openai_provider import AgentApi, build_run_config
from agentrl_cli.agents.runner import AgentOutcome, BoundaryError
from agentrl_cli.agents.task_input import INPUT_FIELDS, find_input
from agentrl_cli.log import get_logger
from agentrl_cli.records import Boundary

if TYPE_CHECKING:
    from agents import Agent

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AgentRun:
    """An agent with how it is run; a builder may return one instead of the bare agent."""

    agent: Agent[Any]
    api: AgentApi = "chat"
    """OpenAI's API that its calls go through."""
    delivery: Literal["whole", "streamed"] = "whole"
    """``streamed``: by ``Runner.run_streamed``, its events read to the end."""
    build_context: Callable[[Mapping[str, Any]], Any] | None = None
    """Makes the run's ``context``, for tools and instructions, from the dataset row."""

    def __post_init__(self) -> None:
        """Refuses values that the type forbids: they often come from a YAML file."""
        for name, allowed in (("api", ("chat", "responses")), ("delivery", ("whole", "streamed"))):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"AgentRun({name}={getattr(self, name)!r}): allowed are {' and '.join(allowed)}"
                )


class OpenAIAgentRunner:
    """Runs an ``agents.Agent``; tools, handoffs, sub-agents and guardrails work as they are.

    Agents whose model is a name, or none, are served by the tracked model; an agent that
    holds a ``Model`` object keeps it (a judge on another API, say), and is tracked only if
    that object was made with the tracking client.

    A guardrail that trips is an end of the agent's own: it then has said nothing, and the
    reward function judges an empty answer.
    """

    framework = "OpenAI Agents SDK"
    gives_rewards = False
    needs_client = False
    needs_base_url = False
    input_fields = INPUT_FIELDS

    def __init__(self, described: AgentRun) -> None:
        self._described = described

    async def run(
        self,
        data: Mapping[str, Any],
        client: AsyncOpenAI,
        *,
        model: str,
        base_url: str,
        api_key: str,
        http_client: Any,
        max_turns: int,
    ) -> AgentOutcome:
        """The agent's final output on one row. Raises BoundaryError for tools and turn limits."""
        del base_url, api_key, http_client
        import agents

        tripwires = (
            agents.InputGuardrailTripwireTriggered,
            agents.OutputGuardrailTripwireTriggered,
            agents.ToolInputGuardrailTripwireTriggered,
            agents.ToolOutputGuardrailTripwireTriggered,
        )
        try:
            output = await self._run(data, client, model, max_turns)
        except tripwires as error:
            _log.info("an agent ended by its guardrail: %s", error)
            return AgentOutcome(final_answer="")
        except agents.ModelBehaviorError as error:
            # A reply that ``max_tokens`` cut off: an error through responses, a text through
            # chat. It is judged by what it says either way, or models would not learn to end.
            if "max_output_tokens" not in str(error):
                raise
            return AgentOutcome()
        except agents.MaxTurnsExceeded as error:
            raise BoundaryError(Boundary.BUDGET, error) from error
        except (agents.ToolTimeoutError, agents.MCPToolCancellationError) as error:
            raise BoundaryError(Boundary.TOOL, error) from error
        except agents.UserError as error:
            # So the SDK wraps what a tool raised when the tool has no failure_error_function;
            # with one (the default), the model is told of the error and the run goes on.
            if error.__cause__ is None or not str(error).startswith("Error running tool"):
                raise
            raise BoundaryError(Boundary.TOOL, error.__cause__) from error
        return AgentOutcome(final_answer=_format_output(output))

    async def _run(
        self, data: Mapping[str, Any], client: AsyncOpenAI, model: str, max_turns: int
    ) -> Any:
        from agents import Runner

        described = self._described
        # The SDK's input type names every kind of item that it knows; rows hold plain messages.
        asked: Any = find_input(data)
        options: dict[str, Any] = {
            "max_turns": max_turns,
            "run_config": build_run_config(client, model, api=described.api),
        }
        if described.build_context is not None:
            # A copy: an agent that writes into its row must not change its siblings' row.
            options["context"] = described.build_context(dict(data))
        if described.delivery == "whole":
            return (await Runner.run(described.agent, asked, **options)).final_output
        result = Runner.run_streamed(described.agent, asked, **options)
        try:
            async for _ in result.stream_events():
                """Nobody watches: what counts is what is recorded meanwhile."""
        finally:
            # A run that is left in its midst would go on in tasks of its own.
            result.cancel()
        if result.run_loop_exception is not None:
            raise result.run_loop_exception
        return result.final_output


def _format_output(output: Any) -> str | None:
    """The final output as text: structured output as JSON."""
    if output is None or isinstance(output, str):
        return output
    if hasattr(output, "model_dump_json"):
        return str(output.model_dump_json())
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        output = dataclasses.asdict(output)
    return json.dumps(output, ensure_ascii=False, default=str)
