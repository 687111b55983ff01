"""From configuration to workflow: what is refused before anything is started."""

from __future__ import annotations

import pytest

from agentrl_cli.config.config_file import load_config
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import (
    BuilderError,
    ConfigError,
    ImportPathError,
    RewardSignatureError,
    UserInputError,
)
from agentrl_cli.rollout.agent_workflow import AgentRolloutWorkflow
from agentrl_cli.rollout.dataset import build_eval_tasks, load_rows
from agentrl_cli.rollout.scheduler import run_tasks
from agentrl_cli.rollout.workflow import Attempt, RolloutWorkflow
from agentrl_cli.rollout.workflow_building import build_workflow
from agentrl_cli.tracking.gateway import get_gateway

CODE = """
from agentrl_cli import RolloutWorkflow

async def solve(data, client, model):
    reply = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": data["question"]}])
    return reply.choices[0].message.content

def build(): return solve
def build_for_model(model): return solve
def build_with(style): return solve
def build_broken(): raise RuntimeError("no weather today")
def build_nothing(): pass

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


@pytest.mark.parametrize("builder", ["build", "build_for_model"])
async def test_runs_an_agent_and_a_reward_of_a_file(
    configure, chat_tokenizer, scripted_engine, open_client, builder
):
    workflow = build_workflow(configure(builder, "reward"), chat_tokenizer, open_client=open_client)
    rows = [{"question": "2 + 2", "answer": "4"}, {"question": "2 + 3", "answer": "5"}]
    workflow.check_rows(rows, "train_dataset")
    trajectories = await run_tasks(
        workflow, scripted_engine(lambda _: "4"), build_eval_tasks(rows),
        n_samples=2, max_concurrent=3,
    )  # fmt: skip
    assert [t.reward for t in trajectories] == [1.0, 1.0, 0.0, 0.0]
    assert all(t.reward_seconds > 0 for t in trajectories)
    workflow.close()


async def test_without_a_client_factory_the_engine_gets_a_gateway_that_lasts(
    configure, chat_tokenizer, scripted_engine
):
    workflow = build_workflow(configure("build"), chat_tokenizer)
    engine = scripted_engine(lambda _: "4")
    await workflow.arun_trajectory(engine, _attempt())
    gateway = get_gateway(engine, chat_tokenizer, tool_call_parser="hermes")
    await workflow.arun_trajectory(engine, _attempt())
    assert get_gateway(engine, chat_tokenizer, tool_call_parser="hermes") is gateway
    await gateway.close()


def _attempt():
    return Attempt(task=build_eval_tasks([{"question": "2 + 2"}])[0])


@pytest.mark.parametrize(
    ("names", "options", "error", "message"),
    [
        (
            ("build_broken",),
            {},
            BuilderError,
            r"builder raised RuntimeError: no weather(.|\n)*mine",
        ),
        (("build_nothing",), {}, BuilderError, "is there a return"),
        (("build_with",), {}, BuilderError, "missing a required argument: 'style'"),
        (
            ("build",),
            {"agent_builder_kwargs": {"tsyle": 1}},
            BuilderError,
            "unexpected keyword argument 'tsyle'",
        ),
        (("biuld",), {}, ImportPathError, "did you mean 'build'"),
        (("solve",), {}, BuilderError, "wrap it: def build"),
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


def test_an_agent_that_answers_in_text_needs_a_reward_function(configure):
    config = configure("build").model_copy(
        update={"agent_builder_path": "builders.math_agent.build_math_agent"}
    )
    with pytest.raises(ConfigError, match=r"reward_fn_path is not set.*OpenAI Agents SDK"):
        build_workflow(config, None)


@pytest.mark.parametrize("builder", ["build_math_agent", "build_math_team"])
def test_the_gsm8k_config_loads_and_builds_here_with_a_local_file(tmp_path, builder):
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "2 + 2?", "answer": "2 + 2 = 4\\n#### 4"}\n')
    config = load_config(
        "configs/gsm8k-math.yaml",
        [
            "model.path=builtin:calculator",
            "engine.kind=embedded",
            f"train_dataset.path={path}",
            f"agent_builder_path=builders.math_agent.{builder}",
        ],
    )
    config.check_trainable()
    rows = load_rows(config.train_dataset, "train_dataset")
    workflow = build_workflow(config, None)
    assert isinstance(workflow, AgentRolloutWorkflow)
    workflow.check_rows(rows, "train_dataset")
    with pytest.raises(UserInputError, match=r"row 1 .*nothing to ask"):
        workflow.check_rows([{"problem": "2 + 2", "answer": "4"}], "train_dataset")
