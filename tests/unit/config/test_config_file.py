from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from agentrl_cli.config.config_file import dump_config, load_config, load_config_as
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.sft_config import SftConfig
from agentrl_cli.errors import ConfigError

#: Four lines: what a test adds begins on line 5.
BASE = """\
experiment_name: demo
model: {path: some/model}
agent_builder_path: builders.math_agent.build
train_dataset: {path: tasks.jsonl}
"""


@pytest.fixture
def load(tmp_path: Path):
    def do(extra: str = "", *overrides: str, base: str = BASE) -> ExperimentConfig:
        path = tmp_path / "c.yaml"
        path.write_text(base + extra)
        return load_config(path, overrides)

    return do


@pytest.fixture
def refusal(load, tmp_path: Path):
    def do(extra: str = "", *overrides: str, base: str = BASE) -> str:
        with pytest.raises(ConfigError) as caught:
            load(extra, *overrides, base=base)
        assert caught.value.exit_code == 2
        return str(caught.value).replace(f"{tmp_path}/", "")

    return do


def test_a_number_with_an_exponent_is_a_number(load) -> None:
    """YAML 1.1 reads 1e-6 as text, which nobody who types it means."""
    assert load("train: {learning_rate: 1e-6}\n").train.learning_rate == 1e-6
    assert load("", "train.learning_rate=2E5").train.learning_rate == 2e5


def test_the_resolved_config_loads_to_itself(load, tmp_path) -> None:
    config = load(
        "loggers: [{kind: wandb}]\nagent_builder_kwargs: {a: [1, {b: null}]}\n"
        "gconfig: &g {n_samples: 3}\neval_gconfig: {<<: *g, top_p: 0.9}\n",
        "train.learning_rate=3.3e-7",
    )
    assert config.eval_gconfig is not None
    assert config.eval_gconfig.n_samples == 3
    assert yaml.safe_load(dump_config(config))["train"]["learning_rate"] == 3.3e-7
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_an_evaluation_samples_as_gconfig_says_where_nothing_else_is_said(load) -> None:
    text = "gconfig: {n_samples: 8, max_tokens: 64, top_p: 0.9}\n"
    greedy = load(text, "eval_gconfig.temperature=0").resolve_eval_gconfig()
    assert (greedy.n_samples, greedy.max_tokens, greedy.temperature, greedy.top_p) == (
        1,
        64,
        0,
        0.9,
    )
    assert load(text).resolve_eval_gconfig().n_samples == 1
    assert load(text, "eval_gconfig.n_samples=4").resolve_eval_gconfig().n_samples == 4


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("gconfg: {}\n", "c.yaml:5: gconfg: unknown key; did you mean 'gconfig'?"),
        (
            "gconfig:\n  temperature: 1.0\n  n_sample: 2\n",
            "c.yaml:7: gconfig.n_sample: unknown key; did you mean 'n_samples'? allowed: max",
        ),
        (
            "loggers:\n  - {kind: wandb}\n  - {kind: wandb, projct: x}\n",
            "c.yaml:7: loggers[1].projct: unknown key; did you mean 'project'?",
        ),
        (
            "agents:\n  math:\n    agent_bilder_path: a.b\n",
            "c.yaml:7: agents.math.agent_bilder_path: unknown key; "
            "did you mean 'agent_builder_path'?",
        ),
    ],
)
def test_unknown_keys_name_their_line_and_the_nearest(refusal, extra: str, expected: str) -> None:
    assert expected in refusal(extra)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("seed: abc\n", 'c.yaml:5: seed: expected a whole number, found "abc"'),
        ("seed: true\n", "c.yaml:5: seed: expected a whole number, found true"),
        ("seed:\n", "c.yaml:5: seed: expected a whole number, found null"),
        ("seed: -1\n", "c.yaml:5: seed: input should be greater than or equal to 0, found -1"),
        ("gconfig: 3\n", "c.yaml:5: gconfig: expected a mapping (key: value lines), found 3"),
        ("gconfig: {n_samples: '2'}\n", 'gconfig.n_samples: expected a whole number, found "2"'),
        ("train: {gradient_checkpointing: 1}\n", "expected true or false, found 1"),
        ("trial_name: 3\n", "expected text, found 3; put it in quotes"),
        ("trial_name: 2026-01-01\n", 'expected text, found "2026-01-01"; put it in quotes'),
        ("trial_name: a/b\n", "c.yaml:5: trial_name: 'a/b' becomes a folder name: allowed are"),
        (
            "engine: {kind: vlm}\n",
            "engine.kind: 'vlm' is not one of the choices; did you mean 'vll",
        ),
        ("loggers: [tensorboard]\n", "loggers[0]: expected a mapping"),
        ("loggers: {kind: wandb}\n", "loggers: expected a list, found a mapping"),
        ("1: 2\n", "keys should be strings, found 1"),
    ],
)
def test_wrong_values_say_what_is_allowed_and_what_was_found(
    refusal, extra: str, expected: str
) -> None:
    assert expected in refusal(extra)


def test_missing_keys_are_named(refusal) -> None:
    text = refusal(base="experiment_name: x\nagent_builder_path: a.b\nmodel: {dtype: float32}\n")
    assert "train_dataset: this key is required" in text
    assert "c.yaml:3: model.path: this key is required" in text
    text = refusal(base=BASE.replace("agent_builder_path: builders.math_agent.build\n", ""))
    assert "set agent_builder_path" in text


def test_all_problems_are_listed_at_once(refusal) -> None:
    text = refusal("seed: x\ngconfg: {}\nengine: {kind: y}\n")
    assert "has 3 problems" in text
    assert all(f"c.yaml:{line}:" in text for line in (5, 6, 7))
    assert "Nothing was started" in text


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("seed: [1\n", "c.yaml:6: not valid YAML: expected ',' or ']'"),
        ("\tseed: 1\n", "c.yaml:5: not valid YAML: found character '\\t'"),
        ("seed: !!python/object:os.system x\n", "c.yaml:5: not valid YAML: could not determine"),
        ("? [a]\n: 2\n", "c.yaml:5: not valid YAML: found unhashable key"),
        ("---\nseed: 1\n", "c.yaml:5: not valid YAML: but found another document"),
        ("seed: 1\nseed: 2\n", "c.yaml:6: key 'seed' was given before, on line 5: keep one"),
        ("x: &a [1, *a]\n", "c.yaml:5: x[1]: this alias (*name) stands inside what it names"),
        ("gconfig:\n  top_p: 1.0\n  top_p: 0.9\n", "c.yaml:7: key 'top_p' was given before, on l"),
    ],
)
def test_text_that_is_not_yaml(refusal, extra: str, expected: str) -> None:
    assert expected in refusal(extra)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "this file holds null"),
        (b"hello\n", 'this file holds "hello"'),
        (b"\xff\xfe\x00", "cannot be read as text"),
        (b"a: \x00\n", "not valid YAML"),
    ],
)
def test_files_that_hold_no_mapping(tmp_path, content: bytes, expected: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_names_its_neighbours(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/quickstart.yaml").write_text(BASE)
    with pytest.raises(ConfigError, match=r"did you mean 'configs/quickstart.yaml'\?"):
        load_config("configs/quickstrat.yaml")
    with pytest.raises(ConfigError, match=r"configs: is a folder, not a file; .*quickstart"):
        load_config("configs")
    with pytest.raises(ConfigError, match=r"no such file; .*configs/quickstart.yaml"):
        load_config("no/such/folder/quickstart.yaml")


def test_overrides_change_keys_at_any_depth(load) -> None:
    config = load(
        "gconfig: {n_samples: 2}\n",
        "gconfig.n_samples=8",
        "train.algorithm.loss.clip_high=0.28",
        "valid_dataset={path: v.jsonl, limit: 3}",
        "valid_dataset.limit=5",
        "loggers=[{kind: wandb}]",
        "loggers.0.project=mine",
        "agents.1.agent_builder_path=a.b",
        "agent_builder_kwargs.deep.er=[1, two]",
        "agent_builder_kwargs.n=007",
        "tokenizer_path=12",
        " seed = 3",
        "seed=4",
    )
    assert config.gconfig.n_samples == 8
    assert config.train.algorithm.loss.clip_high == 0.28
    assert config.valid_dataset is not None
    assert config.valid_dataset.limit == 5
    assert config.loggers[0].project == "mine"
    assert config.agents["1"].agent_builder_path == "a.b"
    assert config.agent_builder_kwargs == {"deep": {"er": [1, "two"]}, "n": 7}
    assert config.tokenizer_path == "12"
    assert config.seed == 4


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trial_name=007", "007"),
        ("trial_name=yes", "yes"),
        ("trial_name=1e5", "1e5"),
        ("trial_name='3'", "3"),
    ],
)
def test_a_key_of_text_takes_what_was_typed(load, override: str, expected: str) -> None:
    assert load("", override).trial_name == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("gconfig.n_samples", "expected KEY=VALUE, for example gconfig.n_samples=8"),
        ("gconfig..n_samples=8", "expected KEY=VALUE"),
        ("gconfig.n_samples=[1", "the value is not valid YAML"),
        ("gconfig.n_samples=", 'expected a whole number, found ""'),
        ("gconfig.n_samples=eight", 'expected a whole number, found "eight"'),
        ("--seed=3", "did you mean 'seed'?"),
        ("seed.x=1", "seed: expected a whole number, found a mapping"),
        ("experiment_name.x=1", 'experiment_name is "demo", so it has no keys of its own'),
        ("loggers.1.kind=wandb", "no entry '1'; allowed: 0 to 0 (the last adds one)"),
        ("stops.2.kind=x", "stops is a list and has no entry '2'; allowed: 0 to 1"),
        ("stops.x=1", "stops is a list and has no entry 'x'"),
        ("train.algorithm.loss.kind.x=1", 'loss.kind is "sapo", so it has no keys of its own'),
        ("train.algorithm.loss.clip=1", "unknown key; allowed: kind, negative_temperature, pos"),
        ("valid_dataset.limit=3", "valid_dataset.path: this key is required"),
        ("experiment_name=a=b", "'a=b' becomes a folder name"),
    ],
)
def test_mistakes_in_overrides_are_named_as_they_were_typed(
    refusal, override: str, expected: str
) -> None:
    text = refusal("stops: [{}]\ntrain: {algorithm: {loss: {kind: sapo}}}\n", override)
    assert f"override {override!r}" in text
    assert expected in text


@pytest.mark.parametrize("before", ["", "loggers:\n", "loggers: []\n"])
def test_a_list_is_begun_and_added_to_by_its_positions(tmp_path, before: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "experiment_name: x\nmodel: {path: m}\nworkflow_path: w.w\ntrain_dataset: {path: d}\n"
        + before
    )
    typed = ["loggers.0.kind=wandb", "loggers.0.project=p", "loggers.1.kind=tensorboard"]
    loggers = load_config(path, [*typed, "engine.server_args.0=--swap-space"]).loggers
    assert [(one.kind, one.project) for one in loggers] == [("wandb", "p"), ("tensorboard", None)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gconfig: {max_new_tokens: 8}\n", "gconfig.max_new_tokens -> gconfig.max_tokens"),
        (
            "actor:\n  path: m\n  optimizer: {lr: 1}\n",
            "actor.path -> model.path; actor.optimizer.lr",
        ),
        ("actor_rollout_ref: {rollout: {n: 8}}\n", "rollout.n -> gconfig.n_samples"),
        ("train: {ppo_epochs: 2}\n", "train.ppo_epochs -> train.num_epochs"),
        ("train: {lr: 1}\n", "train.lr -> train.learning_rate or train.critic.learning_rate"),
        # That of many things there, and of none here.
        ("engine: {path: x}\n", "unknown key; did you mean 'python'?"),
    ],
)
def test_keys_of_other_trainers_are_known(refusal, text: str, expected: str) -> None:
    assert expected in refusal(text)


def test_another_class_of_config_gets_its_own_advice(tmp_path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text("output_path: x\nmodl: {}\n")
    with pytest.raises(ConfigError) as caught:
        load_config_as(SftConfig, path)
    assert "did you mean 'model'?" in str(caught.value)
    assert "agentrl train" not in str(caught.value)
