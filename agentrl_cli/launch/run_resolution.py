"""What a configuration comes to here: the machine, the servers' packages, the model's files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agentrl_cli.models
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, Purpose, ResolvedRun, resolve_run
from agentrl_cli.errors import ModelError, UserInputError
from agentrl_cli.launch.servers.server_package import find_server_package
from agentrl_cli.tracking.formats.format_choice import (
    collect_template_text,
    find_reasoning_parser,
    find_tool_call_parser,
    find_unknown_parsers,
)

#: Flags that must not differ from what agentrl knows of its servers, and what sets them.
_OWN_FLAGS = {
    "--model": "model.path",
    "--model-path": "model.path",
    "--served-model-name": "model.path",
    "--port": "engine.first_port",
    "--host": "no key: servers listen on 127.0.0.1 alone",
    "--api-key": "no key: a new one is made for every run",
}


def resolve_run_here(config: ExperimentConfig, purpose: Purpose) -> ResolvedRun:
    """What the configuration comes to on this machine, without its packages and its model.

    Raises:
        UserInputError: this version, or this machine, cannot start it.
    """
    run = resolve_run(config, Machine.detect(), purpose=purpose)
    check_supported(config, run)
    return run


def with_server_package(run: ResolvedRun, config: ExperimentConfig) -> ResolvedRun:
    """The run with the package that its servers run on.

    Raises:
        UserInputError: it is not installed, or is of a version that agentrl does not know.
    """
    return run.model_copy(update={"server_package": find_server_package(config, run)})


def with_output_head(run: ResolvedRun, config: ExperimentConfig, model_folder: str) -> ResolvedRun:
    """The run, with servers that keep an output head of their own where they must.

    On CPU vLLM packs a tied head once and never again: a reload answers 200 and leaves the head
    as it was. Such models are served with a head of their own, which every publication fills.

    Raises:
        ModelError: the model's configuration cannot be read.
    """
    gets_weights = run.purpose == "train" and config.model.lora is None
    on_cpu = run.engine_kind == "vllm" and not run.serves_on_gpu
    if not (gets_weights and on_cpu and has_tied_embeddings(model_folder)):
        return run
    return run.model_copy(update={"untied_head": True})


def check_supported(config: ExperimentConfig, run: ResolvedRun) -> None:
    """Refuses what this version, or this machine, cannot start.

    Raises:
        UserInputError: with what to type instead.
    """
    kind, engine = run.engine_kind, config.engine
    problems = []
    if config.launcher.kind != "local":
        problems.append(
            f"launcher.kind: {config.launcher.kind} is not started by this version; allowed: "
            "local. Type launcher.kind=local"
        )
    if config.rollout.agent_mode == "subprocess" and config.workflow_path is not None:
        problems.append(
            "rollout.agent_mode: subprocess runs agents (agent_builder_path), and a workflow of "
            "your own (workflow_path) runs in the trainer's process. "
            "Type rollout.agent_mode=inline"
        )
    if kind == "embedded" and engine.num_servers > 1 and engine.kind is not None:
        problems.append(
            f"engine.num_servers: {engine.num_servers} with engine.kind: embedded, which "
            "is always one, inside the trainer. Type engine.kind=vllm or engine.num_servers=1"
        )
    if kind == "sglang" and not run.serves_on_gpu:
        problems.append(
            "engine.kind: sglang needs a GPU, and servers compute on the CPU here. Type "
            "engine.kind=vllm (vLLM for CPU: make vllm) or engine.kind=embedded"
        )
    if kind == "sglang" and run.shares_gpu:
        problems.append(
            "engine.kind: sglang needs GPUs apart from the trainer's, and of the "
            f"{run.num_gpus} here none is left beside {engine.num_servers} servers of "
            f"{engine.tensor_parallel_size}. Type engine.kind=vllm, which can share one"
        )
    problems += _find_own_flags(engine.server_args)
    problems += find_unknown_parsers(engine.tool_call_parser, engine.reasoning_parser)
    if problems:
        raise UserInputError("\n".join(problems))


def _find_own_flags(server_args: Sequence[str]) -> list[str]:
    return [
        f"engine.server_args: {flag} is set by agentrl ({_OWN_FLAGS[flag]}). Remove it"
        for flag in (argument.split("=")[0] for argument in server_args)
        if flag in _OWN_FLAGS
    ]


def has_tied_embeddings(model_folder: str) -> bool:
    """True where output head and input embeddings of a model are one.

    Raises:
        ModelError: the model's configuration cannot be read.
    """
    path = Path(model_folder) / "config.json"
    if path.is_file():
        try:
            found = _find_tie(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        if found is not None:
            return found
    # Not said: the architecture's default counts, which transformers knows.
    from transformers import AutoConfig

    try:
        model_config = AutoConfig.from_pretrained(model_folder)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{model_folder}: its config.json cannot be loaded: {reason}") from error
    return bool(model_config.get_text_config().tie_word_embeddings)


def _find_tie(description: Any) -> bool | None:
    """What a config.json says, of the text model first; None where it says nothing."""
    if not isinstance(description, dict):
        return None
    for part in (description.get("text_config"), description):
        if isinstance(part, dict) and isinstance(part.get("tie_word_embeddings"), bool):
            return bool(part["tie_word_embeddings"])
    return None


#: The template of every built-in model.
_BUILTIN_TEMPLATE = Path(agentrl_cli.models.__file__).with_name("chatml.jinja")
_TEMPLATE_FILE, _CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class _TokenizerFiles:
    template: str
    special_tokens: tuple[str, ...] = ()
    has_response_template: bool = False


def describe_reading(config: ExperimentConfig) -> str:
    """How tool calls and reasoning are read, as a line; ``auto`` with what it stands for."""
    calls, reasoning = config.engine.tool_call_parser, config.engine.reasoning_parser
    if "auto" not in (calls, reasoning):
        return f"tool calls are read as {calls}, reasoning as {reasoning}"
    files = _find_files(config.tokenizer_path or config.model.path)
    if files is None:
        return (
            f"tool calls are read as {calls}, reasoning as {reasoning}: what auto stands for is "
            "told by the chat template, once the tokenizer is loaded"
        )
    chosen = calls
    if calls == "auto":
        chosen = find_tool_call_parser(
            files.template, files.special_tokens, files.has_response_template
        )
        calls = f"{chosen} (auto)"
    if reasoning == "auto":
        reasoning = f"{find_reasoning_parser(files.template, chosen)} (auto)"
    return f"tool calls are read as {calls}, reasoning as {reasoning}"


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
