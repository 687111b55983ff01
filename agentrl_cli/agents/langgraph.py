"""Graphs of LangGraph, and LangChain's chat model, on the tracking client."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from openai import AsyncOpenAI, OpenAI

from agentrl_cli.agents.agent_runner import (
    AgentCall,
    AgentOutcome,
    AgentRunner,
    BoundaryError,
    find_input,
)
from agentrl_cli.blocking_clients import build_client_pair
from agentrl_cli.errors import BuilderError, MissingExtraError
from agentrl_cli.records import Boundary
from agentrl_cli.tracking.message_meaning import extract_text

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI
    from langgraph.graph.state import CompiledStateGraph


def build_chat_model(client: AsyncOpenAI | OpenAI, model: str, **options: Any) -> ChatOpenAI:
    """LangChain's ``ChatOpenAI`` on the tracking client; works in ``invoke`` and ``ainvoke``.

    Args:
        client: the ``client`` that a builder or an agent function is given.
        model: the ``model`` likewise.
        options: further arguments of ``ChatOpenAI``, such as ``temperature``, ``streaming`` or
            ``use_responses_api``.

    Raises:
        MissingExtraError: langchain-openai is not installed.
    """
    try:
        from langchain_openai import ChatOpenAI
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"build_chat_model needs langchain-openai, which is not installed or incomplete "
            f"({error}). Type uv pip install 'agentrl-cli[langgraph]'"
        ) from error

    blocking, waiting = build_client_pair(client)
    return ChatOpenAI(
        **{
            "model": model,
            "api_key": client.api_key,
            "base_url": str(client.base_url),
            "root_async_client": waiting,
            "async_client": waiting.chat.completions if waiting is client else waiting,
            "root_client": blocking,
            "client": blocking.chat.completions,
            **options,
        }
    )


@dataclass(frozen=True, slots=True)
class GraphRun:
    """A compiled graph with how it is run; a builder may return one instead of the bare graph."""

    graph: CompiledStateGraph[Any, Any, Any, Any]
    delivery: Literal["whole", "streamed"] = "whole"
    """``streamed``: by ``astream``, so that chat models stream their tokens."""

    def __post_init__(self) -> None:
        """Refuses values that the type forbids: they often come from a YAML file."""
        if self.delivery not in ("whole", "streamed"):
            raise ValueError(
                f"GraphRun(delivery={self.delivery!r}): allowed are whole and streamed"
            )


class GraphRunner(AgentRunner):
    """Runs a graph whose state has ``messages``; the answer is the last message's text.

    Raises:
        BuilderError: the state has no ``messages``.
    """

    framework = "LangGraph"

    def __init__(self, described: GraphRun, key: str) -> None:
        # Besides the state, LangGraph keeps channels of its own: __start__, branch:to:answer.
        channels = sorted(
            name for name in described.graph.channels if ":" not in name and name[:2] != "__"
        )
        if "messages" not in channels:
            raise BuilderError(
                f"{key}: the graph's state has no 'messages' (it has {', '.join(channels)}), so "
                "agentrl does not know how to ask it. Add messages to its state (MessagesState), "
                "or return an async def solve(data) that calls graph.ainvoke itself"
            )
        self._described = described

    async def run(self, call: AgentCall) -> AgentOutcome:
        """The graph's last message on one row. Raises BoundaryError for tools and step limits."""
        from langgraph.errors import GraphRecursionError

        asked = find_input(call.row)
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        watch = _build_tool_watch()
        config = {
            "callbacks": [watch],
            # For graphs with a checkpointer; what one trajectory keeps is not another's.
            "configurable": {"thread_id": uuid.uuid4().hex},
        }
        try:
            state = await self._invoke({"messages": messages}, config)
        except GraphRecursionError as error:
            raise BoundaryError(Boundary.BUDGET, error) from error
        except Exception as error:
            if error is watch.error:
                raise BoundaryError(Boundary.TOOL, error) from error
            raise
        return AgentOutcome(final_answer=_read_answer(state))

    async def _invoke(self, asked: dict[str, Any], config: dict[str, Any]) -> Any:
        graph: Any = self._described.graph
        if self._described.delivery == "whole":
            return await graph.ainvoke(asked, config)
        state = None
        # With "messages" among the modes, chat models stream; "values" gives the last state.
        async for mode, item in graph.astream(asked, config, stream_mode=["messages", "values"]):
            if mode == "values":
                state = item
        return state


def _build_tool_watch() -> Any:
    """A callback that keeps the last error that a tool raised, as ``error``."""
    from langchain_core.callbacks import AsyncCallbackHandler

    class ToolWatch(AsyncCallbackHandler):
        error: BaseException | None = None

        async def on_tool_error(self, error: BaseException, **kwargs: Any) -> None:
            del kwargs
            self.error = error

    return ToolWatch()


def _read_answer(state: Any) -> str:
    """The text of the state's last message; empty where it is not the model's."""
    messages = state.get("messages") if isinstance(state, Mapping) else None
    if not messages or getattr(messages[-1], "type", None) != "ai":
        return ""
    content = messages[-1].content
    if isinstance(content, list):
        content = [part for part in content if isinstance(part, dict)]
    return extract_text(content)
