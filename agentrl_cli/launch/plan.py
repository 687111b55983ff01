"""From a configuration to the processes that it starts: pure, nothing is run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import UserInputError

EngineKind = Literal["embedded", "vllm", "sglang"]

#: Where the first engine server listens; the others follow.
_FIRST_PORT = 8765


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProcess:
    """One process of a run, by name."""

    name: str
    role: Literal["command", "trainer", "engine", "cluster_job"]
    argv: tuple[str, ...]
    """Empty: the command that the user typed is itself this process."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the command."""
    devices: str = "cpu"


def resolve_engine_kind(config: ExperimentConfig, num_gpus: int) -> EngineKind:
    """The engine that the configuration asks for; where it asks for none, by what is there."""
    return config.engine.kind or ("vllm" if num_gpus else "embedded")


def build_plan(config: ExperimentConfig, *, num_gpus: int = 0) -> list[PlannedProcess]:
    """The processes of a run on a machine with ``num_gpus`` GPUs, the command's own first."""
    kind = resolve_engine_kind(config, num_gpus)
    gpus = list(range(num_gpus))
    if config.launcher.kind == "ray":
        return [
            PlannedProcess(name="command", role="command", argv=()),
            PlannedProcess(name="trainer", role="cluster_job", argv=(), devices="ray"),
            *(
                PlannedProcess(name=f"{kind}-{i}", role="cluster_job", argv=(), devices="ray")
                for i in range(config.engine.num_servers if kind != "embedded" else 0)
            ),
        ]
    if kind == "embedded":
        devices = _format_devices(gpus[:1])
        return [PlannedProcess(name="trainer", role="command", argv=(), devices=devices)]
    servers, trainer = _share_devices(gpus, config.engine.num_servers)
    return [
        PlannedProcess(name="trainer", role="command", argv=(), devices=_format_devices(trainer)),
        *(_plan_server(config, kind, index, own) for index, own in enumerate(servers)),
    ]


def format_plan(plan: list[PlannedProcess]) -> str:
    """The plan as lines to read."""
    lines = []
    for process in plan:
        env = "".join(f"{k}={shlex.quote(v)} " for k, v in process.env.items())
        argv = shlex.join(process.argv) if process.argv else "(this command)"
        lines.append(f"{process.name:<12} {process.role:<12} {process.devices:<8} {env}{argv}")
    return "\n".join(lines)


def check_supported(config: ExperimentConfig, *, num_gpus: int = 0) -> None:
    """Refuses what this version cannot start, before anything is.

    Raises:
        UserInputError: with what to type instead.
    """
    kind = resolve_engine_kind(config, num_gpus)
    problems = []
    if kind != "embedded":
        reason = "" if config.engine.kind else " (chosen because this machine has a GPU)"
        problems.append(
            f"engine.kind: {kind}{reason} is not started by this version; allowed: embedded. "
            "Type engine.kind=embedded"
        )
    if config.launcher.kind != "local":
        problems.append(
            f"launcher.kind: {config.launcher.kind} is not started by this version; allowed: "
            "local. Type launcher.kind=local"
        )
    if config.rollout.agent_mode != "inline":
        problems.append(
            f"rollout.agent_mode: {config.rollout.agent_mode} is not started by this version; "
            "allowed: inline. Type rollout.agent_mode=inline"
        )
    if problems:
        raise UserInputError("\n".join(problems))


def count_visible_gpus(env: Mapping[str, str] = os.environ) -> int:
    """GPUs that a process started now would see, without loading torch."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([v for v in visible.split(",") if v.strip() and v.strip() != "-1"])
    return sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))


def _share_devices(gpus: list[int], num_servers: int) -> tuple[list[list[int]], list[int]]:
    """GPUs of each server, and of the trainer: one each while there are enough."""
    if len(gpus) <= num_servers:
        shared = [[gpus[i % len(gpus)]] if gpus else [] for i in range(num_servers)]
        return shared, gpus[-1:]
    return [[gpu] for gpu in gpus[:num_servers]], gpus[num_servers:]


def _plan_server(
    config: ExperimentConfig, kind: EngineKind, index: int, gpus: list[int]
) -> PlannedProcess:
    port = str(_FIRST_PORT + index)
    length = str(config.engine.max_model_len)
    if kind == "vllm":
        argv = (
            *("python", "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", config.model.path, "--dtype", config.model.dtype),
            *("--max-model-len", length, "--max-num-seqs", str(config.engine.max_num_seqs)),
            *("--host", "127.0.0.1", "--port", port),
        )
    else:
        argv = (
            *("python", "-m", "sglang.launch_server"),
            *("--model-path", config.model.path, "--dtype", config.model.dtype),
            *("--context-length", length, "--max-running-requests"),
            *(str(config.engine.max_num_seqs), "--host", "127.0.0.1", "--port", port),
        )
    env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
    return PlannedProcess(
        name=f"{kind}-{index}", role="engine", argv=argv, env=env, devices=_format_devices(gpus)
    )


def _format_devices(gpus: list[int]) -> str:
    return ",".join(f"cuda:{gpu}" for gpu in gpus) or "cpu"
