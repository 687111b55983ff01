from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from agentrl_cli.config.config_file import load_config
from agentrl_cli.config.config_schema import is_resume_safe
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunFolderError, StoreError
from agentrl_cli.secret_masking import find_secrets
from agentrl_cli.store.layout import run_dir_of
from agentrl_cli.store.run_folder import RunFolder


def check_remedy(message: str, config: ExperimentConfig, path: Path) -> None:
    """What the message says to type gives the old configuration back."""
    (typed,) = [line.split("back:")[1] for line in message.splitlines() if "back:" in line]
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    RunFolder.create_or_resume(load_config(path, shlex.split(typed))).close()


def test_another_config_is_refused_with_three_ways_out(make_config, tmp_path) -> None:
    for name in ("t0", "t1", "t2"):
        RunFolder.create_or_resume(make_config(trial_name=name)).close()
    path = Path(run_dir_of(make_config()), "config.yaml")
    before = path.read_text()
    other = make_config(seed=3, train__learning_rate=1e-5, tokenizer_path="a b")
    with pytest.raises(RunFolderError) as caught:
        RunFolder.create_or_resume(other)
    assert path.read_text() == before
    text = str(caught.value)
    assert "seed: 1 -> 3" in text
    assert "train.learning_rate: 1.0e-06 -> 1.0e-05" in text
    assert "tokenizer_path: null -> a b" in text
    assert "trial_name=t3" in text
    assert "--overwrite" in text
    assert "total_steps" not in text
    check_remedy(text, other, tmp_path / "c.yaml")


@pytest.mark.parametrize(("lora", "other"), [(None, {"rank": 8}), ({"rank": 8}, None)])
def test_a_section_that_is_null_on_one_side_is_one_difference(
    make_config, tmp_path, lora, other
) -> None:
    RunFolder.create_or_resume(make_config(model__lora=lora)).close()
    changed = make_config(model__lora=other)
    with pytest.raises(RunFolderError) as caught:
        RunFolder.create_or_resume(changed)
    differences = [line for line in str(caught.value).splitlines() if " -> " in line]
    assert [line.split(":")[0].strip() for line in differences[1:]] == ["model.lora"]
    check_remedy(str(caught.value), changed, tmp_path / "c.yaml")


def test_a_run_that_failed_at_its_start_loses_nothing(make_config) -> None:
    with RunFolder.create_or_resume(make_config()) as run:
        with pytest.raises(RunFolderError, match="nothing but logs"):
            RunFolder.check_resumable(make_config(seed=3))
        run.append_metrics({"step": 1})
        with pytest.raises(RunFolderError) as caught:
            RunFolder.check_resumable(make_config(seed=3))
    assert "nothing but logs" not in str(caught.value)


def test_what_may_change_is_taken_over(make_config) -> None:
    RunFolder.create_or_resume(make_config(train__total_steps=10)).close()
    changed = make_config(
        train__total_steps=20, engine__kind="embedded", rollout__max_concurrent=3, loggers=[]
    )
    with RunFolder.create_or_resume(changed) as run:
        saved = yaml.safe_load(run.config_path.read_text())
    assert saved["train"]["total_steps"] == 20
    assert ExperimentConfig.model_validate(saved) == changed


def test_what_may_change_is_said_by_the_field_or_its_section() -> None:
    for key in ("experiment_name", "train.total_steps", "train.alarms.truncated.action", "loggers"):
        assert is_resume_safe(ExperimentConfig, key.split(".")), key
    for key in ("seed", "train.learning_rate", "model.lora.rank", "agents.x.no_such", "no.such"):
        assert not is_resume_safe(ExperimentConfig, key.split(".")), key


def test_a_config_of_an_older_version_gets_the_new_defaults(make_config) -> None:
    RunFolder.create_or_resume(make_config()).close()
    path = Path(run_dir_of(make_config()), "config.yaml")
    data = yaml.safe_load(path.read_text())
    del data["train"]["max_grad_norm"]
    path.write_text(yaml.safe_dump(data))
    RunFolder.create_or_resume(make_config()).close()
    data["train"]["gone_key"] = 1
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(RunFolderError, match=r"train.gone_key: 1 -> \(not set\)"):
        RunFolder.create_or_resume(make_config())


@pytest.mark.parametrize("text", ["a: [", "\x00"])
def test_a_damaged_config_is_named(make_config, text: str) -> None:
    RunFolder.create_or_resume(make_config()).close()
    Path(run_dir_of(make_config()), "config.yaml").write_text(text)
    with pytest.raises(StoreError, match=r"config.yaml: is damaged.*trial_name=t1"):
        RunFolder.create_or_resume(make_config())
    RunFolder.create_or_resume(make_config(), overwrite=True).close()


def test_the_saved_configuration_comes_back_whole_with_its_secrets(make_config) -> None:
    config = make_config(
        agent_builder_kwargs={
            "api_key": "geheim",
            "tools": [{"url": "http://x", "password": "p"}, "sk-abcdefgh"],
            "depth": 3,
        }
    )
    secrets = find_secrets(config.model_dump(mode="json"))
    with RunFolder.create_or_resume(config) as folder:
        text = folder.config_path.read_text()
        assert not any(secret in text for secret in ("geheim", "sk-abcdefgh"))
        assert folder.load_config() != config
        assert folder.load_config(secrets) == config
