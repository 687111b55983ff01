"""Who gets Anthropic's client, which, and what is said where the SDK is missing."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
from openai import AsyncOpenAI

from agentrl_cli.agents.agent_building import adapt_agent
from agentrl_cli.agents.agent_runner import AgentCall
from agentrl_cli.agents.anthropic_sdk import build_anthropic_client
from agentrl_cli.errors import BuilderError, MissingExtraError

URL = "http://agentrl.invalid/v1"
SUPPLIED: dict[str, Any] = {
    "model": "m", "base_url": URL, "api_key": "k", "http_client": None, "max_turns": 3,
}  # fmt: skip


async def test_agents_get_the_client_of_their_colour_on_the_shared_connection() -> None:
    anthropic = pytest.importorskip("anthropic")
    given: list[Any] = []

    async def solve(data: Any, anthropic_client: Any) -> None:
        given.append(anthropic_client)

    def solve_blocking(data: Any, anthropic_client: Any) -> None:
        given.append(anthropic_client)

    async with AsyncOpenAI(base_url=URL, api_key="k", max_retries=0) as client:
        for function in (solve, solve_blocking):
            await adapt_agent(function, "agent_builder_path").run(
                AgentCall(row={}, client=client, **SUPPLIED)
            )
        one, other = given
        assert isinstance(one, anthropic.AsyncAnthropic)
        assert isinstance(other, anthropic.Anthropic)
        assert one._client is client._client
        for sdk in given:
            assert (str(sdk.base_url), sdk.api_key) == ("http://agentrl.invalid", "k")
            assert sdk.max_retries == 0
        await one.close()
        assert not client.is_closed()
        other._client.close()


async def test_who_does_not_name_the_client_needs_no_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_sdk(monkeypatch)

    async def solve(data: Any, **kwargs: Any) -> str:
        return " ".join(sorted(kwargs))

    async with AsyncOpenAI(base_url=URL, api_key="k") as client:
        outcome = await adapt_agent(solve, "k").run(AgentCall(row={}, client=client, **SUPPLIED))
    assert outcome.final_answer == "api_key base_url client http_client max_turns model"


def test_a_missing_sdk_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_sdk(monkeypatch)

    async def solve(data: Any, anthropic_client: Any) -> None:
        raise AssertionError("not called")

    with pytest.raises(
        MissingExtraError, match=r"uv pip install 'agentrl-cli\[anthropic\]'"
    ) as caught:
        adapt_agent(solve, "agent_builder_path")
    assert str(caught.value).startswith("agent_builder_path: ")
    assert "takes anthropic_client" in str(caught.value)


def test_a_client_by_another_name_is_explained() -> None:
    async def solve(data: Any, anthropic: Any) -> None:
        raise AssertionError("not called")

    with pytest.raises(
        BuilderError, match="asks for 'anthropic', which nothing supplies"
    ) as caught:
        adapt_agent(solve, "agent_builder_path")
    assert "anthropic_client" in str(caught.value)


def test_building_one_without_the_sdk_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl_cli.agents import anthropic_sdk

    hide_sdk(monkeypatch)
    anthropic_sdk._load_async_class.cache_clear()
    with pytest.raises(MissingExtraError, match="build_anthropic_client needs Anthropic's SDK"):
        build_anthropic_client(AsyncOpenAI(base_url=URL, api_key="k"))


def hide_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it look as if anthropic were not installed."""
    find = importlib.util.find_spec

    def find_others(name: str, *args: Any) -> Any:
        return None if name == "anthropic" else find(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)
    monkeypatch.setitem(sys.modules, "anthropic", None)
