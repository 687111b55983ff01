"""The agents of the matrix: functions on the official SDKs, and programs that run elsewhere.

Nothing of agentrl is imported here: a program elsewhere has a base URL, a key and its framework.
As a command it is such a program: ``python matrix_agents.py FRAMEWORK PROTOCOL DELIVERY QUESTION``,
with what it needs in the environment, prints its answer.
"""

from __future__ import annotations

import asyncio
import json
import operator
import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace

SYSTEM = "You answer with a number."
PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
    "additionalProperties": False,
}
_SIGNS = {"+": operator.add, "*": operator.mul}


def calculate(expression: str) -> str:
    """Does arithmetic.

    Args:
        expression: two numbers and a sign.
    """
    left, sign, right = expression.split()
    return str(_SIGNS[sign](int(left), int(right)))


async def judge(completions, answer):
    """The reward function of every cell; async, so that no process is started for it."""
    return float(answer in completions)


# -- functions on the SDKs ------------------------------------------------------------------


class ChatLoop:
    """A tool loop over chat completions, whoever makes the calls."""

    names = ("chat.completions.create", "chat.completions.stream", "get_final_completion")

    def __init__(self, question):
        self.messages = [{"role": "user", "content": question}]

    def request(self):
        function = {"name": "calculate", "parameters": PARAMETERS, "strict": True}
        return {
            "messages": self.messages, "tools": [{"type": "function", "function": function}]
        }  # fmt: skip

    def take(self, reply):
        """The answer, or None: the tools' results were added."""
        message = reply.choices[0].message
        self.messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in message.tool_calls or ():
            result = calculate(**json.loads(call.function.arguments))
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return None if message.tool_calls else message.content


class ResponsesLoop:
    """The same over responses."""

    names = ("responses.create", "responses.stream", "get_final_response")

    def __init__(self, question):
        self.items = [{"role": "user", "content": question}]

    def request(self):
        tool = {"type": "function", "name": "calculate", "parameters": PARAMETERS, "strict": True}
        return {"input": self.items, "tools": [tool]}

    def take(self, reply):
        calls = [item for item in reply.output if item.type == "function_call"]
        self.items += [
            item.model_dump(exclude_none=True, exclude={"parsed_arguments"})
            for item in reply.output
        ]
        for call in calls:
            result = calculate(**json.loads(call.arguments))
            self.items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )
        return None if calls else reply.output_text


class MessagesLoop:
    """The same over messages."""

    names = ("messages.create", "messages.stream", "get_final_message")

    def __init__(self, question):
        self.messages = [{"role": "user", "content": question}]

    def request(self):
        tool = {"name": "calculate", "input_schema": PARAMETERS}
        return {"messages": self.messages, "tools": [tool], "max_tokens": 64}

    def take(self, reply):
        uses = [block for block in reply.content if block.type == "tool_use"]
        self.messages.append({"role": "assistant", "content": reply.content})
        if not uses:
            return "".join(block.text for block in reply.content)
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": calculate(**use.input)}
            for use in uses
        ]
        self.messages.append({"role": "user", "content": results})
        return None


_LOOPS = {"chat": ChatLoop, "responses": ResponsesLoop, "messages": MessagesLoop}


async def converse(api, delivery, question, client, model):
    """The answer of an async client's conversation."""
    loop, answer = _LOOPS[api](question), None
    create, stream, final = loop.names
    while answer is None:
        if delivery == "whole":
            reply = await operator.attrgetter(create)(client)(model=model, **loop.request())
        else:
            opened = operator.attrgetter(stream)(client)(model=model, **loop.request())
            async with opened as events:
                reply = await getattr(events, final)()
        answer = loop.take(reply)
    return answer


def converse_blocking(api, delivery, question, client, model):
    """The answer of a blocking client's conversation."""
    loop, answer = _LOOPS[api](question), None
    create, stream, final = loop.names
    while answer is None:
        if delivery == "whole":
            reply = operator.attrgetter(create)(client)(model=model, **loop.request())
        else:
            opened = operator.attrgetter(stream)(client)(model=model, **loop.request())
            with opened as events:
                reply = getattr(events, final)()
        answer = loop.take(reply)
    return answer


def build_function(api, delivery):
    """An async function on OpenAI's SDK."""

    async def solve(data, client, model):
        return await converse(api, delivery, data["question"], client, model)

    return solve


def build_blocking_function(api, delivery):
    """The same without async."""

    def solve(data, client, model):
        return converse_blocking(api, delivery, data["question"], client, model)

    return solve


def build_anthropic(api, delivery):
    """An async function on Anthropic's SDK."""

    async def solve(data, anthropic_client, model):
        return await converse(api, delivery, data["question"], anthropic_client, model)

    return solve


def build_blocking_anthropic(api, delivery):
    """The same without async."""

    def solve(data, anthropic_client, model):
        return converse_blocking(api, delivery, data["question"], anthropic_client, model)

    return solve


# -- programs elsewhere ---------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """All that a program elsewhere knows of agentrl."""

    openai_url: str
    anthropic_url: str
    key: str
    model: str = "whatever"


def run_program(framework, protocol, delivery, question, place):
    """What a program of the framework's users answers, by the framework's own means."""
    return _PROGRAMS[framework](protocol, delivery, question, place)


def ask_function(protocol, delivery, question, place):
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=place.openai_url, api_key=place.key)
    return ask_by(client, protocol, delivery, question, place.model)


def ask_anthropic(protocol, delivery, question, place):
    from anthropic import AsyncAnthropic

    client = AsyncAnthropic(base_url=place.anthropic_url, api_key=place.key)
    return ask_by(client, protocol, delivery, question, place.model)


def ask_by(client, protocol, delivery, question, model):
    async def ask():
        async with client:
            return await converse(protocol, delivery, question, client, model)

    return asyncio.run(ask())


def ask_blocking_function(protocol, delivery, question, place):
    from openai import OpenAI

    with OpenAI(base_url=place.openai_url, api_key=place.key) as client:
        return converse_blocking(protocol, delivery, question, client, place.model)


def ask_blocking_anthropic(protocol, delivery, question, place):
    from anthropic import Anthropic

    with Anthropic(base_url=place.anthropic_url, api_key=place.key) as client:
        return converse_blocking(protocol, delivery, question, client, place.model)


def ask_openai_agents(protocol, delivery, question, place):
    from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
    from openai import AsyncOpenAI

    async def ask():
        async with AsyncOpenAI(base_url=place.openai_url, api_key=place.key) as client:
            provider = OpenAIProvider(openai_client=client, use_responses=protocol == "responses")
            # It names no model: the SDK then sends its own default model's settings.
            agent = Agent(name="calculator", instructions=SYSTEM, tools=[function_tool(calculate)])
            # Traces would go to OpenAI.
            config = RunConfig(model_provider=provider, tracing_disabled=True)
            if delivery == "whole":
                return (await Runner.run(agent, question, run_config=config)).final_output
            result = Runner.run_streamed(agent, question, run_config=config)
            async for _ in result.stream_events():
                pass
            return result.final_output

    return asyncio.run(ask())


def ask_camel(protocol, delivery, question, place):
    from camel.agents import ChatAgent
    from camel.models import OpenAICompatibleModel

    # CAMEL's own counter downloads a file.
    counter = SimpleNamespace(count_tokens_from_messages=lambda messages: 10 * len(messages))

    async def ask():
        model = OpenAICompatibleModel(
            place.model,
            {"stream": True} if delivery == "streamed" else {},
            api_key=place.key,
            url=place.openai_url,
            token_counter=counter,
        )
        agent = ChatAgent(SYSTEM, model=model, tools=[calculate], stream_accumulate=False)
        response = await agent.astep(question)
        if delivery == "streamed":
            async for _ in response:
                pass
        answer = agent.chat_history[-1]["content"]
        await model._async_client.close()
        model._client.close()
        return answer

    return asyncio.run(ask())


def ask_langgraph(protocol, delivery, question, place):
    import httpx2
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    # LangChain would keep a client of its own open for ever.
    with httpx2.Client() as http:
        model = ChatOpenAI(
            model=place.model,
            base_url=place.openai_url,
            api_key=place.key,
            http_client=http,
            use_responses_api=protocol == "responses",
        )
        graph = create_react_agent(model, [tool(calculate)], prompt=SYSTEM)
        asked = {"messages": [("user", question)]}
        if delivery == "whole":
            state = graph.invoke(asked)
        else:
            for mode, item in graph.stream(asked, stream_mode=["messages", "values"]):
                if mode == "values":
                    state = item
        return state["messages"][-1].text


_PROGRAMS = {
    "openai-agents": ask_openai_agents,
    "camel": ask_camel,
    "langgraph": ask_langgraph,
    "openai": ask_function,
    "openai-blocking": ask_blocking_function,
    "anthropic": ask_anthropic,
    "anthropic-blocking": ask_blocking_anthropic,
}


def main():
    """Answers a question as a program of its own does, with the environment's addresses."""
    place = Place(
        openai_url=os.environ["OPENAI_BASE_URL"],
        anthropic_url=os.environ["ANTHROPIC_BASE_URL"],
        key=os.environ["OPENAI_API_KEY"],
    )
    print(run_program(*sys.argv[1:], place))


if __name__ == "__main__":
    main()
