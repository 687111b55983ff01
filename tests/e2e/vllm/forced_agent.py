"""An agent that makes a random model call a tool, twice: as a function, and as a program elsewhere.

As a program it takes a task with what ``agentrl`` shows (``AGENTRL_URL``, ``AGENTRL_API_KEY``).
"""

from __future__ import annotations

import json
import os

import httpx2
import openai

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": ["2", "4"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}


def converse(client, model, question):
    """Two turns that call the tool, streamed, and one of text."""
    messages = [{"role": "user", "content": question}]
    asked = {"model": model, "messages": messages, "tools": [TOOL], "max_tokens": 64}
    while len(messages) < 5:
        message = ask_for_call(client, asked)
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        [call] = message.tool_calls
        said = json.loads(call.function.arguments)["a"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    client.chat.completions.create(**asked, tool_choice="none")
    return float(len(messages))


def ask_for_call(client, asked):
    """The first call that is whole: a random model may fill it with spaces until it is cut off."""
    while True:
        options = {"tool_choice": "required", "parallel_tool_calls": False}
        with client.chat.completions.stream(**asked, **options) as events:
            try:
                return events.get_final_completion().choices[0].message
            except openai.LengthFinishReasonError:
                continue


def build():
    """The function."""

    def solve(data, client, model):
        return converse(client, model, data["question"])

    return solve


def main():
    """One session, from its start to its end."""
    key = os.environ["AGENTRL_API_KEY"]
    with httpx2.Client(headers={"Authorization": f"Bearer {key}"}, timeout=120) as http:
        sessions = os.environ["AGENTRL_URL"] + "/agentrl/v1/sessions"
        session = http.post(sessions, json={}).raise_for_status().json()
        url = session["base_urls"]["openai"]
        with openai.OpenAI(base_url=url, api_key=session["api_key"]) as client:
            reward = converse(client, session["model"], session["task"]["question"])
        http.post(f"{sessions}/{session['id']}/end", json={"reward": reward}).raise_for_status()


if __name__ == "__main__":
    main()
