"""Agents of the OpenAI Agents SDK: run by its own Runner, on the tracking client."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from openai import AsyncOpenAI, OpenAI

from agentrl_cli.agents.agent_runner import (
    AgentCall,
    AgentOutcome,
    AgentRunner,
    BoundaryError,
    find_input,
)
from agentrl_cli.blocking_clients import BlockingCallError
from agentrl_cli.log import get_logger
from agentrl_cli.records import Boundary

if TYPE_CHECKING:
    from agents import Agent, Model, ModelProvider, ModelSettings, RunConfig

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


class OpenAIAgentRunner(AgentRunner):
    """Runs an ``agents.Agent``; tools, handoffs, sub-agents and guardrails work as they are.

    Agents whose model is a name, or none, are served by the tracked model; an agent that
    holds a ``Model`` object keeps it (a judge on another API, say), and is tracked only if
    that object was made with the tracking client.

    A guardrail that trips is an end of the agent's own: it then has said nothing, and the
    reward function judges an empty answer.
    """

    framework = "OpenAI Agents SDK"

    def __init__(self, described: AgentRun) -> None:
        self._described = described

    async def run(self, call: AgentCall) -> AgentOutcome:
        """The agent's final output on one row. Raises BoundaryError for tools and turn limits."""
        import agents

        tripwires = (
            agents.InputGuardrailTripwireTriggered,
            agents.OutputGuardrailTripwireTriggered,
            agents.ToolInputGuardrailTripwireTriggered,
            agents.ToolOutputGuardrailTripwireTriggered,
        )
        try:
            output = await self._run(call)
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
            # with one (the default), the model is told of the error and the run continues.
            if error.__cause__ is None or not str(error).startswith("Error running tool"):
                raise
            raise BoundaryError(Boundary.TOOL, error.__cause__) from error
        return AgentOutcome(final_answer=_format_output(output))

    async def _run(self, call: AgentCall) -> Any:
        from agents import Runner

        described = self._described
        # The SDK's input type names every kind of item that it knows; rows hold plain messages.
        asked: Any = find_input(call.row)
        options: dict[str, Any] = {
            "max_turns": call.max_turns,
            "run_config": build_run_config(call.client, call.model, api=described.api),
        }
        if described.build_context is not None:
            # A copy: an agent that writes into its row must not change its siblings' row.
            options["context"] = described.build_context(dict(call.row))
        if described.delivery == "whole":
            return (await Runner.run(described.agent, asked, **options)).final_output
        result = Runner.run_streamed(described.agent, asked, **options)
        try:
            async for _ in result.stream_events():
                """Nobody watches: what counts is what is recorded meanwhile."""
        finally:
            # A run that is abandoned midway would continue in tasks of its own.
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


#: Through which of OpenAI's APIs the SDK speaks: chat completions or responses.
AgentApi = Literal["chat", "responses"]


def build_run_config(
    client: AsyncOpenAI | OpenAI, model: str, *, api: AgentApi = "chat", **options: Any
) -> RunConfig:
    """The ``RunConfig`` with which ``Runner.run`` speaks to the tracked model.

    For agents that you run yourself, in a function of your own: with a session, hooks, or
    several runs in one trajectory.

    Args:
        client: the ``client`` that the function or the builder was given.
        model: the ``model`` likewise.
        api: ``chat`` or ``responses``.
        options: further arguments of ``RunConfig``.

    Raises:
        BlockingCallError: the client blocks, as that of a function which is not async does;
            the SDK awaits its calls, also in ``Runner.run_sync``.
    """
    from agents import RunConfig

    if isinstance(client, OpenAI):
        raise BlockingCallError(
            "build_run_config was given the client of a function that is not async, and the "
            "OpenAI Agents SDK awaits its calls (Runner.run_sync does too). Write async def "
            "solve(data, client, model), and in it: await Runner.run(...)"
        )

    settings: dict[str, Any] = {
        "model_provider": build_provider(client, model, api),
        # The SDK would send traces to OpenAI whenever a key is set.
        "tracing_disabled": True,
    }
    return RunConfig(**(settings | options))


def build_provider(client: AsyncOpenAI, model: str, api: AgentApi) -> ModelProvider:
    """A provider that serves every name with the tracked model."""
    return _provider_class()(client, model, api)


@cache
def _provider_class() -> Any:
    """The provider's class, made on first use: the SDK is an optional package."""
    from agents import OpenAIChatCompletionsModel, OpenAIProvider, OpenAIResponsesModel

    class NeutralSettings:
        """Leaves out settings that the SDK added for another model."""

        async def get_response(self, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = _replace_settings(args, kwargs)
            return await super().get_response(*args, **kwargs)  # type: ignore[misc]

        def stream_response(self, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = _replace_settings(args, kwargs)
            return super().stream_response(*args, **kwargs)  # type: ignore[misc]

    class TrackedChatModel(NeutralSettings, OpenAIChatCompletionsModel):
        """The served model, through chat completions."""

    class TrackedResponsesModel(NeutralSettings, OpenAIResponsesModel):
        """The served model, through responses."""

    class TrackedProvider(OpenAIProvider):
        """Serves every name with the tracked model."""

        def __init__(self, client: AsyncOpenAI, served_name: str, api: AgentApi) -> None:
            super().__init__(openai_client=client, use_responses=api == "responses")
            kind = TrackedResponsesModel if api == "responses" else TrackedChatModel
            self._tracked = kind(model=served_name, openai_client=client)

        def get_model(self, model_name: str | None) -> Model:
            del model_name
            return self._tracked

    return TrackedProvider


def _replace_settings(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model call with its settings (third, or by name) made neutral."""
    if "model_settings" in kwargs:
        return args, {**kwargs, "model_settings": _drop_implicit(kwargs["model_settings"])}
    return (*args[:2], _drop_implicit(args[2]), *args[3:]), kwargs


def _drop_implicit(settings: ModelSettings) -> ModelSettings:
    """Settings without the reasoning effort and verbosity that the SDK gives by default.

    An agent without a model gets those of OpenAI's current default model; sent on, they
    would be refused by any other server. What differs from them was chosen by the user.
    """
    from agents.models import get_default_model_settings

    implicit = get_default_model_settings()
    changes: dict[str, Any] = {}
    if settings.reasoning is not None and settings.reasoning == implicit.reasoning:
        changes["reasoning"] = None
    if settings.verbosity is not None and settings.verbosity == implicit.verbosity:
        changes["verbosity"] = None
    return dataclasses.replace(settings, **changes) if changes else settings
