"""What a checkpoint scores without agentrl.

    python -m benchmarks.transformers_check FOLDER EXAMPLE

Runs an example's agent on its held-out tasks with transformers alone, greedily, and prints the mean
reward as JSON. Nothing of agentrl is imported: the agent gets a client that generates in this
process. For examples whose agent speaks OpenAI's chat completions without tools.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer


class LocalClient:
    """As much of ``AsyncOpenAI`` as the agents use."""

    def __init__(self, folder: str, dtype: str, max_tokens: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._max_tokens = max_tokens
        self._num_calls = 0
        self.chat = SimpleNamespace(completions=self)

    async def create(self, *, model: str, messages: list[dict[str, Any]]) -> Any:
        """The likeliest reply."""
        del model
        ids = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        whole = self._model.generate(**ids, max_new_tokens=self._max_tokens, do_sample=False)
        text = self._tokenizer.decode(
            whole[0, ids["input_ids"].shape[1] :], skip_special_tokens=True
        )
        self._num_calls += 1
        choice = SimpleNamespace(message=SimpleNamespace(content=text))
        return SimpleNamespace(id=str(self._num_calls), choices=[choice])


def find(import_path: str) -> Any:
    """The object at ``module.name`` or ``module:name``."""
    module, _, name = import_path.replace(":", ".").rpartition(".")
    return getattr(importlib.import_module(module), name)


def score(config: Mapping[str, Any], row: Mapping[str, Any], result: Any) -> float:
    """The reward of what the agent returned."""
    if "reward_fn_path" in config:
        reward = find(config["reward_fn_path"])(completions=result, answer=row["answer"])
        return float(reward["reward"] if isinstance(reward, dict) else reward)
    return statistics.fmean(result.values()) if isinstance(result, dict) else float(result)


async def measure(folder: str, config: Mapping[str, Any]) -> list[float]:
    """The reward of each held-out task."""
    dataset = config["valid_dataset"]
    rows = find(dataset["path"])(dataset["split"])[: dataset.get("limit")]
    max_tokens = config["eval_gconfig"]["max_tokens"]
    client = LocalClient(folder, config["model"]["dtype"], max_tokens)
    agent = find(config["agent_builder_path"])()
    given = {"client": client, "model": "local", "max_turns": config["rollout"].get("max_turns")}
    given = {name: given[name] for name in inspect.signature(agent).parameters if name in given}
    return [score(config, row, await agent(row, **given)) for row in rows]


def main() -> None:
    """Prints the mean reward, its 95 % interval by the normal distribution, and its tasks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a checkpoint, or any model's folder")
    parser.add_argument("example", help="for example reverse_text")
    arguments = parser.parse_args()
    text = Path(f"examples/{arguments.example}/config.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    torch.manual_seed(0)
    rewards = asyncio.run(measure(arguments.folder, config))
    mean = statistics.fmean(rewards)
    margin = 1.96 * statistics.stdev(rewards) / math.sqrt(len(rewards))
    print(
        json.dumps(
            {"mean": mean, "interval": [mean - margin, mean + margin], "tasks": len(rewards)}
        )
    )


if __name__ == "__main__":
    main()
