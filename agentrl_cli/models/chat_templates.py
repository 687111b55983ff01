"""Chat templates by name or file, and what of a conversation a template leaves out.

What a template does not show is lost in silence: an agent's tools, its system prompt, a result. So
a conversation is rendered with marks in place of its texts; a mark that is not in the prompt
stands for something that the model would never hear of.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from agentrl_cli.errors import ModelError, format_nearest

#: The template for models whose own shows no tools.
DEFAULT_TEMPLATE = "hermes-chatml"
_TEMPLATE_FILES = {DEFAULT_TEMPLATE: "hermes_chatml.jinja"}
#: Plain letters, which no template escapes. Another in every process: it is in no agent's text.
_MARK = "".join(secrets.choice(string.ascii_uppercase) for _ in range(16))
#: Nine letters and digits: Mistral's templates allow nothing else.
_CALL_ID = "marked001"
_PARTS: dict[str, str] = {
    "system": "the system prompt",
    "developer": "the system prompt",
    "user": "what the user says",
    "assistant": "the assistant's earlier replies",
    "tool": "what tools return",
}
REMEDY = (
    f"Type model.chat_template={DEFAULT_TEMPLATE} for a template of agentrl's that shows system "
    "prompts, tools, their calls and results (ChatML, tools in hermes format), or "
    "model.chat_template=FILE for one of your own"
)


def read_chat_template(name_or_path: str) -> str:
    """The text of a template that agentrl brings, or of a file.

    Raises:
        ModelError: there is neither.
    """
    if name_or_path in _TEMPLATE_FILES:
        room = resources.files("agentrl_cli.models")
        return room.joinpath(_TEMPLATE_FILES[name_or_path]).read_text("utf-8")
    path = Path(name_or_path).expanduser()
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is a folder, a pipe or a device")
        return path.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(
            f"model.chat_template: {name_or_path!r} is no template of agentrl's "
            f"({format_nearest(name_or_path, _TEMPLATE_FILES)}), and no file that can be read: "
            f"{reason}. Type model.chat_template={DEFAULT_TEMPLATE}, or null for the tokenizer's "
            "own"
        ) from error


@dataclass(frozen=True, slots=True)
class MarkedConversation:
    """Messages and tools with marks in place of their texts."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    marks: tuple[tuple[str, str, str | None], ...]
    """Mark, what it stands for in words, and the role of the message that it is in."""

    def list_missing(self, text: str) -> list[tuple[str, str | None]]:
        """What the rendered ``text`` does not show, in words and with its role, each once."""
        # Content that was given as parts, and written as the list that it is, is not shown either.
        shown = "" if "'type': 'text'" in text else text
        missing = [(what, role) for mark, what, role in self.marks if mark not in shown]
        return list(dict.fromkeys(missing))

    def with_call(self) -> MarkedConversation:
        """Continued with a tool's call and result, as it will be once the model calls one."""
        name, value, result = (_make_mark(f"NEXT{n}") for n in range(3))
        function = {"name": name, "arguments": {"value": value}}
        call = {"id": _CALL_ID, "type": "function", "function": function}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        returned = {"role": "tool", "tool_call_id": _CALL_ID, "name": name, "content": result}
        calls = "calls of tools"
        further = ((name, calls, None), (value, calls, None), (result, _PARTS["tool"], "tool"))
        return replace(self, messages=(*self.messages, reply, returned), marks=self.marks + further)


def mark_conversation(
    messages: Sequence[dict[str, Any]], texts: Sequence[str], tools: Sequence[dict[str, Any]]
) -> MarkedConversation:
    """A conversation of the same form, with marks.

    Text beside an assistant's calls is left out: templates of many families drop it, and what was
    sampled stays in the prompt whatever they do.

    Args:
        messages: of a request.
        texts: their contents.
        tools: those that are offered.
    """
    marked, marks = [], []
    for number, (message, text) in enumerate(zip(messages, texts, strict=True)):
        role, calls = message["role"], message.get("tool_calls")
        one = {"role": role, "content": ""}
        one |= {k: message[k] for k in ("name", "tool_call_id") if message.get(k)}
        if calls:
            # Arguments that are not JSON are the policy's affair, not the template's.
            function = {"name": "call", "arguments": "{}"}
            one["tool_calls"] = [{**call, "function": function} for call in calls]
        elif text.strip():
            one["content"] = _make_mark(f"TEXT{number}")
            what = _PARTS.get(role, f"messages of the role {role!r}")
            marks.append((one["content"], what, role))
        marked.append(one)
    shown_tools = []
    # Two, lest a template that shows the first alone should pass.
    for number in range(min(2, len(tools))):
        names = [_make_mark(f"TOOL{number}{kind}") for kind in "NDP"]
        words = ("the tools", "the descriptions of tools", "the parameters of tools")
        marks += [(name, what, None) for name, what in zip(names, words, strict=True)]
        shown_tools.append(_build_tool(*names))
    return MarkedConversation(tuple(marked), tuple(shown_tools), tuple(marks))


def _make_mark(label: str) -> str:
    return f"{_MARK}{label}X"


def _build_tool(name: str, description: str, parameter: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string", "description": "text"}}
    schema = {"type": "object", "properties": properties, "required": [parameter]}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}
