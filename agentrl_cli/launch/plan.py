"""From a resolved run to the processes that it starts: pure, nothing is run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Gpus, ResolvedRun
from agentrl_cli.launch.servers.server_commands import (
    ServerSpec,
    build_sglang_command,
    build_vllm_command,
)

_TRAINER_PROGRAM = "agentrl_cli.launch.processes.trainer_program"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProcess:
    """One process of a run, by name."""

    name: str
    role: Literal["command", "trainer", "engine"]
    argv: tuple[str, ...] = ()
    """Empty: the command that the user typed is itself this process."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the command. It holds no keys: those of a server are made when
    it starts."""
    devices: str = "cpu"


def build_plan(
    config: ExperimentConfig,
    run: ResolvedRun,
    *,
    run_dir: str = "RUN_FOLDER",
    model_folder: str | None = None,
    ports: Sequence[int] | None = None,
    key_dir: str = "KEY_FOLDER",
) -> list[PlannedProcess]:
    """The processes of a run, the command's own first, then servers, then the trainer's ranks.

    Args:
        config: the experiment.
        run: what it comes to on this machine.
        run_dir: of the run.
        model_folder: what servers load; None: ``model.path`` as it stands.
        ports: of the servers; None: as resolved, 0 for one that is chosen when the run starts.
        key_dir: folder of the files from which SGLang servers read their keys.
    """
    if run.is_one_process:
        devices = _format_devices(run.trainers[0])
        return [PlannedProcess(name="trainer", role="command", devices=devices)]
    build_command = build_vllm_command if run.engine_kind == "vllm" else build_sglang_command
    plan = [PlannedProcess(name="command", role="command")]
    for index, server in enumerate(run.servers):
        spec = ServerSpec(
            index=index,
            model_folder=model_folder or config.model.path,
            port=server.port if ports is None else ports[index],
            run=run,
            key_path=f"{key_dir}/{server.name}.yaml",
        )
        argv, env = build_command(config, spec)
        devices = _format_devices(server.gpus)
        plan.append(
            PlannedProcess(name=server.name, role="engine", argv=argv, env=env, devices=devices)
        )
    for rank, gpus in enumerate(run.trainers):
        plan.append(
            PlannedProcess(
                name="trainer" if rank == 0 else f"trainer-{rank}",
                role="trainer",
                argv=(sys.executable, "-m", _TRAINER_PROGRAM, run_dir),
                env={"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {},
                devices=_format_devices(gpus),
            )
        )
    return plan


def format_plan(plan: list[PlannedProcess]) -> str:
    """The plan as lines to read."""
    lines = []
    for process in plan:
        env = "".join(f"{k}={shlex.quote(v)} " for k, v in process.env.items())
        argv = shlex.join(process.argv) if process.argv else "(this command)"
        lines.append(f"{process.name:<12} {process.role:<12} {process.devices:<8} {env}{argv}")
    return "\n".join(lines)


def _format_devices(gpus: Gpus) -> str:
    return ",".join(f"cuda:{gpu}" for gpu in gpus) or "cpu"
