"""From a configuration to the processes that it starts: pure, nothing is run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import UserInputError
from agentrl_cli.launch.devices import DeviceShares, Purpose, resolve_device, share_gpus
from agentrl_cli.launch.machine import Machine
from agentrl_cli.launch.server_commands import (
    ServerSpec,
    build_sglang_plan,
    build_vllm_command,
)
from agentrl_cli.tracking.parsers.choosing import (
    check_reasoning_parser,
    check_tool_call_parser,
)

EngineKind = Literal["embedded", "vllm", "sglang"]

#: Stands for a port that is chosen when the run starts.
FREE_PORT = 0

#: Flags that must not differ from what agentrl knows of its servers, and what sets them.
_OWN_FLAGS = {
    "--model": "model.path",
    "--model-path": "model.path",
    "--served-model-name": "model.path",
    "--port": "engine.first_port",
    "--host": "no key: servers listen on 127.0.0.1 alone",
    "--api-key": "no key: a new one is made for every run",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProcess:
    """One process of a run, by name."""

    name: str
    role: Literal["command", "trainer", "engine", "cluster_job"]
    argv: tuple[str, ...]
    """Empty: the command that the user typed is itself this process."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the command. Keys are not among it: those of a server are
    made when it starts."""
    devices: str = "cpu"


def resolve_engine_kind(config: ExperimentConfig, num_gpus: int) -> EngineKind:
    """The engine that the configuration asks for; where it asks for none, by what is there."""
    return config.engine.kind or ("vllm" if num_gpus else "embedded")


def build_plan(
    config: ExperimentConfig,
    machine: Machine,
    *,
    purpose: Purpose = "train",
    run_dir: str = "RUN_FOLDER",
    model_folder: str | None = None,
    untied_head: bool = False,
    ports: Sequence[int] | None = None,
    key_dir: str = "KEY_FOLDER",
) -> list[PlannedProcess]:
    """The processes of a run, the command's own first, then servers, then the trainer.

    Args:
        config: the experiment.
        machine: what they are placed on.
        purpose: an evaluation has no trainer.
        run_dir: of the run.
        model_folder: what servers load; None: ``model.path`` as it stands.
        untied_head: servers start with an output head of their own.
        ports: of the servers; None: as ``engine.first_port`` says, 0 where it is not set.
        key_dir: folder of the files from which SGLang servers read their keys.

    Raises:
        UserInputError: the machine has not the GPUs that are asked for.
    """
    kind = resolve_engine_kind(config, machine.num_gpus)
    if config.launcher.kind == "ray":
        return _plan_cluster_jobs(config, kind)
    command = PlannedProcess(name="command", role="command", argv=())
    if kind == "embedded":
        if purpose == "eval" or count_embedded_trainers(config, machine) == 1:
            devices = _format_devices(machine.gpu_ids[:1])
            return [PlannedProcess(name="trainer", role="command", argv=(), devices=devices)]
        return [command, *_plan_trainers(config, run_dir, machine.gpu_ids)]
    shares = share_gpus(
        config.engine,
        machine.gpu_ids,
        resolve_device(config.engine, machine.num_gpus),
        purpose,
    )
    servers = _plan_servers(
        config,
        kind,
        machine,
        shares,
        model_folder=model_folder or config.model.path,
        untied_head=untied_head,
        ports=ports,
        key_dir=key_dir,
    )
    if purpose == "eval":
        return [command, *servers]
    return [command, *servers, *_plan_trainers(config, run_dir, shares.trainer)]


def count_embedded_trainers(config: ExperimentConfig, machine: Machine) -> int:
    """Processes that train where one of them samples too: one, unless more are asked for."""
    return _count_trainers(config, machine.gpu_ids) if config.train.num_processes else 1


def format_plan(plan: list[PlannedProcess]) -> str:
    """The plan as lines to read."""
    lines = []
    for process in plan:
        env = "".join(f"{k}={shlex.quote(v)} " for k, v in process.env.items())
        argv = shlex.join(process.argv) if process.argv else "(this command)"
        lines.append(f"{process.name:<12} {process.role:<12} {process.devices:<8} {env}{argv}")
    return "\n".join(lines)


def check_supported(config: ExperimentConfig, *, num_gpus: int = 0) -> None:
    """Refuses what this version, or a machine with so many GPUs, cannot start.

    Raises:
        UserInputError: with what to type instead.
    """
    kind = resolve_engine_kind(config, num_gpus)
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
    if kind == "embedded" and config.engine.num_servers > 1 and config.engine.kind is not None:
        problems.append(
            f"engine.num_servers: {config.engine.num_servers} with engine.kind: embedded, which "
            "is always one, inside the trainer. Type engine.kind=vllm or engine.num_servers=1"
        )
    if kind == "sglang" and (config.engine.device == "cpu" or num_gpus == 0):
        problems.append(
            "engine.kind: sglang needs a GPU, and servers compute on the CPU here. Type "
            "engine.kind=vllm (vLLM for CPU: make vllm) or engine.kind=embedded"
        )
    problems += _find_own_flags(config.engine.server_args)
    for check, name in (
        (check_tool_call_parser, config.engine.tool_call_parser),
        (check_reasoning_parser, config.engine.reasoning_parser),
    ):
        try:
            check(name)
        except UserInputError as error:
            problems.append(str(error))
    if problems:
        raise UserInputError("\n".join(problems))
    if kind != "embedded":
        resolve_device(config.engine, num_gpus)


def resolve_num_threads(config: ExperimentConfig, machine: Machine) -> int:
    """CPU threads of each server on CPU.

    One core is left to the agents and the gateway: threads that wait for each other all wait
    for the one whose core is used by others.
    """
    fair_share = max(1, (machine.num_cores - 1) // config.engine.num_servers)
    return config.engine.num_threads or fair_share


def _find_own_flags(server_args: Sequence[str]) -> list[str]:
    return [
        f"engine.server_args: {flag} is set by agentrl ({_OWN_FLAGS[flag]}). Take it out"
        for flag in (argument.split("=")[0] for argument in server_args)
        if flag in _OWN_FLAGS
    ]


def _choose_port(config: ExperimentConfig, ports: Sequence[int] | None, index: int) -> int:
    if ports is not None:
        return ports[index]
    first = config.engine.first_port
    return FREE_PORT if first is None else first + index


def _uses_nccl(config: ExperimentConfig, shares: DeviceShares) -> bool:
    """True where weights may go from GPU to GPU: the servers must be started for that."""
    kind = config.engine.weight_transfer.kind
    if config.model.lora is not None or not shares.trainer or not shares.servers[0]:
        return False
    return kind == "nccl" or (kind is None and not shares.is_any_shared)


def _plan_servers(
    config: ExperimentConfig,
    kind: EngineKind,
    machine: Machine,
    shares: DeviceShares,
    *,
    model_folder: str,
    untied_head: bool,
    ports: Sequence[int] | None,
    key_dir: str,
) -> list[PlannedProcess]:
    build_command = build_vllm_command if kind == "vllm" else build_sglang_plan
    servers = []
    for index, gpus in enumerate(shares.servers):
        spec = ServerSpec(
            index=index,
            model_folder=model_folder,
            port=_choose_port(config, ports, index),
            gpus=gpus,
            shares_gpu=shares.is_shared(index),
            untied_head=untied_head,
            num_threads=resolve_num_threads(config, machine),
            use_nccl=_uses_nccl(config, shares),
            python_path=machine.python_path,
            key_path=f"{key_dir}/{kind}-{index}.yaml",
        )
        argv, env = build_command(config, spec)
        servers.append(
            PlannedProcess(
                name=f"{kind}-{index}",
                role="engine",
                argv=argv,
                env=env,
                devices=_format_devices(gpus),
            )
        )
    return servers


def _count_trainers(config: ExperimentConfig, gpus: Sequence[str]) -> int:
    count = config.train.num_processes or max(1, len(gpus))
    if gpus and count > len(gpus):
        more = ", or give engine servers fewer (engine.num_servers, engine.tensor_parallel_size)"
        raise UserInputError(
            f"train.num_processes: {count} needs a GPU for each process, and {len(gpus)} of this "
            f"machine's are the trainer's. Type train.num_processes={len(gpus)}"
            + ("" if config.engine.kind == "embedded" else more)
        )
    return count


def _plan_trainers(
    config: ExperimentConfig, run_dir: str, gpus: Sequence[str]
) -> list[PlannedProcess]:
    """The ranks of the training, the first of which has the rollouts."""
    count = _count_trainers(config, gpus)
    trainers = []
    for index in range(count):
        own = gpus if count == 1 else gpus[index : index + 1]
        module = "trainer_process" if index == 0 else "rank_process"
        trainers.append(
            PlannedProcess(
                name="trainer" if index == 0 else f"trainer-{index}",
                role="trainer",
                argv=(sys.executable, "-m", f"agentrl_cli.launch.{module}", run_dir),
                env={"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {},
                devices=_format_devices(own),
            )
        )
    return trainers


def _plan_cluster_jobs(config: ExperimentConfig, kind: EngineKind) -> list[PlannedProcess]:
    return [
        PlannedProcess(name="command", role="command", argv=()),
        PlannedProcess(name="trainer", role="cluster_job", argv=(), devices="ray"),
        *(
            PlannedProcess(name=f"{kind}-{i}", role="cluster_job", argv=(), devices="ray")
            for i in range(config.engine.num_servers if kind != "embedded" else 0)
        ),
    ]


def _format_devices(gpus: Sequence[str]) -> str:
    return ",".join(f"cuda:{gpu}" for gpu in gpus) or "cpu"
