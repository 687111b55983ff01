"""Writes docs/coming-from.md from the table of names: ``python docs/make_coming_from.py``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentrl_cli.config.key_names import AREAL, TRL, VERL

PAGE = Path(__file__).with_name("coming-from.md")

_HEAD = """# Coming from AReaL, verl or TRL

Made by `python docs/make_coming_from.py` from `agentrl_cli/config/key_names.py`.

Take a new file and carry over what the tables name: agentrl's defaults stand for the rest, and
[configuration.md](configuration.md) has every key. A key that is typed as there is refused with its
name here: `gconfig.max_new_tokens -> gconfig.max_tokens`.

What no key says:

- **The agent** brings its tools, its prompts and its loop: `agent_builder_path` names a function
  that builds it ([agents.md](agents.md)), and no workflow class, agent loop or tool file is needed.
  A workflow of AReaL's kind, with an `arun_episode` of its own, is named by `workflow_path`
  ([workflows.md](workflows.md)).
- **The reward** is a function of the answer and the row's fields, named by `reward_fn_path`
  ([rewards.md](rewards.md)).
- **Rows** are as they are: `.jsonl`, `.json`, `.csv`, `.parquet`, or a dataset on the hub; prompts
  are not tokenized beforehand, and no column has a fixed name.
- **Lengths** are counted in steps. One epoch is rows / `train_dataset.batch_size` of them.
- **Values of `${...}`** (OmegaConf's) are not resolved: write them out.
- **Processes and GPUs** are found out: what `engine.num_servers` x `engine.tensor_parallel_size`
  leaves trains ([engines.md](engines.md)).

A configuration of the usual size:

```yaml
experiment_name: gsm8k
trial_name: t0
seed: 1
model: {path: Qwen/Qwen2.5-1.5B-Instruct}              # AReaL: actor.path
agent_builder_path: builders.math_agent.build_math_agent
reward_fn_path: rewards.gsm8k.gsm8k_reward_fn          # verl: custom_reward_function
gconfig: {n_samples: 4, max_tokens: 1024, temperature: 1.0}
train_dataset: {path: openai/gsm8k, name: main, split: train, batch_size: 256}
valid_dataset: {path: openai/gsm8k, name: main, split: test}
engine: {kind: vllm, num_servers: 4, max_model_len: 8192}
rollout: {max_concurrent: 256, max_staleness: 2}
train:
  total_steps: 290                                     # 10 epochs of 7,473 rows
  learning_rate: 1.7e-5
  algorithm: {kind: grpo, loss: {kind: decoupled_ppo, clip_low: 0.4, clip_high: 0.4}}
  eval_every_steps: 29
  save_every_steps: 29
```

"""

_TRL = """A script that builds a `GRPOTrainer` becomes a YAML file. The training process no longer
generates from the model itself, `tools` and `environment_factory` are what the agent has anyway,
and a reward function scores one trajectory: `completions` is its final answer, not a list.

"""


def format_page() -> str:
    """The whole page."""
    same = (
        "`experiment_name`, `trial_name`, `seed`, `tokenizer_path`, `gconfig.n_samples`, "
        "`gconfig.temperature`,\n`gconfig.top_p`, `train_dataset.path`, `.batch_size` and "
        "`.shuffle`, and the same of `valid_dataset`,\nare the same.\n\n"
    )
    return (
        f"{_HEAD}## AReaL\n\n{same}{_format_table(AREAL, 'AReaL')}\n"
        f"## verl\n\n{_format_table(VERL, 'verl')}\n"
        f"## TRL\n\n{_TRL}{_format_table(TRL, 'TRL')}"
    )


def _format_table(names: Mapping[str, str], trainer: str) -> str:
    rows = [f"| {trainer} | agentrl |", "|---|---|"]
    for key, meaning in names.items():
        keys, bracket, note = meaning.partition(" (")
        if not meaning.startswith("nothing to set"):
            keys = ", ".join(f"`{one}`" for one in keys.split(", "))
        rows.append(f"| `{key}` | {keys}{bracket}{note} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(format_page(), encoding="utf-8")
