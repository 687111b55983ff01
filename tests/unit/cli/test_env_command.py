"""What a bug report needs is printed whatever fails, and no secret is."""

from __future__ import annotations

import json
import shutil
import time
from importlib import metadata
from pathlib import Path

import pytest

from agentrl_cli.cli import env_command as env
from agentrl_cli.cli.env_command import env_command


def test_versions_machine_and_limits_as_text_and_as_json(capsys: pytest.CaptureFixture[str]):
    env_command()
    text = capsys.readouterr().out
    assert f"\n  torch: {metadata.version('torch')}\n" in text
    assert "\n  sglang: not installed\n" in text
    assert "not known" not in text
    env_command(as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert [f"\n{section}:\n" in f"\n{text}" for section in report] == [True] * 8
    assert "GB free of" in report["disks"]["shared memory"]
    assert "usable of" in report["machine"]["cores"]


def test_no_secret_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    secrets = {
        "OPENAI_API_KEY": "sk-secret-12345",
        "HF_TOKEN": "short",
        "AWS_SECRET_ACCESS_KEY": "geheim/geheim+geheim",
        "https_proxy": "http://me:geheim77@proxy:3128",
        "VLLM_EXTRA": "--api-key geheimnis99",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "\x1b[2J0")
    for as_json in (False, True):
        env_command(as_json=as_json)
        printed = capsys.readouterr().out
        assert all(name in printed for name in secrets)
        assert "@proxy:3128" in printed
        assert "\x1b" not in printed
        assert not any(s in printed for s in ("secret-12345", "short", "geheim"))


def test_what_fails_or_hangs_is_told_in_its_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    broken = tmp_path / "nvidia-smi"
    broken.write_text("#!/bin/sh\necho 'Failed to initialize NVML' >&2\nexit 9\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(env, "_SECONDS", 2.0)
    monkeypatch.setattr(env, "_find_processor", lambda: 1 / 0)
    monkeypatch.setattr(env, "_measure_memory", lambda: time.sleep(30))

    def refuse(place: Path) -> None:
        raise PermissionError(13, "Permission denied", str(place))

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    env_command(as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["processor"] == "not known (ZeroDivisionError: division by zero)"
    assert report["machine"]["memory"] == "not known (no answer in 2 s)"
    assert report["machine"]["cores"]
    assert report["gpus"]["nvidia-smi"] == "Failed to initialize NVML"
    assert "Permission denied" in report["disks"]["current folder"]
