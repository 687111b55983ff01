"""Agents of the OpenAI Agents SDK: run by its own Runner, on the tracking client."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI

from agentrl_cli.agents.runner import AgentOutcome, BoundaryError
from agentrl_cli.agents.task_input import INPUT_FIELDS, find_input
from agentrl_cli.records import Boundary

if TYPE_CHECKING:
    from agents import Agent, ModelProvider, ModelSettings


class OpenAIAgentRunner:
    """Runs an ``agents.Agent``; tools, handoffs, sub-agents and guardrails work as they are.

    Agents whose model is a name, or none, are served by the tracked model; an agent that
    holds a ``Model`` object keeps it (a judge on another API, say), and is tracked only if
    that object was made with the tracking client.
    """

    framework = "OpenAI Agents SDK"
    gives_rewards = False
    needs_base_url = False
    input_fields = INPUT_FIELDS

    def __init__(self, agent: Agent[Any]) -> None:
        self._agent = agent

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

        config = agents.RunConfig(
            model_provider=_provider_class()(client, model),
            # The SDK would send traces to OpenAI whenever a key is set.
            tracing_disabled=True,
        )
        # The SDK's input type names every kind of item that it knows; rows hold plain messages.
        asked: Any = find_input(data)
        try:
            result = await agents.Runner.run(
                self._agent, asked, max_turns=max_turns, run_config=config
            )
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
        return AgentOutcome(final_answer=_format_output(result.final_output))


@cache
def _provider_class() -> Any:
    """The provider's class, made on first use: the SDK is an optional package."""
    from agents import Model, OpenAIChatCompletionsModel, OpenAIProvider

    class TrackedModel(OpenAIChatCompletionsModel):
        """The served model, without settings that the SDK added for another model."""

        async def get_response(self, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = _replace_settings(args, kwargs)
            return await super().get_response(*args, **kwargs)

        def stream_response(self, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = _replace_settings(args, kwargs)
            return super().stream_response(*args, **kwargs)

    class TrackedProvider(OpenAIProvider):
        """Serves every name with the tracked model."""

        def __init__(self, client: AsyncOpenAI, served_name: str) -> None:
            super().__init__(openai_client=client, use_responses=False)
            self._tracked = TrackedModel(model=served_name, openai_client=client)

        def get_model(self, model_name: str | None) -> Model:
            del model_name
            return self._tracked

    provider: type[ModelProvider] = TrackedProvider
    return provider


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


def _format_output(output: Any) -> str | None:
    """The final output as text: structured output as JSON."""
    if output is None or isinstance(output, str):
        return output
    if hasattr(output, "model_dump_json"):
        return str(output.model_dump_json())
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        output = dataclasses.asdict(output)
    return json.dumps(output, ensure_ascii=False, default=str)
