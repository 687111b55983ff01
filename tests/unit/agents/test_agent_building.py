"""What a builder may return, and how a mistake is named."""

from __future__ import annotations

import functools
import importlib
import json
import sys
import threading

import pytest

from agentrl_cli.agents.agent_building import AgentSource, adapt_agent
from agentrl_cli.agents.agent_runner import AgentCall, find_input, find_prompt_text
from agentrl_cli.config.import_paths import import_object
from agentrl_cli.errors import BuilderError, DatasetError, ImportPathError

SUPPLIED = {
    "model": "m",
    "base_url": "http://x/v1",
    "api_key": "key",
    "http_client": "http",
    "max_turns": 4,
}


async def run(runner, data=None, client="client"):
    return await runner.run(AgentCall(row=data or {"q": 1}, client=client, **SUPPLIED))


async def test_functions_and_objects_get_what_they_name():
    async def everything(data, **extra):
        return {"row": data, "names": sorted(extra)}

    async def some(row, api_key, client=None, *, base_url, unknown=3):
        return {"all": (row, api_key, client, base_url, unknown)}

    async def nothing(data):
        return data

    class Solver:
        async def run(self, data, client):
            return client

        async def __call__(self, data):
            return "run goes first"

    class Called:
        async def __call__(self, data, model):
            return {"the model": model}

    names = ["api_key", "base_url", "client", "http_client", "max_turns", "model"]
    assert (await run(adapt_agent(everything, "k"))).returned == {
        "row": {"q": 1}, "names": names,
    }  # fmt: skip
    assert (await run(adapt_agent(some, "k"))).returned["all"] == (
        {"q": 1}, "key", "client", "http://x/v1", 3,
    )  # fmt: skip
    assert (await run(adapt_agent(nothing, "k"))).returned == {"q": 1}
    assert (await run(adapt_agent(Solver(), "k"))).final_answer == "client"
    assert (await run(adapt_agent(Called(), "k"))).returned == {"the model": "m"}
    partial = functools.partial(some, unknown=5)
    assert (await run(adapt_agent(partial, "k"))).returned["all"][-1] == 5


async def test_blocking_functions_run_in_a_thread_of_their_own():
    def solve(data, model, *, max_turns):
        return {"all": (threading.current_thread().name, data, model, max_turns)}

    class Solver:
        def run(self, data):
            return "from run"

        async def __call__(self, data):
            return "what is async goes first"

    returned = (await run(adapt_agent(solve, "k"))).returned["all"]
    assert returned[0].startswith("agent ")
    assert returned[1:] == ({"q": 1}, "m", 4)
    assert (await run(adapt_agent(Solver(), "k"))).final_answer == "what is async goes first"
    assert (await run(adapt_agent(Solver().run, "k"))).final_answer == "from run"


async def test_what_a_thread_raises_is_what_the_agent_raised():
    def fails(data):
        raise KeyError("no such thing")

    def stops(data):
        return next(iter(()))

    with pytest.raises(KeyError, match="no such thing"):
        await run(adapt_agent(fails, "k"))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await run(adapt_agent(stops, "k"))


async def test_a_decorated_async_function_is_awaited_and_a_hidden_one_is_explained():
    def wrapped(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            return function(*args, **kwargs)

        return call

    def hidden(function):
        return lambda data: function(data)

    async def solve(data):
        return "awaited"

    assert (await run(adapt_agent(wrapped(solve), "k"))).final_answer == "awaited"
    with pytest.raises(TypeError, match=r"that returned coroutine.*functools\.wraps"):
        await run(adapt_agent(hidden(solve), "k"))


def test_the_socket_is_opened_for_those_who_can_use_it():
    async def no(data, client): ...
    async def named(data, base_url): ...
    async def everything(data, **extra): ...

    assert [adapt_agent(f, "k").needs_base_url for f in (no, named, everything)] == [
        False, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("returned", [("text", 1.0), ["text"], object()])
async def test_what_is_neither_an_answer_nor_a_reward_is_named_as_the_agents(returned):
    async def solve(data):
        return returned

    with pytest.raises(
        TypeError, match=f"solve returned {type(returned).__name__}.*answer as text"
    ):
        await run(adapt_agent(solve, "k"))


async def test_every_kind_of_reward_may_be_returned():
    for reward in (1, True, 0.5, None, float("nan"), {"an id": 1.0}):

        async def solve(data, reward=reward):
            return reward

        assert (await run(adapt_agent(solve, "k"))).returned is reward


def test_a_function_that_yields_is_refused():
    async def streams(data):
        yield "text"

    def walks(data):
        yield "text"

    class Solver:
        async def run(self, data):
            yield "text"

    for built in (streams, walks, Solver(), functools.partial(walks)):
        with pytest.raises(BuilderError, match=r"^k: .* has a yield.*Return the answer"):
            adapt_agent(built, "k")


class Agent:
    def run(self, data): ...


async def coroutine_agent(data): ...


@pytest.mark.parametrize(
    ("built", "message"),
    [
        (None, r"returned None: is there a return\?"),
        (Agent, r"the class Agent, not an object of it: return Agent\(\.\.\.\)"),
        (42, r"type builtins\.int: 42"),
        ("text", r"type builtins\.str"),
    ],
)
def test_anything_else_is_named_and_what_is_allowed_is_listed(built, message):
    with pytest.raises(BuilderError, match=message) as caught:
        adapt_agent(built, "agent_builder_path")
    assert "agent_builder_path: the builder returned" in str(caught.value)
    assert "agents.Agent" in str(caught.value)
    assert "async def solve(data, client)" in str(caught.value)


def test_a_coroutine_is_closed_and_explained():
    with pytest.raises(BuilderError, match=r"coroutine_agent is async.*def build\(\)"):
        adapt_agent(coroutine_agent({}), "k")
    with pytest.raises(BuilderError, match=r"is async\. A builder is a plain def"):
        AgentSource(coroutine_agent, {}, "k")


def test_signatures_that_nothing_can_fill_are_refused():
    async def no_row(): ...
    async def keyword_row(*, data): ...
    async def wants_answer(data, answer): ...

    with pytest.raises(BuilderError, match="takes no row"):
        adapt_agent(no_row, "k")
    with pytest.raises(BuilderError, match="takes no row"):
        adapt_agent(keyword_row, "k")
    with pytest.raises(BuilderError, match=r"asks for 'answer'.*data\['answer'\]"):
        adapt_agent(wants_answer, "k")


def test_builders_are_called_as_seldom_as_their_signature_allows():
    built = []

    def shared(style):
        built.append(("shared", style))
        return coroutine_agent

    def by_model(model, style="x"):
        built.append(("by_model", model))
        return coroutine_agent

    source = AgentSource(shared, {"style": "terse"}, "k")
    assert source.get_runner("client", "m") is source.get_runner("other", "m")
    assert built == [("shared", "terse")]
    source = AgentSource(by_model, {}, "k")
    assert source.get_runner("client", "m") is source.get_runner("other", "m")
    source.get_runner("client", "n")
    assert built[1:] == [("by_model", name) for name in ("model", "m", "n")]
    # agent_builder_kwargs decide, where they say so themselves.
    AgentSource(by_model, {"model": "mine"}, "k").get_runner("client", "m")
    assert built[-1] == ("by_model", "mine")


def test_input_is_found_under_the_usual_names():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert find_input({"question": "q", "prompt": "p", "messages": messages}) == messages
    assert find_input({"input": "i", "prompt": "p", "question": "q"}) == "q"
    assert find_input({"input": "i", "prompt": "p"}) == "p"
    assert find_input({"input": "i", "prompt": None}) == "i"
    assert find_input({"prompt": messages}) == messages
    assert find_prompt_text({"messages": messages}) == "u"
    assert find_prompt_text({"question": "q", "prompt": "p"}) == "p"
    assert find_prompt_text({"x": 1}) == ""


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "x"}, "the row has the fields 'problem'; one of messages, question"),
        ({"messages": "x"}, r"'messages' is str .*for messages: the list only"),
        ({"question": 5}, r"'question' is int \(5\)"),
        ({"prompt": [1]}, "'prompt' is list"),
        ({"messages": []}, "'messages' is list"),
    ],
)
def test_rows_with_nothing_to_ask_are_refused(row, message):
    with pytest.raises(DatasetError, match=message):
        find_input(row)


def test_a_builder_that_raises_in_a_library_is_shown_by_its_own_line():
    def build():
        return json.loads("no json")

    with pytest.raises(
        BuilderError, match=r"JSONDecodeError.*\n  at .*test_agent_building\.py:\d+: return j"
    ):
        AgentSource(build, {}, "k")


def test_a_builder_that_calls_exit_is_named():
    def build():
        sys.exit(0)

    with pytest.raises(
        BuilderError, match=r"k: the builder raised SystemExit: 0\n  at .*: sys\.exit\(0\)"
    ):
        AgentSource(build, {}, "k")


@pytest.mark.parametrize(
    ("package", "extra"), [("agents", "openai-agents"), ("langgraph.prebuilt", "langgraph")]
)
def test_a_framework_that_is_not_installed_is_named_with_its_extra(
    monkeypatch, tmp_path, package, extra
):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, package.partition(".")[0], None)

    def build():
        return importlib.import_module(package)

    advice = rf"Type uv pip install 'agentrl-cli\[{extra}\]'\n  at "
    with pytest.raises(BuilderError, match=advice):
        AgentSource(build, {}, "k")
    path = tmp_path / "mine.py"
    path.write_text(f"import {package}\n")
    with pytest.raises(ImportPathError, match=advice):
        import_object(f"{path}:build", "k")
