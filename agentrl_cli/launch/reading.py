"""Which formats replies are read in, told from a model's files before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agentrl_cli.models
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.tracking.parsers.choosing import (
    collect_template_text,
    find_reasoning_parser,
    find_tool_call_parser,
)

#: The template of every built-in model.
_BUILTIN_TEMPLATE = Path(agentrl_cli.models.__file__).with_name("chatml.jinja")
_TEMPLATE_FILE, _CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class _TokenizerFiles:
    template: str
    special_tokens: tuple[str, ...] = ()
    has_response_template: bool = False


def describe_reading(config: ExperimentConfig) -> str:
    """How tool calls and thoughts are read, as a line; ``auto`` with what it stands for."""
    calls, thoughts = config.engine.tool_call_parser, config.engine.reasoning_parser
    if "auto" not in (calls, thoughts):
        return f"tool calls are read as {calls}, thoughts as {thoughts}"
    files = _find_files(config.tokenizer_path or config.model.path)
    if files is None:
        return (
            f"tool calls are read as {calls}, thoughts as {thoughts}: what auto stands for is "
            "told by the chat template, once the tokenizer is loaded"
        )
    chosen = calls
    if calls == "auto":
        chosen = find_tool_call_parser(
            files.template, files.special_tokens, files.has_response_template
        )
        calls = f"{chosen} (auto)"
    if thoughts == "auto":
        thoughts = f"{find_reasoning_parser(files.template, chosen)} (auto)"
    return f"tool calls are read as {calls}, thoughts as {thoughts}"


def _find_files(path: str) -> _TokenizerFiles | None:
    """The parts of a tokenizer that tell its family; None: they are not on this machine."""
    if path.startswith("builtin:"):
        return _TokenizerFiles(_BUILTIN_TEMPLATE.read_text(encoding="utf-8"))
    template, described = _read(path, _TEMPLATE_FILE), _load_object(_read(path, _CONFIG_FILE))
    if template is None:
        template = collect_template_text(_unwrap(described.get("chat_template")))
    if not template:
        return None
    has_response_template = described.get("response_template") is not None
    return _TokenizerFiles(template, tuple(_list_tokens(described)), has_response_template)


def _unwrap(template: Any) -> Any:
    """Several templates are a list of names and texts."""
    if isinstance(template, list):
        return {one["name"]: one["template"] for one in template if isinstance(one, dict)}
    return template


def _list_tokens(described: dict[str, Any]) -> Iterator[str]:
    added = described.get("added_tokens_decoder")
    for token in added.values() if isinstance(added, dict) else ():
        if isinstance(token, dict) and token.get("special"):
            yield str(token.get("content"))


def _load_object(text: str | None) -> dict[str, Any]:
    try:
        data = json.loads(text or "{}")
    except ValueError:
        # Loading the tokenizer says what is wrong with its file.
        return {}
    return data if isinstance(data, dict) else {}


def _read(path: str, name: str) -> str | None:
    """A file of a folder, or of a model on the hub that was fetched before; None: not here."""
    file = Path(path) / name
    if not Path(path).is_dir():
        # Half a second that most commands do without.
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(path, name)
        except HFValidationError:
            return None
        if not isinstance(cached, str):
            return None
        file = Path(cached)
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None
