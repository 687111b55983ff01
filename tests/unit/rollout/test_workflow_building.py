"""From configuration to workflow: what is refused before anything is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import (
    BuilderError,
    ConfigError,
    DatasetError,
    ImportPathError,
    RewardSignatureError,
    UserInputError,
)
from agentrl_cli.rollout.dataset import build_eval_tasks
from agentrl_cli.rollout.scheduler import run_tasks
from agentrl_cli.rollout.workflow import RolloutWorkflow
from agentrl_cli.rollout.workflow_building import build_workflow
from agentrl_cli.tracking.gateway import get_gateway

CODE = """
from agentrl_cli import RolloutWorkflow

async def solve(data, client, model):
    reply = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": data["question"]}])
    return reply.choices[0].message.content

def build(): return solve
def build_broken(): raise RuntimeError("no weather today")

def reward(completions, answer): return completions == answer
def reward_wrong(completions, /): return 1

class Mine(RolloutWorkflow):
    def __init__(self, tokenizer, size=1):
        self.tokenizer, self.size = tokenizer, size
    async def arun_episode(self, engine, data):
        return {}

class NotMine: pass
"""


@pytest.fixture
def configure(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(CODE)

    def build(builder=None, reward=None, workflow=None, **options):
        def find(name):
            return None if name is None else f"{path}:{name}"

        return ExperimentConfig(
            experiment_name="x",
            model={"path": "builtin:calculator"},
            train_dataset={"path": "x.jsonl"},
            agent_builder_path=find(builder),
            reward_fn_path=find(reward),
            workflow_path=find(workflow),
            **options,
        )

    return build


async def test_runs_an_agent_and_a_reward_of_a_file(configure, chat_tokenizer, scripted_engine):
    workflow = build_workflow(configure("build", "reward"), chat_tokenizer)
    rows = [{"question": "2 + 2", "answer": "4"}, {"question": "2 + 3", "answer": "5"}]
    workflow.check_rows(rows, "train_dataset")
    with pytest.raises(RewardSignatureError, match="answer"):
        workflow.check_rows([{"question": "2 + 2"}], "train_dataset")
    engine = scripted_engine(lambda _: "4")
    options = {"n_samples": 2, "max_concurrent": 3}
    trajectories = await run_tasks(workflow, engine, build_eval_tasks(rows), **options)
    assert [t.reward for t in trajectories] == [1.0, 1.0, 0.0, 0.0]
    assert all(t.reward_seconds > 0 for t in trajectories)
    # Without a client factory the engine gets a gateway, which lasts.
    gateway = get_gateway(engine, chat_tokenizer, tool_call_parser="hermes")
    await run_tasks(workflow, engine, build_eval_tasks(rows), **options)
    assert get_gateway(engine, chat_tokenizer, tool_call_parser="hermes") is gateway
    await gateway.close()
    workflow.close()


@pytest.mark.parametrize(
    ("names", "options", "error", "message"),
    [
        (
            ("build_broken",),
            {},
            BuilderError,
            r"builder raised RuntimeError: no weather(.|\n)*mine",
        ),
        (
            ("build",),
            {"agent_builder_kwargs": {"tsyle": 1}},
            BuilderError,
            "unexpected keyword argument 'tsyle'",
        ),
        (("biuld",), {}, ImportPathError, "did you mean 'build'"),
        (("build", "reward_wrong"), {}, RewardSignatureError, "positional-only"),
        ((None, None, "NotMine"), {}, ImportPathError, "derived from"),
        ((None, None, "Mine"), {"workflow_kwargs": {"sise": 2}}, ImportPathError, "sise"),
    ],
)
def test_mistakes_are_refused_at_once(configure, names, options, error, message):
    with pytest.raises(error, match=message) as caught:
        build_workflow(configure(*names, **options), None)
    assert isinstance(caught.value, UserInputError)
    assert caught.value.exit_code == 2


def test_own_workflows_get_what_they_name(configure):
    config = configure(
        workflow="Mine", workflow_kwargs={"size": 3}, rollout={"timeout_seconds": 7.0}
    )
    workflow = build_workflow(config, "the tokenizer")
    assert isinstance(workflow, RolloutWorkflow)
    assert (workflow.tokenizer, workflow.size, workflow.timeout_seconds) == ("the tokenizer", 3, 7)


async def test_the_documented_workflow_runs(tmp_path, chat_tokenizer, scripted_engine):
    page = (Path(__file__).parents[3] / "docs" / "workflows.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_workflows.py").write_text(code)
    config = ExperimentConfig(
        experiment_name="x",
        model={"path": "builtin:calculator"},
        train_dataset={"path": "x.jsonl"},
        workflow_path=f"{tmp_path}/my_workflows.py:PlanAndWrite",
        workflow_kwargs={"style": "detailed"},
        reward_fn_path="rewards.gsm8k.gsm8k_reward_fn",
        rollout={"turn_discount": 0.5},
    )
    workflow = build_workflow(config, chat_tokenizer)
    rows = [{"question": "What is 2 + 2?", "answer": "#### 4"}]
    workflow.check_rows(rows, "train_dataset")
    engine = scripted_engine(["Add them.", "#### 4"])
    [trajectory] = await run_tasks(
        workflow, engine, build_eval_tasks(rows), n_samples=1, max_concurrent=1
    )
    workflow.close()
    assert trajectory.failure is None, trajectory.failure
    assert [i.turn_return for i in trajectory.interactions] == [0.5, 1.0]
    assert "detailed plan" in trajectory.interactions[0].messages[0]["content"]


def test_a_shipped_agent_is_checked_against_reward_and_rows(configure):
    update = {"agent_builder_path": "builders.math_agent.build_math_agent"}
    with pytest.raises(ConfigError, match=r"reward_fn_path is not set.*OpenAI Agents SDK"):
        build_workflow(configure("build").model_copy(update=update), None)
    workflow = build_workflow(configure("build", "reward").model_copy(update=update), None)
    workflow.check_rows([{"question": "2 + 2", "answer": "4"}], "train_dataset")
    with pytest.raises(DatasetError, match=r"row 1 .*nothing to ask"):
        workflow.check_rows([{"problem": "2 + 2", "answer": "4"}], "train_dataset")
