"""The preflight of a configuration: will training it work, and what must change first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl_cli.config.config_file import load_config
from agentrl_cli.config.experiment import ExperimentConfig, count_usable_cores
from agentrl_cli.config.resolved_run import Machine, ResolvedRun, resolve_run
from agentrl_cli.errors import AgentrlError, ModelError
from agentrl_cli.launch.local_run import try_input
from agentrl_cli.launch.preflight.findings import Finding, Severity, describe_error, note
from agentrl_cli.launch.preflight.memory_findings import Changed, find_in_memory
from agentrl_cli.launch.preflight.memory_fit import MemoryEstimate, NamedGpus
from agentrl_cli.launch.preflight.step_cost import StepCost, measure_step_cost
from agentrl_cli.launch.preflight.trial import (
    STAND_IN,
    Trial,
    TrialPlan,
    choose_local_model,
    run_trial,
)
from agentrl_cli.launch.preflight.trial_findings import find_in_trial
from agentrl_cli.launch.run_resolution import check_supported, with_server_package
from agentrl_cli.log import Observer, SilentObserver, format_count
from agentrl_cli.models.builtin_models import find_model_folder, resolve_model_folder
from agentrl_cli.tracking.formats.format_choice import describe_fallback
from agentrl_cli.tracking.formats.reply_formats import ReplyFormats
from agentrl_cli.tracking.template import (
    PLAIN_CONVERSATION,
    ChatTemplate,
    TemplateError,
    make_template_inputs,
)
from agentrl_cli.train.model.model_shape import ModelShape, load_shape

#: Overrides, as remedies name them.
_TYPED = re.compile(r"^Type ((?:[a-z_.]+=\S+ ?)+)")
#: What stands for something of the user's own, as in FILE.py:FUNCTION.
_PLACEHOLDER = re.compile(r"[A-Z]{3}")
#: The code of what is found where the model's config.json cannot be had.
_UNREAD = "memory_unknown"
_TEMPLATE = "whether the chat template shows what the agent sends"


@dataclass(slots=True)
class CheckReport:
    """What a check found, part by part."""

    config: ExperimentConfig
    findings: list[Finding] = field(default_factory=list)
    trial: Trial | None = None
    step: StepCost | None = None
    memory: MemoryEstimate | None = None

    def list_of(self, severity: Severity) -> list[Finding]:
        """The findings of one severity."""
        return [finding for finding in self.findings if finding.severity is severity]

    @property
    def errors(self) -> list[Finding]:
        """The findings because of which it cannot work."""
        return self.list_of(Severity.ERROR)

    @property
    def verdict(self) -> str:
        """The answer in one line."""
        num_errors = len(self.errors)
        num_warnings = len(self.list_of(Severity.WARNING))
        counts = f"{format_count(num_errors, 'error')}, {format_count(num_warnings, 'warning')}"
        if num_errors:
            return f"not ready: {counts}. Change what the errors name first"
        if num_warnings:
            return f"ready, with doubts: {counts}. It would run; read the warnings first"
        return f"ready: {counts}"

    @property
    def typed_remedies(self) -> list[str]:
        """The overrides that the errors' remedies name."""
        matches = (_TYPED.match(finding.remedy) for finding in self.errors)
        words = [word for match in matches if match for word in match[1].rstrip(". ;,").split()]
        return [word for word in dict.fromkeys(words) if not _PLACEHOLDER.search(word)]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        trial, memory = self.trial, self.memory
        return {
            "verdict": self.verdict,
            "num_errors": len(self.errors),
            "num_warnings": len(self.list_of(Severity.WARNING)),
            "findings": [asdict(finding) for finding in self.findings],
            "trial": trial
            and {
                "model": trial.model,
                "is_stand_in": trial.is_stand_in,
                "num_trajectories": len(trial.trajectories),
                "seconds": trial.seconds,
            },
            "step": self.step and self.step.to_dict(self.config),
            "memory": memory
            and {
                "needs": [asdict(need) for need in memory.needs],
                "kv_cache_tokens": memory.kv_cache_tokens,
                "assumptions": memory.assumptions,
            },
        }


def run_check(
    config_path: Path,
    overrides: Sequence[str],
    plan: TrialPlan,
    gpus: NamedGpus | None,
    observer: Observer,
) -> CheckReport:
    """Looks at everything that can be looked at without a GPU, and runs the agent.

    Raises:
        UserInputError: the configuration file, or an override, cannot be read.
    """

    def load(words: Sequence[str]) -> ExperimentConfig:
        return load_config(config_path, [*overrides, *words])

    config = load(())
    report = CheckReport(config)
    observer.on_stage("configuration")
    report.findings += _check_input(config, gpus)
    can_run = not report.errors
    observer.on_stage("memory")
    shape = _estimate_memory(load, gpus, report)
    if config.rollout.agent_mode == "external":
        found = "rollout.agent_mode: external: the agents are programs elsewhere, and none of them "
        found += "was run. agentrl serve --online lets one be tried"
        report.findings.append(note("trial_skipped", "rollout.agent_mode", found))
    elif can_run:
        _try_agent(plan, report, shape, observer)
    else:
        found = "the agent was not run, because of the errors above"
        report.findings.append(note("trial_skipped", "agentrl check", found))
    order = list(Severity)
    report.findings.sort(key=lambda finding: order.index(finding.severity))
    return report


def _name_machine(gpus: NamedGpus | None, config: ExperimentConfig) -> Machine:
    """The machine that will train: this one, unless GPUs are named."""
    here = Machine.detect()
    if gpus is None:
        return here
    return Machine(
        gpu_ids=tuple(map(str, range(gpus.count))),
        num_cores=count_usable_cores(),
        num_nodes=1 if config.launcher.kind == "ray" else None,
    )


def _check_input(config: ExperimentConfig, gpus: NamedGpus | None) -> Iterator[Finding]:
    """What ``agentrl train --dry-run`` refuses, as far as each part can be looked at alone."""
    try:
        config.check_trainable()
    except AgentrlError as error:
        yield describe_error(error)
    try:
        run = resolve_run(config, _name_machine(gpus, config), purpose="train")
        check_supported(config, run)
    except AgentrlError as error:
        yield describe_error(error)
    else:
        yield from _check_package(config, run, gpus)
        if run.dtype_advice is not None:
            yield Finding(
                code="dtype", severity=Severity.WARNING, found=run.dtype_advice.split(". Type")[0],
                where="model.dtype", remedy="Type model.dtype=float32",
            )  # fmt: skip
    # What samples is looked at above: here it must need no GPU.
    engine = config.engine.model_copy(
        update={"kind": "embedded", "num_servers": 1, "tensor_parallel_size": 1}
    )
    rollout = config.rollout.model_copy(update={"num_workers": 0})
    train = config.train.model_copy(update={"num_processes": None})
    alone = config.model_copy(update={"engine": engine, "rollout": rollout, "train": train})
    try:
        run = resolve_run(alone, Machine.detect(), purpose="train")
        for line in try_input(alone, run, overwrite=False):
            yield note("not_looked_at", line.split(":")[0], line)
    except AgentrlError as error:
        yield describe_error(error)


def _check_package(
    config: ExperimentConfig, run: ResolvedRun, gpus: NamedGpus | None
) -> Iterator[Finding]:
    """Whether what serves is installed; it must be where the run will be."""
    try:
        with_server_package(run, config)
    except AgentrlError as error:
        finding = describe_error(error, "missing_package")
        if gpus is None:
            yield finding
        else:
            found = f"on this machine: {finding.found} The machine with the {gpus.name} needs it"
            yield replace(finding, severity=Severity.NOTE, where="engine.kind", found=found)


def _find_local_folder(path: str) -> str | None:
    """The folder of a model that is on this machine: its own, or that in the hub's cache."""
    with suppress(ModelError):
        folder = find_model_folder(path)
        if folder is not None or path == STAND_IN:
            return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None
    if not isinstance(cached, str) or not any(Path(cached).parent.glob("*.safetensors")):
        return None
    return str(Path(cached).parent)


def _estimate_memory(
    load: Callable[[Sequence[str]], ExperimentConfig], gpus: NamedGpus | None, report: CheckReport
) -> ModelShape | None:
    """Adds what is found of memory; the shape of the model, if its config.json can be had."""
    config = report.config
    if config.model.path.startswith("builtin:"):
        return None
    path = _find_local_folder(config.model.path) or config.model.path
    try:
        shape = load_shape(path, config.model.frozen)
    except ModelError as error:
        finding = describe_error(error, _UNREAD)
        remedy = "Type the command where the hub can be reached, or model.path= with a folder"
        finding = replace(
            finding,
            severity=Severity.WARNING,
            where="model.path",
            found=f"memory cannot be estimated: {finding.found}",
            remedy=finding.remedy or remedy,
        )
        report.findings.append(finding)
        return None

    def change(words: Sequence[str]) -> Changed:
        changed = load(words)
        return Changed(changed, resolve_run(changed, _name_machine(gpus, changed), purpose="train"))

    with suppress(AgentrlError):
        # What makes no run was said before.
        report.memory, found = find_in_memory(change, shape, gpus)
        report.findings += found
    return shape


def _try_agent(
    plan: TrialPlan, report: CheckReport, shape: ModelShape | None, observer: Observer
) -> None:
    """Runs the agent, and adds what is found by it."""
    config = report.config
    num_parameters = None if shape is None else shape.num_parameters
    local_model = choose_local_model(config, num_parameters, _find_local_folder)
    try:
        trial = report.trial = run_trial(config, plan, local_model, observer)
    except AgentrlError as error:
        report.findings.append(describe_error(error))
        return
    if trial.is_stand_in:
        found = (
            f"{STAND_IN}, a tiny model, answered the agent in place of {config.model.path}, which "
            "is not on this machine or too large for it: pass rates, lengths and tokens say "
            "nothing about yours. --base-url URL --model NAME lets a served one answer"
        )
        report.findings.append(note("stand_in", "model.path", found))
    report.findings += find_in_trial(config, trial)
    if config.tokenizer_path is None and any(f.code == _UNREAD for f in report.findings):
        # The hub would keep us waiting for the tokenizer as it did for the config.json.
        found = f"{_TEMPLATE}: the model cannot be read"
        report.findings.append(note("not_looked_at", "tokenizer_path", found))
    else:
        observer.on_stage("chat template")
        report.findings += _check_template(config, trial)
    report.step = measure_step_cost(config, trial.trajectories, trial.scores)
    if report.step is not None:
        described = report.step.describe(config, trial.model, is_stand_in=trial.is_stand_in)
        report.findings.append(note("step_cost", "train", described))


def _check_template(config: ExperimentConfig, trial: Trial) -> Iterator[Finding]:
    """What the real model's chat template does not show of what the agent sent to another."""
    from agentrl_cli.models.model_files import load_tokenizer_of

    try:
        folder = resolve_model_folder(config.model.path, SilentObserver())
        tokenizer = load_tokenizer_of(folder, config.tokenizer_path, config.model.chat_template)
    except AgentrlError as error:
        found = f"{_TEMPLATE}: {describe_error(error).found}"
        yield note("not_looked_at", "tokenizer_path", found)
        return
    template = ChatTemplate(tokenizer, ReplyFormats())
    try:
        template.check_shown(PLAIN_CONVERSATION)
        for trajectory in trial.trajectories:
            for call in trajectory.interactions:
                template.check_shown(list(call.messages), make_template_inputs(call.tools, {}))
    except TemplateError as error:
        if not isinstance(trial.error, TemplateError):
            yield describe_error(error)
    has_tools = any(i.tools for t in trial.trajectories for i in t.interactions)
    fallback = describe_fallback(tokenizer, config.engine.tool_call_parser)
    if has_tools and fallback is not None:
        yield Finding(
            code="tool_call_parser",
            severity=Severity.WARNING,
            found=fallback,
            where="engine.tool_call_parser",
            remedy="Type engine.tool_call_parser= with the model's format (docs/parsers.md)",
        )
