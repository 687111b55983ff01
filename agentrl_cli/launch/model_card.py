"""The README of an exported model: what it is, where it comes from, how it is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from agentrl_cli import __version__
from agentrl_cli.config.experiment import DatasetConfig, ExperimentConfig
from agentrl_cli.errors import StoreError
from agentrl_cli.launch.server_commands import find_vllm_lora_rank
from agentrl_cli.store.best import read_metric
from agentrl_cli.store.run_folder import RunFolder

MODEL_CARD_NAME = "README.md"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.\-]*/[\w.\-]+$")
_FILE_SUFFIXES = {".jsonl", ".json", ".csv", ".parquet"}


def format_model_card(
    folder: RunFolder, config: ExperimentConfig, *, step: int, name: str, base: str | None
) -> str:
    """The card of the checkpoint of ``step``, in the form that the hub reads.

    Args:
        folder: of the run.
        config: the run's.
        step: the checkpoint's.
        name: of the folder that is written.
        base: folder or hub id of the model that it needs, where it holds an adapter alone.
    """
    run = f"{config.experiment_name}/{config.trial_name}"
    facts = [
        ("run", run),
        ("step", f"{step} of {config.train.total_steps}"),
        ("trained from", f"`{config.model.path}`"),
        ("trained", _describe_weights(config)),
        ("algorithm", f"`{config.train.algorithm.kind}`"),
        ("tasks", _describe_dataset(config.train_dataset)),
        ("reward", f"`{config.reward_fn_path or 'the agent gives it'}`"),
        *_list_evaluations(folder, config, step),
        ("seed", str(config.seed)),
    ]
    table = "\n".join(f"| {key} | {value} |" for key, value in facts)
    front = yaml.safe_dump(
        _build_front_matter(config, is_adapter=base is not None), sort_keys=False
    )
    how = _LOAD_MODEL if base is None else _LOAD_ADAPTER
    rank = find_vllm_lora_rank(config.model.lora.rank) if config.model.lora is not None else 0
    return (
        f"---\n{front}---\n\n# {name}\n\n"
        f"Trained by reinforcement learning with agentrl {__version__}: step {step} of the run "
        f"{run}.\n\n|  |  |\n|---|---|\n{table}\n\n" + how.format(name=name, base=base, rank=rank)
    )


_LOAD_MODEL = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

    vllm serve {name}
"""

_LOAD_ADAPTER = """## Use

This is an adapter in peft's format: it needs the model that it was trained from.
`base_model_name_or_path` in `adapter_config.json` says where that was; correct it if it is
elsewhere now.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")  # loads the base model too; needs peft
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

    vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {name}={name}
"""


def _build_front_matter(config: ExperimentConfig, *, is_adapter: bool) -> dict[str, Any]:
    front: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers"}
    if _is_on_hub(config.model.path):
        front["base_model"] = config.model.path
    if _is_on_hub(config.train_dataset.path):
        front["datasets"] = [config.train_dataset.path]
    return {
        **front,
        "pipeline_tag": "text-generation",
        "tags": ["agentrl", "reinforcement-learning"],
    }


def _is_on_hub(path: str) -> bool:
    """False for what is, or can only be, a file or folder of some machine."""
    is_file = Path(path).suffix.lower() in _FILE_SUFFIXES
    return bool(_HUB_ID.match(path)) and not is_file and not Path(path).exists()


def _describe_weights(config: ExperimentConfig) -> str:
    lora, frozen = config.model.lora, ", ".join(config.model.frozen)
    what = f"all weights but {frozen}" if frozen else "all weights"
    if lora is not None:
        what = f"an adapter of rank {lora.rank} (LoRA)"
    return f"{what}, in {config.model.dtype}"


def _describe_dataset(dataset: DatasetConfig) -> str:
    parts = [dataset.path, dataset.name, dataset.split]
    return "`" + " ".join(part for part in parts if part) + "`"


def _list_evaluations(
    folder: RunFolder, config: ExperimentConfig, step: int
) -> list[tuple[str, str]]:
    """What the evaluations before the training and after this step found."""
    if config.valid_dataset is None:
        return []
    on = f" on {_describe_dataset(config.valid_dataset)}"
    rows = [(f"evaluation after this step{on}", step), ("the same before the training", 0)]
    return [(label, _describe_eval(folder, at)) for label, at in rows if at in folder.eval_steps()]


def _describe_eval(folder: RunFolder, step: int) -> str:
    try:
        report = folder.read_eval_report(step)
    except StoreError:
        return "its report cannot be read"
    mean = read_metric(report, "mean_reward")
    if mean is None:
        return "no trajectory was scored"
    interval = report.get("interval")
    within = f" (95 %: {interval[0]:.3f} to {interval[1]:.3f})" if interval else ""
    return f"mean reward {mean:.3f}{within}, {report.get('num_tasks', '?')} tasks"
