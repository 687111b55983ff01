"""From a configuration to the workflow that makes its trajectories."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from agentrl_cli.agents.agent_building import AgentSource, list_agent_specs
from agentrl_cli.agents.agent_environment import building_environment, reward_environment
from agentrl_cli.config.experiment import EngineConfig, ExperimentConfig, GenerationConfig
from agentrl_cli.config.import_paths import import_object
from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.errors import ConfigError, ImportPathError
from agentrl_cli.rollout.agent_workflow import AgentRolloutWorkflow, ClientFactory
from agentrl_cli.rollout.external.external_workflow import ExternalListener, ExternalWorkflow
from agentrl_cli.rollout.rewards import AsyncRewardWrapper
from agentrl_cli.rollout.workers.worker_pool import WorkerAgents
from agentrl_cli.rollout.workflow import RolloutWorkflow
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.session import Budget

#: What a workflow of the user's may name in its signature, besides its ``workflow_kwargs``.
SUPPLIED = ("tokenizer", "gconfig", "config", "reward")


def build_workflow(config: ExperimentConfig, tokenizer: Any, **options: Any) -> RolloutWorkflow:
    """The workflow that makes the trajectories to train on; see :func:`build_workflows`."""
    [workflow] = build_workflows(config, tokenizer, ["train"], **options)
    return workflow


def build_workflows(
    config: ExperimentConfig,
    tokenizer: Any,
    splits: Sequence[str],
    *,
    open_client: ClientFactory | None = None,
    workers: WorkerAgents | None = None,
    external: ExternalListener | None = None,
) -> list[RolloutWorkflow]:
    """The workflows of a configuration, its builders and reward function imported and tried.

    They share the agents, and the processes that the reward function runs in.

    Args:
        config: the configuration.
        tokenizer: the model's tokenizer.
        splits: what the tasks of each are for: ``train``, or ``eval``, which is sampled as
            ``config.resolve_eval_gconfig()`` says.
        open_client: makes the client of a trajectory; None: a TrackingClient on the engine.
        workers: run the agents, if they are started or an agent cannot run here; None: agents
            run here, whatever ``rollout.agent_mode`` says.
        external: the way in for programs elsewhere, for ``agent_mode: external``.

    Raises:
        UserInputError: an import path, a builder, a signature or a combination that cannot work.
    """
    gconfigs = [
        config.gconfig if split == "train" else config.resolve_eval_gconfig() for split in splits
    ]
    if config.workflow_path is not None and external is None:
        return _build_own_workflows(config, tokenizer, gconfigs)
    agents: dict[str | None, AgentSource] = {}
    remote = workers.agents if workers is not None else {}
    if external is None and not remote:
        # Before the reward: of a file that holds both, clients are the agent's.
        with building_environment():
            agents = {name: spec.load() for name, spec in list_agent_specs(config).items()}
    reward = _build_reward(config)
    options: dict[str, Any] = {
        "reward": reward,
        "rollout": config.rollout,
        "open_client": open_client or _make_client_factory(tokenizer, config.engine),
        "seed": config.seed,
    }
    if external is not None:
        return [
            ExternalWorkflow(external, split=split, gconfig=gconfig, **options)
            for split, gconfig in zip(splits, gconfigs, strict=True)
        ]
    if reward is None:
        _check_rewarded(agents or remote)
    return [
        AgentRolloutWorkflow(agents, workers=workers, gconfig=gconfig, **options)
        for gconfig in gconfigs
    ]


def _make_client_factory(tokenizer: Any, config: EngineConfig) -> ClientFactory:
    held: list[Any] = []

    def open_client(engine: InferenceEngine, sampling: Sampling, budget: Budget) -> TrackingClient:
        client = TrackingClient(
            engine=engine,
            tokenizer=tokenizer,
            sampling=sampling,
            budget=budget,
            **config.list_reading_options(),
        )
        # An engine's gateway lives as long as somebody holds it; between two trajectories
        # that is us.
        held[:] = [client.gateway]
        return client

    return open_client


@contextmanager
def open_workers(config: ExperimentConfig) -> Iterator[WorkerAgents | None]:
    """The workers for agents inside the block, started if ``rollout.agent_mode`` asks for them.

    Raises:
        UserInputError: an agent cannot be built; found out in a process of its own.
        RunError: no process can be started.
    """
    if config.rollout.agent_mode == "external" or config.workflow_path is not None:
        yield None
        return
    with closing(WorkerAgents(config)) as workers:
        if config.rollout.agent_mode == "subprocess":
            workers.start()
        yield workers


def _build_reward(config: ExperimentConfig) -> AsyncRewardWrapper | None:
    if config.reward_fn_path is None:
        return None
    with reward_environment():
        function = import_object(config.reward_fn_path, "reward_fn_path")
    return AsyncRewardWrapper(
        function,
        timeout_seconds=config.rollout.reward_timeout_seconds,
        num_workers=config.rollout.reward_workers,
        import_path=config.reward_fn_path,
    )


def _check_rewarded(agents: Mapping[str | None, Any]) -> None:
    for name, source in agents.items():
        if not source.runner.gives_rewards:
            which = "the agent" if name is None else f"agents.{name}"
            raise ConfigError(
                f"reward_fn_path is not set, and {which} ({source.runner.framework}) answers "
                "in text, so nothing would give a reward. "
                "Type reward_fn_path=FILE.py:FUNCTION, a function of your own (docs/rewards.md)"
            )


def _build_own_workflows(
    config: ExperimentConfig, tokenizer: Any, gconfigs: Sequence[GenerationConfig]
) -> list[RolloutWorkflow]:
    """Of the user's RolloutWorkflow: each gets ``workflow_kwargs``, and what else its signature
    names."""
    where = f"workflow_path: {config.workflow_path!r}"
    factory = import_object(config.workflow_path or "", "workflow_path")
    if not callable(factory):
        raise ImportPathError(f"{where} is {type(factory).__name__}; name a RolloutWorkflow class")
    named = inspect.signature(factory).parameters
    reward = _build_reward(config)
    workflows = []
    for gconfig in gconfigs:
        supplied = dict(zip(SUPPLIED, (tokenizer, gconfig, config, reward), strict=True))
        chosen = {name: value for name, value in supplied.items() if name in named}
        try:
            workflow = factory(**{**chosen, **config.workflow_kwargs})
        except Exception as error:
            raise ImportPathError(
                f"{where} raised {type(error).__name__}: {error}. It is called with "
                f"workflow_kwargs ({', '.join(config.workflow_kwargs) or 'empty'}) and, of "
                f"{', '.join(SUPPLIED)}, what its signature names"
            ) from error
        if not isinstance(workflow, RolloutWorkflow):
            raise ImportPathError(
                f"{where} gave {type(workflow).__name__}. Allowed: a class derived from "
                "agentrl_cli.RolloutWorkflow, or a function that returns an object of one"
            )
        workflow.use(config.rollout, gconfig, reward)
        workflows.append(workflow)
    return workflows
