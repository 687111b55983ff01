"""An agent with tools on a model whose template shows none: refused, and trained with another."""

from __future__ import annotations

import copy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agentrl_cli.models.chat_templates import DEFAULT_TEMPLATE, read_chat_template
from agentrl_cli.store.run_folder import RunFolder

AGENT = """
from openai import BadRequestError

TOOL = {"type": "function", "function": {"name": "look_up", "description": "Finds facts."}}


async def answer(data, client):
    messages = [{"role": "user", "content": data["question"]}]
    try:
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    except BadRequestError:
        return 0.0
    return float("a" in (reply.choices[0].message.content or ""))


def build():
    return answer
"""
TRAIN = (
    "train", "--config", "experiment.yaml", "agent_builder_path=tool_agent.build",
    "reward_fn_path=null", "engine.max_model_len=768", "train.alarms.truncated.action=off",
)  # fmt: skip


@pytest.fixture
def toolless(project: Path, model_folder: Path, chat_tokenizer: Any) -> str:
    """The folder of a model whose chat template shows turns and nothing else."""
    (project / "tool_agent.py").write_text(AGENT)
    folder = shutil.copytree(model_folder, project / "toolless")
    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return f"model.path={folder}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_template_without_tools_is_refused_and_the_default_one_trains(
    agentrl: Callable[..., subprocess.Popen[str]],
    finish: Callable[..., str],
    project: Path,
    toolless: str,
) -> None:
    # Though the agent makes do with the refusal.
    output = " ".join(finish(agentrl(*TRAIN, toolless), code=2).split())
    assert "the tools" in output
    assert f"Type model.chat_template={DEFAULT_TEMPLATE}" in output
    assert "Traceback" not in output

    template = f"model.chat_template={DEFAULT_TEMPLATE}"
    train_one = (*TRAIN, toolless, template, "train.total_steps=1")
    finish(agentrl(*train_one, "--overwrite"))
    run = RunFolder.open(project / "runs" / "small" / "t0")
    ((_, checkpoint),) = run.list_checkpoints()
    trained = AutoTokenizer.from_pretrained(checkpoint)
    assert trained.chat_template == read_chat_template(DEFAULT_TEMPLATE)
    for trajectory in run.read_trajectories(1):
        assert trajectory.failure is None
        assert '"name": "look_up"' in trained.decode(trajectory.interactions[0].prompt_ids)
    # It resumes with no other.
    resumed = finish(agentrl(*TRAIN, toolless, "train.total_steps=2"), code=2)
    assert f"model.chat_template: {DEFAULT_TEMPLATE} -> null" in resumed
