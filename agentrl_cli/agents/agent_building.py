"""Calling agent builders: once for a run, or once for every trajectory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from openai import AsyncOpenAI

from agentrl_cli.agents.agent_runner import AgentRunner
from agentrl_cli.agents.camel_agents import CamelAgentRunner, RolePlayingRunner
from agentrl_cli.agents.langgraph import GraphRun, GraphRunner
from agentrl_cli.agents.openai_agents import AgentRun, OpenAIAgentRunner
from agentrl_cli.agents.plain_python import CallableRunner, is_async
from agentrl_cli.config.import_paths import advise_extra, import_object
from agentrl_cli.config.user_code import find_own_line
from agentrl_cli.errors import BuilderError, InlineLimitError

if TYPE_CHECKING:
    from agentrl_cli.config.experiment import ExperimentConfig

#: What a builder gets besides ``agent_builder_kwargs``, if its signature names it.
SUPPLIED = ("client", "model")


class AgentSource:
    """The agent of a config key, as often as trajectories need it.

    A builder that names ``client`` is called for every trajectory: what it returns belongs
    to that trajectory alone; so is one whose agent holds its conversation, as CAMEL's do. Any
    other builder is called once (once for each served name, if it names ``model``), and
    trajectories that run at the same time share what it returned:
    right for agents that are descriptions (an ``agents.Agent``) or functions; an object that
    keeps something about the task in ``self`` should name ``client`` in its builder.

    Args:
        builder: the user's function.
        kwargs: ``agent_builder_kwargs``.
        key: the config key, for messages.
        trial: ``now``: it is found out at once whether the builder works; ``never``: that was
            found out elsewhere.

    Raises:
        BuilderError: the builder cannot be called with these arguments, raises, or returns
            something unknown (found out by building once with a client that leads nowhere).
    """

    def __init__(
        self,
        builder: Callable[..., Any],
        kwargs: Mapping[str, Any],
        key: str,
        *,
        trial: Literal["now", "never"] = "now",
    ) -> None:
        self._builder = builder
        self._kwargs = dict(kwargs)
        self._key = key
        self._supplied = self._check_signature()
        self.per_trajectory = "client" in self._supplied
        self._by_model: dict[str, AgentRunner] = {}
        if trial == "now":
            _ = self.runner

    @cached_property
    def runner(self) -> AgentRunner:
        """The agent as built on trial: tells what it is; run where it can be shared.

        Raises:
            BuilderError: the builder raises, or returns something unknown.
        """
        stand_in = None
        if self.per_trajectory:
            # Tens of milliseconds, which a worker process would pay for nothing.
            stand_in = AsyncOpenAI(base_url="http://agentrl.invalid/v1", api_key="opens-nothing")
        try:
            built = self._build(stand_in, "model")
        except (Exception, SystemExit) as error:
            raise BuilderError(self._describe_raised(error)) from error
        return adapt_agent(built, self._key)

    def get_runner(self, client: AsyncOpenAI, model: str) -> AgentRunner:
        """The agent for one trajectory. Raises what the builder raises."""
        if not self._supplied and not self.runner.keeps_history:
            return self.runner
        if not self.per_trajectory and model in self._by_model:
            return self._by_model[model]
        runner = adapt_agent(self._build(client, model), self._key)
        if not self.per_trajectory and not runner.keeps_history:
            self._by_model[model] = runner
        return runner

    def check_inline(self) -> None:
        """Raises InlineLimitError where trajectories in one process would share a history."""
        if self._shared is not None:
            raise InlineLimitError(
                f"{self._key}: the builder's module keeps a CAMEL agent in its global "
                f"{self._shared!r}, which remembers every task that it is given. Make it in the "
                "builder or in the function that runs on a row, or set rollout.agent_mode: "
                "subprocess"
            )

    @cached_property
    def _shared(self) -> str | None:
        """The global that holds an agent with a history, as CAMEL's examples make them."""
        module = inspect.getmodule(self._builder)
        for name, value in vars(module).items() if module is not None else ():
            if any(_is_kind_of(value, *kind) for kind in _CAMEL_KINDS):
                return name
        return None

    def _build(self, client: AsyncOpenAI | None, model: str) -> Any:
        values = {"client": client, "model": model}
        return self._builder(**self._kwargs, **{name: values[name] for name in self._supplied})

    def _check_signature(self) -> tuple[str, ...]:
        name = getattr(self._builder, "__qualname__", type(self._builder).__name__)
        if not callable(self._builder):
            raise BuilderError(
                f"{self._key}: {type(self._builder).__name__} is not a function. Name a function "
                "that returns the agent: def build(): return agent"
            )
        if inspect.iscoroutinefunction(self._builder):
            raise BuilderError(
                f"{self._key}: {name} is async. A builder is a plain def that returns the agent; "
                f"if {name} is the agent itself, wrap it: def build(): return {name}"
            )
        signature = inspect.signature(self._builder)
        named = {
            n
            for n, p in signature.parameters.items()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        supplied = tuple(n for n in SUPPLIED if n in named and n not in self._kwargs)
        try:
            signature.bind(**self._kwargs, **dict.fromkeys(supplied))
        except TypeError as error:
            raise BuilderError(
                f"{self._key}: {name}{signature} cannot be called: {error}. It gets "
                f"agent_builder_kwargs ({', '.join(self._kwargs) or 'empty'}) and, if it names "
                f"them, {' and '.join(SUPPLIED)}"
            ) from None
        return supplied

    def _describe_raised(self, error: BaseException) -> str:
        line = find_own_line(error, besides=(__file__,))
        return (
            f"{self._key}: the builder raised {type(error).__name__}: {error}{advise_extra(error)}"
            + (f"\n  at {line}" if line else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """An agent of the configuration, by name."""

    path: str
    """Where its builder is."""
    kwargs: dict[str, Any]
    key: str
    """The config key, for messages."""

    def load(self, *, trial: Literal["now", "never"] = "now") -> AgentSource:
        """The agent's source.

        Raises:
            ImportPathError: the path leads to nothing.
            BuilderError: as :class:`AgentSource`.
        """
        return AgentSource(import_object(self.path, self.key), self.kwargs, self.key, trial=trial)


def list_agent_specs(config: ExperimentConfig) -> dict[str | None, AgentSpec]:
    """The agents by name; None is the one for rows without ``agent_name``."""
    specs: dict[str | None, AgentSpec] = {}
    if config.agent_builder_path is not None:
        specs[None] = AgentSpec(
            path=config.agent_builder_path,
            kwargs=dict(config.agent_builder_kwargs),
            key="agent_builder_path",
        )
    for name, agent in config.agents.items():
        specs[name] = AgentSpec(
            path=agent.agent_builder_path,
            kwargs=dict(agent.agent_builder_kwargs),
            key=f"agents.{name}.agent_builder_path",
        )
    return specs


#: Whose objects hold their conversation: by module and class.
_CAMEL_KINDS = (
    ("camel.agents.chat_agent", "ChatAgent"),
    ("camel.societies.role_playing", "RolePlaying"),
)
_ALLOWED = """\
A builder may return
  - an agents.Agent (OpenAI Agents SDK), or an AgentRun of one
  - a camel ChatAgent or RolePlaying
  - a LangGraph compiled graph, or a GraphRun of one
  - a function of the row, async or not: async def solve(data, client): ...
  - an object with run: async def run(self, data, client): ..."""


def adapt_agent(built: Any, key: str) -> AgentRunner:
    """The runner of what a builder returned; ``key`` is the builder's config key.

    Raises:
        BuilderError: nothing agentrl can run; the message says what was found.
    """
    if isinstance(built, AgentRun):
        return OpenAIAgentRunner(built)
    if isinstance(built, GraphRun):
        return GraphRunner(built, key)
    if _is_kind_of(built, "agents.agent", "Agent"):
        return OpenAIAgentRunner(AgentRun(built))
    if _is_kind_of(built, *_CAMEL_KINDS[0]):
        return CamelAgentRunner(built, key)
    if _is_kind_of(built, *_CAMEL_KINDS[1]):
        return RolePlayingRunner(built, key)
    if _is_kind_of(built, "langgraph.pregel.main", "Pregel"):
        return GraphRunner(GraphRun(built), key)
    if not isinstance(built, type):
        entry_points = _entry_points(built)
        for function, name in sorted(entry_points, key=lambda entry: not is_async(entry[0])):
            return CallableRunner(function, name, key)
    raise BuilderError(f"{key}: the builder returned {_describe(built)}\n{_ALLOWED}")


def _is_kind_of(built: Any, module: str, name: str) -> bool:
    """True for instances of a class known by name, without importing its framework."""
    return any(t.__module__ == module and t.__qualname__ == name for t in type(built).__mro__)


def _entry_points(built: Any) -> list[tuple[Any, str]]:
    """What can be called on it, the likeliest first."""
    found = []
    if callable(getattr(built, "run", None)):
        found.append((built.run, f"{type(built).__name__}.run"))
    if callable(built):
        found.append((built, getattr(built, "__qualname__", type(built).__name__)))
    return found


def _describe(built: Any) -> str:
    """What was found, with the likely mistake behind it."""
    if built is None:
        return "None: is there a return?"
    if isinstance(built, type):
        return f"the class {built.__name__}, not an object of it: return {built.__name__}(...)."
    if inspect.iscoroutine(built):
        built.close()
        return (
            f"a coroutine: {built.__qualname__} is async. A builder is a plain def that returns "
            "the agent; if it is the agent function itself, wrap it: def build(): return solve."
        )
    if _is_kind_of(built, "langgraph.graph.state", "StateGraph"):
        return "a StateGraph that is not compiled: return graph.compile()."
    kind = type(built)
    return f"an object of type {kind.__module__}.{kind.__qualname__}: {built!r:.120}."
