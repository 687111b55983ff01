from __future__ import annotations

import logging
import os

import pytest
import yaml

from agentrl_cli.config.config_file import dump_config, load_config
from agentrl_cli.log import file_log, sanitize
from agentrl_cli.secret_masking import find_secrets, is_secret_name, mask_secrets, mask_text
from agentrl_cli.store.run_folder import RunFolder


def test_names_of_secrets() -> None:
    secret = (
        "api_key", "apiKey", "OPENAI_API_KEY", "x-api-key", "--hf-token", "dbPassword", "pwd_prod",
        "client_secret", "token", "github_token", "aws_secret_access_key", "Authorization",
        "credentials", "api_tokens", "private_key",
    )  # fmt: skip
    assert [name for name in secret if not is_secret_name(name)] == []
    harmless = (
        "max_tokens", "max_tokens_per_trajectory", "tokenizer_path", "answer_key", "key_field",
        "token_path", "password_file", "author", "keyboard", "num_tokens",
    )  # fmt: skip
    assert [name for name in harmless if is_secret_name(name)] == []


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgres://ann:hunter2@db/x", "postgres://***@db/x"),
        ("GET http://h/x?a=1&key=AbC123&b=2", "GET http://h/x?a=1&key=***&b=2"),
        ("http://h/x?access_token=q1w2e3r4", "http://h/x?access_token=***"),
        ("--api-key q1w2e3r4 --port 80", "--api-key *** --port 80"),
        ('{"db_password": "hunter22", "n": 1}', '{"db_password": "***", "n": 1}'),
        ("{'apiKey': 'q1w2e3r4'}", "{'apiKey': '***'}"),
        ("authorization: Basic dXNlcjpw", "authorization: Basic ***"),
        ("x-api-key: q1w2e3r4", "x-api-key: ***"),
        ("key sk-abcdef123 refused", "key *** refused"),
        ("max_tokens=1024 tokens: 100000", "max_tokens=1024 tokens: 100000"),
        ("see http://host:8000/v1 or me@example.org", "see http://host:8000/v1 or me@example.org"),
        ("Bearer abc.def", "Bearer ***"),
        ("export API_KEY=$(openssl rand -hex 24)", "export API_KEY=$(openssl rand -hex 24)"),
        ("API_KEY=$(q1w2e3r4", "API_KEY=***"),
    ],
)
def test_secrets_in_texts(text, masked) -> None:
    assert mask_text(text) == masked


def test_secrets_in_configurations() -> None:
    value = {
        "password": 123456,
        "credentials": {"user": "ann", "pw": ["a"]},
        "max_token": 5,
        "args": ["--api-key", "q1w2", "--port", "80", "--hf-token=q1w2e3"],
        "url": "redis://:p4ss@h:1/0",
        "token": None,
    }
    masked = {
        "password": "***",
        "credentials": {"user": "***", "pw": ["***"]},
        "max_token": 5,
        "args": ["--api-key", "***", "--port", "80", "--hf-token=***"],
        "url": "redis://***@h:1/0",
        "token": None,
    }
    assert mask_secrets(value) == masked
    assert ["credentials", "pw", 0, "a"] in find_secrets(value)


def test_a_secret_of_the_configuration_is_in_no_file_and_nobody_elses_to_read(
    tmp_path,
) -> None:
    """Its bare value is masked too, wherever a library quotes it."""
    secret = "Tr0ub4dor-and-3"
    path = tmp_path / "c.yaml"
    path.write_text(
        f"{{experiment_name: x, output_dir: {tmp_path}/runs, model: {{path: m}}, "
        "agent_builder_path: a.b, train_dataset: {path: t.jsonl}}"
    )
    config = load_config(path, [f"agent_builder_kwargs.search.dbPassword={secret}"])
    assert secret not in dump_config(config)
    assert secret not in sanitize(f"cannot log in with {secret}")
    previous = os.umask(0o022)
    try:
        with RunFolder.create_or_resume(config) as run:
            run.append_metrics({"step": 1})
            with file_log(run.log_path("trainer")):
                logging.getLogger("agentrl_cli.x").warning("tried %s\x1b]0;title\x07", secret)
            files = [path for path in run.path.rglob("*") if path.is_file()]
    finally:
        os.umask(previous)
    assert {"config.yaml", "manifest.json", "metrics.jsonl", "trainer.log"} <= {
        path.name for path in files
    }
    for path in files:
        assert secret not in path.read_text()
        assert "\x1b" not in path.read_text()
        assert path.stat().st_mode & 0o077 == 0, path
    saved = yaml.safe_load((run.path / "config.yaml").read_text())
    assert saved["agent_builder_kwargs"]["search"]["dbPassword"] == "***"


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["x" * 10**6, "a-" * 10**6, "--a" * 10**6, "eyJaaaaaaaa-" * 10**5])
def test_a_long_word_takes_no_longer_than_its_length(text: str) -> None:
    assert mask_text(text) == text
