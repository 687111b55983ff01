from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from agentrl_cli.errors import RunFolderError, StoreError
from agentrl_cli.records import Trajectory
from agentrl_cli.store.layout import run_dir_of
from agentrl_cli.store.run_folder import RunFolder


def trajectory(step: int) -> Trajectory:
    return Trajectory(id=f"s{step}/0", group_id=f"s{step}", task_id="0", step=step)


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_layout_is_the_one_that_is_documented(folder: RunFolder, make_config) -> None:
    folder.write_trajectories(12, [trajectory(12)])
    folder.write_proximal_logprobs(12, {})
    folder.append_metrics({"step": 12, "reward_mean": 0.5})
    with folder.new_checkpoint(50) as path:
        (path / "weights").write_text("w")
    folder.log_path("trainer").write_text("line")
    folder.write_eval(20, [trajectory(20)], {"mean_reward": 0.5})
    assert folder.location == run_dir_of(make_config())
    assert folder.path.parts[-3:] == ("runs", "exp", "t0")
    found = {str(p.relative_to(folder.path)) for p in folder.path.rglob("*") if p.is_file()}
    assert found == {
        ".lock",
        "config.yaml",
        "manifest.json",
        "metrics.jsonl",
        "trajectories/step-000012.parquet",
        "proximal_logprobs/step-000012.parquet",
        "trajectories/eval-000020.parquet",
        "trajectories/eval-000020.json",
        "checkpoints/step-000050/checksums.json",
        "checkpoints/step-000050/weights",
        "logs/trainer.log",
    }


def test_manifest_tells_versions_seeds_and_every_start(make_config) -> None:
    for _ in range(2):
        RunFolder.create_or_resume(make_config(seed=7)).close()
    manifest = json.loads(Path(run_dir_of(make_config()), "manifest.json").read_text())
    assert manifest["seeds"] == {"experiment": 7}
    assert len(manifest["starts"]) == 2
    assert manifest["starts"][0]["versions"]["torch"]
    assert manifest["starts"][0]["python"].startswith("3.")


def test_secrets_are_not_written(make_config, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-environment-secret")
    kwargs = {
        "api_key": "plain-secret",
        "headers": {"Authorization": "Bearer t0ken-value"},
        "deep": [{"url": "sk-abcdefgh123"}],
        "eos_tokens": "kept",
    }
    config = make_config(agent_builder_kwargs=kwargs)
    with RunFolder.create_or_resume(config) as run:
        written = run.config_path.read_text() + (run.path / "manifest.json").read_text()
    for secret in ("plain-secret", "t0ken-value", "sk-abcdefgh123", "sk-environment-secret"):
        assert secret not in written
    assert "kept" in written
    # The same configuration resumes, and a rotated key is no other configuration.
    RunFolder.create_or_resume(config).close()
    RunFolder.create_or_resume(
        make_config(agent_builder_kwargs=kwargs | {"api_key": "rotated"})
    ).close()


def test_reading_a_step_touches_no_other_file(folder: RunFolder) -> None:
    for step in (1, 2, 3):
        folder.write_trajectories(step, [trajectory(step)])
    (folder.path / "trajectories" / "step-000002.parquet").write_bytes(b"broken")
    assert folder.trajectory_steps() == [1, 2, 3]
    with pytest.raises(RunFolderError, match=r"step 5 is not stored; stored: 1 to 3 \(3 steps\)"):
        folder.list_trajectories(5)
    assert folder.read_trajectories(3) == [trajectory(3)]
    assert [t.id for t in folder.list_trajectories(1)] == ["s1/0"]
    with pytest.raises(StoreError, match="step-000002"):
        folder.read_trajectories(2)


def test_no_two_evaluations_have_a_label(folder_anywhere: RunFolder) -> None:
    folder = folder_anywhere
    names = [folder.claim_eval(0, "model") for _ in range(2)]
    folder.write_eval(0, [], {}, label=names[0])
    assert [*names, folder.claim_eval(0, "model")] == ["model", "model-2", "model-3"]
    assert folder.claim_eval(5, "model") == "model"
    assert folder.list_evals() == [(0, "model")], "what is claimed is not stored yet"


def test_evals_and_labels_do_not_replace_each_other(folder_anywhere: RunFolder) -> None:
    folder = folder_anywhere
    folder.write_eval(20, [trajectory(20)], {"mean_reward": 0.5})
    folder.write_eval(20, [], {"mean_reward": 0.9}, label="manual")
    folder.write_eval(0, [], {"mean_reward": 0.1})
    assert folder.eval_steps() == [0, 20]
    assert folder.list_evals() == [(0, None), (20, None), (20, "manual")]
    assert folder.read_eval(20) == ([trajectory(20)], {"mean_reward": 0.5})
    assert folder.read_eval_report(20, label="manual") == {"mean_reward": 0.9}
    assert folder.trajectory_steps() == []
    # It counts only when its report is there.
    folder._place.delete(folder.path / "trajectories" / "eval-000020.json")
    assert folder.eval_steps() == [0]


def test_metrics_survive_a_torn_line(folder: RunFolder) -> None:
    folder.truncate_metrics(3)
    assert folder.read_metrics() == []
    for step in range(1, 6):
        folder.append_metrics({"step": step, "reward_mean": 0.1 * step, "kl": math.nan})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')
    assert [line["step"] for line in folder.read_metrics()] == [1, 2, 3, 4, 5]
    assert all(math.isnan(line["kl"]) for line in folder.read_metrics())
    folder.truncate_metrics(3)
    folder.append_metrics({"step": 4})
    rewards = [line.get("reward_mean") for line in folder.read_metrics()]
    assert rewards == [0.1 * 1, 0.1 * 2, 0.1 * 3, None]
    for text in (folder.path / "metrics.jsonl").read_text().splitlines():
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_checkpoints_appear_when_complete(folder_anywhere: RunFolder) -> None:
    folder = folder_anywhere
    assert folder.latest_checkpoint() is None
    with folder.new_checkpoint(5) as path:
        (path / "deep").mkdir()
        (path / "deep" / "weights").write_text("5")
        assert folder.latest_checkpoint() is None
    with pytest.raises(RuntimeError, match="mine"), folder.new_checkpoint(6) as path:  # noqa: PT012
        (path / "weights").write_text("6")
        raise RuntimeError("mine")
    step, path = folder.latest_checkpoint() or (None, Path())
    assert step == 5
    assert (folder.fetch(path) / "deep" / "weights").read_text() == "5"
    assert names(folder.path / "checkpoints") == ["step-000005"]


def test_a_path_of_a_folder_that_was_named_relatively_is_fetched_as_it_is(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with folder.new_checkpoint(5) as path:
        (path / "weights").write_text("5")
    monkeypatch.chdir(folder.path.parent)
    with RunFolder.open(folder.path.name) as opened:
        _, path = opened.latest_checkpoint() or (None, Path())
        assert not path.is_absolute()
        assert (opened.fetch(path) / "weights").read_text() == "5"
        assert opened.fetch("checkpoints/step-000005").samefile(path)


def test_stale_temporaries_go_at_the_next_start_only(folder: RunFolder, make_config) -> None:
    stale = [
        folder.path / ".config.yaml.tmp",
        folder.path / "trajectories" / ".step-000003.parquet.tmp",
        folder.path / "checkpoints" / ".step-000003.tmp",
        folder.path / "checkpoints" / ".step-000002.deleted",
    ]
    for path in stale:
        if path.suffix == ".deleted" or path.parent.name == "checkpoints":
            path.mkdir(parents=True)
        else:
            path.write_text("half")
    # An inspector must not remove what a live run is writing.
    reader = RunFolder.open(folder.path)
    assert all(p.exists() for p in stale)
    assert reader.trajectory_steps() == []
    assert reader.latest_checkpoint() is None
    folder.close()
    RunFolder.create_or_resume(make_config()).close()
    assert not any(p.exists() for p in stale)


def test_overwrite_deletes_the_run_and_nothing_else(folder: RunFolder, make_config) -> None:
    folder.write_trajectories(1, [])
    folder.write_proximal_logprobs(1, {})
    folder.append_metrics({"step": 1})
    with folder.new_checkpoint(1):
        pass
    for name in ("my-notes.txt", "logger_run_id.txt"):
        (folder.path / name).write_text("mine")
    folder.close()
    with RunFolder.create_or_resume(make_config(seed=9), overwrite=True) as again:
        assert again.trajectory_steps() == []
        assert not (again.path / "proximal_logprobs").exists()
        assert again.read_metrics() == []
        assert again.latest_checkpoint() is None
        assert yaml.safe_load(again.config_path.read_text())["seed"] == 9
        assert (again.path / "my-notes.txt").read_text() == "mine"
        # The next start is another run of Weights & Biases.
        assert not (again.path / "logger_run_id.txt").exists()
        # Killed before it had deleted everything, it is finished by the next start.
        again.write_trajectories(1, [])
        (again.path / ".overwriting").touch()
    with RunFolder.create_or_resume(make_config(seed=8)) as again:
        assert again.trajectory_steps() == []
        assert not (again.path / ".overwriting").exists()


def test_an_evaluation_needs_no_lock_and_binds_no_config(make_config) -> None:
    first = RunFolder.for_evaluation(make_config(gconfig__temperature=0.0))
    first.write_eval(0, [], {"mean_reward": 0.5}, label="manual")
    assert RunFolder.open(first.path).list_evals() == [(0, "manual")]
    with RunFolder.create_or_resume(make_config()) as run:
        RunFolder.for_evaluation(make_config()).write_eval(1, [], {}, label="manual")
        assert run.list_evals() == [(0, "manual"), (1, "manual")]


def test_open_names_the_nearest_runs(folder: RunFolder, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path / "runs" / "exp" / "t0" / "logs")
    with pytest.raises(RunFolderError, match="agentrl train writes"):
        RunFolder.open("nothing")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFolderError, match=r"no such folder.*Did you mean runs/exp/t0\?"):
        RunFolder.open("runs/exp/t00")
    with pytest.raises(RunFolderError, match=r"is not a run folder.*There are: runs/exp/t0"):
        RunFolder.open("runs")
    with pytest.raises(RunFolderError, match=r"no such folder.*runs/exp/t0"):
        RunFolder.open("elsewhere/t0")
    assert RunFolder.open("runs/exp/t0").path == Path("runs/exp/t0")
    # A path inside a run is the run.
    assert RunFolder.open(folder.path / "trajectories").path == folder.path
