"""The OpenAI Agents SDK's way to the tracked model: provider and run configuration."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from openai import AsyncOpenAI, OpenAI

from agentrl_cli.tracking.blocking_client import BlockingCallError

if TYPE_CHECKING:
    from agents import Model, ModelProvider, ModelSettings, RunConfig

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
        options: what ``RunConfig`` takes besides.

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
