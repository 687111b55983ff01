"""The configuration of ``agentrl train`` and ``agentrl eval``: one class per section."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from agentrl_cli.config.algorithm_config import check_algorithm
from agentrl_cli.config.config_schema import ResumeSafe, StrictConfig, check_storage_location
from agentrl_cli.config.train_config import TrainConfig
from agentrl_cli.errors import ConfigError, MissingExtraError

#: Agents' processes cost little but memory while they wait for the model.
_PROCESSES_PER_CORE = 4


def _check_folder_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._\-]*", name):
        raise ValueError(
            f"{name!r} becomes a folder name: allowed are letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )
    return name


#: One path segment: experiments and trials become folder names.
FolderName = Annotated[str, Field(max_length=120), AfterValidator(_check_folder_name)]

#: Where run folders are.
OutputDir = Annotated[str, AfterValidator(check_storage_location)]


def count_usable_cores() -> int:
    """CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class LoraConfig(StrictConfig):
    """Low-rank adapters (arXiv 2106.09685): they are trained, the model itself stays as it is."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0.0)
    """The adapter's output is scaled by alpha / rank."""
    target_modules: Annotated[tuple[str, ...], Field(strict=False)] | Literal["all-linear"] = (
        "all-linear"
    )
    """Names of the layers that get an adapter; ``all-linear``: all but the output head."""


class ModelConfig(StrictConfig):
    """The model to train."""

    path: str = Field(min_length=1)
    """Hub id, folder, or ``builtin:calculator``."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Number type of the forward and backward pass; optimizer state is always float32."""
    chat_template: str | None = None
    """How conversations become text: ``hermes-chatml`` (ChatML with tools in hermes format, for
    models whose own template shows no tools), or a Jinja file. null: the tokenizer's own.
    Checkpoints keep what was trained with."""
    lora: LoraConfig | None = None
    """null: all weights are trained, except those in ``frozen``."""
    frozen: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Weights that stay as they are: ``embeddings``, ``head`` (the same where they are tied), or
    patterns of parameter names such as ``model.layers.0.*``."""

    @model_validator(mode="after")
    def _freezes_what_would_be_trained(self) -> Self:
        if self.lora is not None and self.frozen:
            raise ValueError(
                "model.frozen: with model.lora nothing but the adapter is trained anyway. Type "
                "model.frozen=[], and model.lora.target_modules=[...] for layers to adapt"
            )
        return self


class GenerationConfig(StrictConfig):
    """How completions are sampled. An agent's own request parameters take precedence."""

    n_samples: int = Field(4, ge=1)
    """Trajectories per task: the size of a group."""
    max_tokens: int = Field(1024, ge=1)
    """Maximum number of tokens of one completion, also for requests that ask for more."""
    temperature: float = Field(1.0, ge=0.0, le=10.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)


class DatasetConfig(StrictConfig):
    """Where tasks come from."""

    path: str
    """A .jsonl, .json, .csv or .parquet file, a dataset on the hub, or an import path
    ``module:function`` of a function that returns rows."""
    name: str | None = None
    """Configuration of a hub dataset."""
    split: str | None = None
    """Split of a hub dataset; passed to a function that names it."""
    batch_size: int = Field(64, ge=1)
    """Tasks per step."""
    shuffle: bool = True
    """A new order every epoch, from ``seed``."""
    limit: int | None = Field(None, ge=1)
    """Use the first ``limit`` rows only."""
    min_pass_rate: float | None = Field(None, ge=0.0, le=1.0)
    """Use rows only whose field ``pass_rate`` is at least this. ``agentrl eval --save-tasks
    FILE.jsonl`` writes such rows: 0.1 to 0.9 are tasks that the model solves sometimes, which teach
    most."""
    max_pass_rate: float | None = Field(None, ge=0.0, le=1.0)
    """The same with at most this."""

    @model_validator(mode="after")
    def _check_pass_rates(self) -> Self:
        low, high = self.min_pass_rate, self.max_pass_rate
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"min_pass_rate {low} is above max_pass_rate {high}: type them the other way round"
            )
        return self


class WeightTransferConfig(StrictConfig):
    """How the trainer's weights reach the servers (vllm, sglang)."""

    kind: Literal["disk", "nccl", "lora"] | None = None
    """``disk``: a file in a RAM-backed folder; ``nccl``: from GPU to GPU; ``lora``: the adapter
    alone. null: ``lora`` with ``model.lora``; else ``nccl`` where trainer and servers have GPUs
    of their own; else ``disk``."""
    dir: str | None = None
    """Folder for files of weights, seen by trainer and servers; null: /dev/shm where it has room,
    else the system's folder for temporary files."""


class EngineConfig(StrictConfig):
    """What samples the completions."""

    kind: ResumeSafe[Literal["embedded", "vllm", "sglang"] | None] = None
    """null: ``vllm`` where there is a GPU, ``embedded`` elsewhere."""
    num_servers: ResumeSafe[int] = Field(1, ge=1)
    """Server processes (vllm, sglang); the embedded engine is always one."""
    python: ResumeSafe[str | None] = None
    """Interpreter whose environment has the server's package; null: the one agentrl runs on."""
    device: ResumeSafe[Literal["cpu", "cuda"] | None] = None
    """Where servers compute; null: ``cuda`` where there is a GPU, ``cpu`` elsewhere."""
    tensor_parallel_size: ResumeSafe[int] = Field(1, ge=1)
    """GPUs of one server."""
    gpu_memory_utilization: ResumeSafe[float | None] = Field(None, gt=0.0, le=1.0)
    """Share of a GPU's memory that a server takes; null: 0.9, or 0.4 of one that the trainer
    computes on too."""
    cpu_kv_cache_gib: ResumeSafe[float] = Field(1.0, gt=0.0)
    """Memory for keys and values of one server on CPU, in GiB."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls: a name from docs/parsers.md, ``auto`` (its chat template
    says), or ``none``."""
    reasoning_parser: str = "auto"
    """How the model writes its reasoning: a name from docs/parsers.md, ``auto`` (its chat template
    says), or ``none``, which leaves it in the content."""
    keep_reasoning: bool = False
    """True: the history keeps the reasoning that was sampled, whatever the chat template strips;
    false: a turn whose reasoning is stripped ends a sample (``thinking_stripped``)."""
    max_model_len: int = Field(8192, ge=2)
    """Maximum number of tokens of prompt and completion together."""
    max_num_seqs: ResumeSafe[int] = Field(64, ge=1)
    """Maximum number of completions sampled at the same time (by each server)."""
    num_threads: ResumeSafe[int | None] = Field(None, ge=1)
    """CPU threads of the embedded engine (null: half of the cores, at least one), or of each
    server on CPU (null: an equal share of the cores but one, at least one)."""
    first_port: ResumeSafe[int | None] = Field(None, ge=1024, le=65000)
    """Loopback port of the first server; the others take the ports after it. null: free ports."""
    server_args: ResumeSafe[Annotated[tuple[str, ...], Field(strict=False)]] = ()
    """Further arguments of the server's command line, such as ``--swap-space``."""
    weight_transfer: ResumeSafe[WeightTransferConfig] = WeightTransferConfig()
    start_timeout_seconds: ResumeSafe[float] = Field(600.0, gt=0.0)
    """Deadline of a server's start."""
    generate_timeout_seconds: ResumeSafe[float] = Field(600.0, gt=0.0)
    """Deadline of one completion."""
    publish_timeout_seconds: ResumeSafe[float] = Field(120.0, gt=0.0)
    """Deadline of a weight publication."""
    max_restarts: ResumeSafe[int] = Field(3, ge=0)
    """How many times within an hour a process that died is restarted; the next death stops the
    run."""

    def list_reading_options(self) -> dict[str, Any]:
        """How replies are read and continued, as the gateway takes it."""
        return {
            "tool_call_parser": self.tool_call_parser,
            "reasoning_parser": self.reasoning_parser,
            "keep_reasoning": self.keep_reasoning,
        }

    def compute_release_deadline(self) -> float:
        """Seconds after which servers have ended their calls and given up, or taken, memory."""
        return self.generate_timeout_seconds + 2 * self.publish_timeout_seconds

    def compute_publish_deadline(self) -> float:
        """Seconds after which a publication and its verification are over, whatever happens.

        Servers that are restarted meanwhile, as often as they may be, get the weights again.
        """
        return (1 + self.max_restarts) * (
            2 * self.publish_timeout_seconds
            + self.start_timeout_seconds
            + 2 * self.generate_timeout_seconds
        )


class DynamicSamplingConfig(StrictConfig):
    """Groups whose trajectories all have the same score teach nothing: backup tasks take their
    place in the batch (DAPO, arXiv 2503.14476, section 3.2). They are kept in the run folder and
    counted in ``reward_mean``. Not for shaped rewards: see docs/how-it-works.md."""

    kind: Literal["dynamic_sampling"]
    max_backup_tasks: int | None = Field(None, ge=1)
    """Maximum number of backup tasks of one step; further groups without signal stay in the
    batch. null: ``train_dataset.batch_size``."""


class CooldownConfig(StrictConfig):
    """A task whose trajectories all have the same score (always solved, or never) is skipped in the
    next epochs: in one after the first time, then in two, four, ... until its scores differ. See
    docs/how-it-works.md."""

    kind: Literal["cooldown"]
    max_cooldown_epochs: int = Field(4, ge=1)
    """Maximum number of consecutive epochs in which a task is skipped."""


class ExternalConfig(StrictConfig):
    """How external programs get tasks and return trajectories (``agent_mode: external``)."""

    host: str = "127.0.0.1"
    """Address to listen on; if other machines can reach it, AGENTRL_API_KEY must hold a key."""
    port: int | None = Field(None, ge=1024, le=65535)
    """null: any free port."""
    idle_timeout_seconds: float = Field(300.0, gt=0.0)
    """After this long without a request, the task of a session is given to another program."""
    max_sessions_per_attempt: int = Field(3, ge=1)
    """Number of sessions after which an attempt counts as failed."""
    max_wait_seconds: float = Field(3600.0, gt=0.0)
    """Longest time that pending tasks go without any program asking for one; then the run stops."""


class SubprocessConfig(StrictConfig):
    """The processes that run agents, each one trajectory at a time (``agent_mode: subprocess``)."""

    max_processes: int | None = Field(None, ge=1)
    """Maximum number of them; null: ``max_concurrent``, but at most 4 for each CPU core: agents
    wait most of the time."""
    max_tasks: int = Field(100, ge=1)
    """Trajectories after which a process is replaced; 1: each gets a fresh one, whose imports take
    time."""
    modules: Literal["reloaded", "kept"] = "reloaded"
    """``reloaded``: your own modules are imported again for every trajectory; ``kept``: once in
    each process, for builders that load something large."""
    max_memory_gib: float | None = Field(None, gt=0.0)
    """Maximum memory of a process and those it starts; beyond it, its trajectory fails. null: no
    limit."""


class RolloutConfig(StrictConfig):
    """How trajectories are made."""

    max_concurrent: ResumeSafe[int] = Field(128, ge=1)
    """Maximum number of trajectories in progress at the same time."""
    min_concurrent: ResumeSafe[int] = Field(8, ge=1)
    """Between it and ``max_concurrent`` their number follows the load of the engine: enough to keep
    it busy, and few whose calls wait. As large as ``max_concurrent``: their number is fixed."""
    max_staleness: int = Field(2, ge=0)
    """How many steps' worth of tasks are begun ahead of the trainer; 0: none, each step waits for
    its own."""
    max_trajectory_age: int = Field(8, ge=0)
    """Maximum number of weight updates between a trajectory's first token and training on it; a
    step passes over what is not finished before that. At least ``max_staleness``."""
    filter: DynamicSamplingConfig | None = None
    """null: every group is trained on. ``dynamic_sampling``: a group whose trajectories
    all have the same score is replaced by the group of a backup task; not for shaped rewards
    (docs/how-it-works.md)."""
    curriculum: CooldownConfig | None = None
    """null: every task once an epoch. ``cooldown``: those whose trajectories all have the
    same score are skipped in some epochs (docs/how-it-works.md)."""
    turn_discount: float = Field(1.0, ge=0.0, le=1.0)
    """Share of a turn's credit that the turn before it receives."""
    export_style: Literal["concat", "individual"] = "concat"
    """``concat``: turns that continue each other are one sample; ``individual``: one per turn."""
    agent_mode: ResumeSafe[Literal["inline", "subprocess", "external"]] = "inline"
    """Where agents run."""
    external: ResumeSafe[ExternalConfig] = ExternalConfig()
    timeout_seconds: ResumeSafe[float] = Field(600.0, gt=0.0)
    """Deadline of one trajectory: further calls are refused, and an agent that has not
    returned a few seconds later is stopped."""
    max_retries: ResumeSafe[int] = Field(1, ge=0)
    """How often a trajectory that failed through its surroundings (a server, a tool, the reward
    function) is made again; not one that ran out of time, and none before any has worked."""
    retry_from: ResumeSafe[Literal["start", "finished_turns"]] = "start"
    """``finished_turns``: the agent runs from its start, but a call whose prompt is that of a call
    which the failed try completed gets its reply again. For agents whose tools may be called twice
    for the same turn; where one answers otherwise, the model is asked from there on."""
    max_failed_groups: ResumeSafe[int | None] = Field(3, ge=1)
    """A task of which so many groups in a row failed through their surroundings, all retries
    included, is set aside and reported, until the run is resumed; null: never."""
    max_turns: int = Field(16, ge=1)
    """Maximum number of model calls in one trajectory."""
    max_tokens_per_trajectory: int = Field(32768, ge=1)
    """Maximum number of sampled tokens in one trajectory."""
    policy_failure_reward: float | None = Field(0.0, allow_inf_nan=False)
    """Reward of a trajectory that failed through what the policy sampled (docs/how-it-works.md);
    null: unscored."""
    reward_timeout_seconds: ResumeSafe[float] = Field(60.0, gt=0.0)
    """Deadline of one call of the reward function."""
    reward_workers: ResumeSafe[int | None] = Field(None, ge=1)
    """Processes that run blocking reward functions, each one call at a time; null: one for each
    CPU core."""
    num_workers: ResumeSafe[int | None] = Field(None, ge=0)
    """Rollout workers: processes that each run a share of the trajectories (with engine servers);
    0: all run in the trainer's process. null: one for every 4 CPU cores, at most 4; with
    ``agent_mode: external``, 1 at most."""
    subprocess: ResumeSafe[SubprocessConfig] = SubprocessConfig()

    @model_validator(mode="after")
    def _lets_admitted_tasks_be_trained(self) -> Self:
        if self.max_trajectory_age < self.max_staleness:
            raise ValueError(
                f"max_trajectory_age: {self.max_trajectory_age} is less than max_staleness "
                f"({self.max_staleness}): what is begun so far ahead is older when its turn comes. "
                f"Type rollout.max_trajectory_age={self.max_staleness} or more"
            )
        return self

    def count_parallel(self) -> int:
        """Trajectories that run at the same time: those with a process, where agents need one."""
        if self.agent_mode != "subprocess":
            return self.max_concurrent
        return self.count_agent_processes()

    def count_agent_processes(self) -> int:
        """Processes that run agents, where they run in processes of their own."""
        limit = self.subprocess.max_processes or _PROCESSES_PER_CORE * count_usable_cores()
        return min(self.max_concurrent, limit)

    def count_reward_workers(self) -> int:
        """Processes that run blocking reward functions."""
        return self.reward_workers or count_usable_cores()

    def count_retries(self) -> int:
        """How often a trajectory may be made again; a program elsewhere has its own sessions."""
        return 0 if self.agent_mode == "external" else self.max_retries

    def compute_deadline(self, num_trajectories: int, *, max_in_a_row: int = 1) -> float:
        """Seconds after which so many trajectories are over, whatever agents and rewards do.

        ``max_in_a_row``: how many of them at most begin only after another has ended.
        """
        num_waves = math.ceil(num_trajectories / min(self.count_parallel(), self.min_concurrent))
        if max_in_a_row > 1:
            # While places are free, one of the row is running (Graham 1966).
            num_waves += max_in_a_row
        seconds = self.timeout_seconds + self.reward_timeout_seconds
        if self.agent_mode == "external":
            # There may be one program, which takes them one after another.
            num_waves = num_trajectories
            seconds = (
                seconds + self.external.max_wait_seconds
            ) * self.external.max_sessions_per_attempt
        # Calls of the reward function wait for each other too.
        num_calls = math.ceil(num_trajectories / self.count_reward_workers())
        once = num_waves * seconds + num_calls * self.reward_timeout_seconds
        # A margin, with the pauses before retries.
        return (1 + self.count_retries()) * (60.0 + once)


class LauncherConfig(StrictConfig):
    """Where processes run."""

    kind: Literal["local", "ray", "torchrun"] = "local"
    """``local``: on this machine; ``ray``: on the nodes of a Ray cluster (extra
    ``agentrl-cli[ray]``); ``torchrun``: the trainer's ranks are the processes that torchrun starts,
    everything else is on the machine of rank 0 (see slurm.md)."""
    address: str | None = None
    """ray: ``HOST:PORT`` of the cluster's head, or ``http://HOST:8265`` of its dashboard for a
    machine that does not belong to the cluster (see clusters.md); null: RAY_ADDRESS, else the
    cluster that runs on this machine, else one that is started here."""
    resources: dict[Literal["engine", "trainer", "rollout"], dict[str, float]] = Field(
        default_factory=dict
    )
    """ray: what each process of a role needs of its node, beside the GPUs and CPU cores that the
    other keys come to: ``{engine: {accelerator_type:H100: 0.01}}`` chooses nodes."""
    placement_timeout_seconds: float = Field(300.0, gt=0.0)
    """ray: how long to wait for room on the cluster, at the start and for a process whose node was
    lost."""
    max_trainer_restarts: int = Field(3, ge=0)
    """How many times a trainer process that was killed is restarted from its last checkpoint; only
    where the trainer is a process of its own (vllm, sglang, ray)."""


class LoggerConfig(StrictConfig):
    """Where metrics and trajectories go besides the run folder (see loggers.md)."""

    kind: Literal["tensorboard", "wandb", "mlflow", "trackio", "otlp"]
    """``otlp``: trajectories as spans, to a collector of OpenTelemetry."""
    project: str | None = None
    """wandb, trackio: the project; mlflow: the experiment. null: ``experiment_name``."""
    url: str | None = Field(None, pattern=r"^(https?://.+|databricks.*|sqlite:.+)$")
    """mlflow: its server (null: MLFLOW_TRACKING_URI); otlp: the collector (null:
    OTEL_EXPORTER_OTLP_ENDPOINT, else ``http://localhost:4318``); trackio: its server (null: the
    local database)."""
    max_trajectories: int = Field(8, ge=0)
    """mlflow, otlp: maximum number of trajectories of each step that are sent as traces, from the
    lowest reward to the highest."""
    capture_content: bool = False
    """mlflow, otlp: True: traces hold messages, and arguments and results of tools."""

    @model_validator(mode="after")
    def _has_only_what_its_kind_reads(self) -> Self:
        of_traces = ("mlflow", "otlp")
        readers = {
            "project": ("wandb", "trackio", "mlflow"),
            "url": ("mlflow", "trackio", "otlp"),
            "max_trajectories": of_traces,
            "capture_content": of_traces,
        }
        for name, kinds in readers.items():
            # The defaults of all keys are saved with a run.
            is_given = getattr(self, name) != type(self).model_fields[name].default
            if is_given and self.kind not in kinds:
                raise ValueError(
                    f"{name} is not for kind {self.kind}. Allowed with: "
                    f"{', '.join(kinds)}. Remove it"
                )
        return self


class AgentConfig(StrictConfig):
    """One of several agents, chosen by a row's ``agent_name``."""

    agent_builder_path: str
    agent_builder_kwargs: dict[str, Any] = Field(default_factory=dict)


class ExperimentConfig(StrictConfig):
    """Everything ``agentrl train`` and ``agentrl eval`` need."""

    experiment_name: ResumeSafe[FolderName]
    trial_name: ResumeSafe[FolderName] = "t0"
    output_dir: ResumeSafe[OutputDir] = "runs"
    """Run folders are ``<output_dir>/<experiment_name>/<trial_name>``. A folder, or the URL of
    object storage such as ``s3://bucket/runs`` (see checkpoints.md)."""
    seed: int = Field(1, ge=0)
    model: ModelConfig
    tokenizer_path: str | None = None
    """null: the model's."""
    agent_builder_path: str | None = None
    """``package.module.function`` or ``path/to/file.py:function``."""
    agent_builder_kwargs: dict[str, Any] = Field(default_factory=dict)
    agents: dict[str, AgentConfig] = Field(default_factory=dict)
    """Named agents for rows with an ``agent_name``."""
    workflow_path: str | None = None
    """A RolloutWorkflow of your own, instead of an agent."""
    workflow_kwargs: dict[str, Any] = Field(default_factory=dict)
    reward_fn_path: str | None = None
    """null: the agent (or the workflow) gives the reward."""
    gconfig: GenerationConfig = GenerationConfig()
    eval_gconfig: GenerationConfig | None = None
    """Sampling during evaluation; what it leaves out is as in ``gconfig``, but with one sample per
    task."""
    train_dataset: DatasetConfig
    valid_dataset: DatasetConfig | None = None
    """null: no evaluation while training."""
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    launcher: ResumeSafe[LauncherConfig] = LauncherConfig()
    loggers: ResumeSafe[Annotated[tuple[LoggerConfig, ...], Field(strict=False)]] = ()

    @model_validator(mode="after")
    def _complete_eval_gconfig(self) -> Self:
        given = self.eval_gconfig
        if given is not None:
            update = {"n_samples": 1, **given.model_dump(include=given.model_fields_set)}
            # What is saved with the run holds every value.
            object.__setattr__(self, "eval_gconfig", self.gconfig.model_copy(update=update))
        return self

    @model_validator(mode="after")
    def _has_something_to_run(self) -> Self:
        has_agent = bool(self.workflow_path or self.agent_builder_path or self.agents)
        is_external = self.rollout.agent_mode == "external"
        if is_external and has_agent:
            raise ValueError(
                "rollout.agent_mode: external runs no agent of its own. Type "
                "agent_builder_path=null agents={} workflow_path=null"
            )
        if not is_external and not has_agent:
            raise ValueError("nothing to run: set agent_builder_path (or agents, or workflow_path)")
        return self

    def resolve_eval_gconfig(self) -> GenerationConfig:
        """The sampling of evaluations."""
        return self.eval_gconfig or self.gconfig.model_copy(update={"n_samples": 1})

    def resolve_eval_dataset(self) -> tuple[str, DatasetConfig]:
        """Key and dataset of ``agentrl eval``: the training one where none is for validation."""
        if self.valid_dataset is None:
            return "train_dataset", self.train_dataset
        return "valid_dataset", self.valid_dataset

    def resolve_max_backup_tasks(self) -> int:
        """Maximum number of backup tasks of a step; 0 without ``rollout.filter``."""
        replacing = self.rollout.filter
        if replacing is None:
            return 0
        return replacing.max_backup_tasks or self.train_dataset.batch_size

    def check_trainable(self) -> None:
        """Refuses what can be evaluated but not trained.

        Raises:
            ConfigError: says what to type instead.
            MissingExtraError: ``model.lora`` is set and peft is not installed.
        """
        check_algorithm(
            self.train.algorithm,
            n_samples=self.gconfig.n_samples,
            max_tokens_per_trajectory=self.rollout.max_tokens_per_trajectory,
            max_staleness=self.rollout.max_staleness,
        )
        if self.gconfig.temperature == 0.0:
            raise ConfigError(
                "gconfig.temperature: 0 samples the same trajectory every time and leaves no "
                "gradient. Allowed when training: above 0. Type gconfig.temperature=1.0"
            )
        self._check_groups_are_compared()
        self._check_best_checkpoint()
        self._check_weights_reach_servers()

    def _check_groups_are_compared(self) -> None:
        replacing, curriculum = self.rollout.filter, self.rollout.curriculum
        for key, chosen in (("filter", replacing), ("curriculum", curriculum)):
            if chosen is not None and self.gconfig.n_samples == 1:
                raise ConfigError(
                    f"rollout.{key}.kind: {chosen.kind} compares the scores of a group, and "
                    "gconfig.n_samples is 1. Allowed: 2 or more. Type gconfig.n_samples=8, or "
                    f"rollout.{key}=null"
                )
        algorithm = self.train.algorithm
        if replacing is not None and not algorithm.compares_within_groups:
            raise ConfigError(
                f"rollout.filter.kind: {replacing.kind} replaces groups whose scores are equal, "
                f"and train.algorithm.advantage.kind {algorithm.advantage.kind} learns from them "
                "as from others. Type rollout.filter=null, or train.algorithm.kind=grpo"
            )

    def _check_best_checkpoint(self) -> None:
        metric, num_samples = self.train.keep_best_checkpoint, self.resolve_eval_gconfig().n_samples
        # Those that evaluations report: powers of two, and the number of samples.
        counts = [k for k in range(1, num_samples + 1) if k & (k - 1) == 0 or k == num_samples]
        allowed = ["mean_reward", *(f"pass_at_{k}" for k in counts)]
        if self.valid_dataset is not None and metric is not None and metric not in allowed:
            raise ConfigError(
                f"train.keep_best_checkpoint: {metric} is not reported by evaluations with "
                f"{num_samples} sample(s) per task (eval_gconfig.n_samples). Allowed: "
                f"{', '.join(allowed)}, null. Type train.keep_best_checkpoint={allowed[-1]}"
            )

    def _check_weights_reach_servers(self) -> None:
        transfer = self.engine.weight_transfer.kind
        if transfer == "lora" and self.model.lora is None:
            raise ConfigError(
                "engine.weight_transfer.kind: lora sends adapters, and without model.lora none is "
                "trained. Type engine.weight_transfer.kind=disk, or "
                "model.lora.rank=16 to train an adapter"
            )
        if transfer == "nccl" and self.engine.kind == "sglang":
            raise ConfigError(
                "engine.weight_transfer.kind: nccl is not supported with engine.kind sglang. "
                "Allowed: disk, lora. Type engine.weight_transfer.kind=disk"
            )
        if self.model.lora is not None and importlib.util.find_spec("peft") is None:
            raise MissingExtraError(
                "model.lora needs peft, which is not installed. Type "
                "uv pip install 'agentrl-cli[lora]'"
            )
