from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl_cli.cli.compare_command import compare_command
from agentrl_cli.errors import UserInputError
from agentrl_cli.evaluate.eval_report import build_report
from agentrl_cli.inspector.report import report_page
from agentrl_cli.launch import compared_models
from agentrl_cli.launch.compared_models import (
    Checkpoint,
    Endpoint,
    StoredEvaluation,
    find_model,
    list_differences,
    load_shared_config,
)
from agentrl_cli.log import SilentObserver
from agentrl_cli.records import Boundary, Failure, FailureCause, Trajectory
from agentrl_cli.store.run_folder import RunFolder

NASTY = "\x1b]0;title\x07<b>|`[x](http://x)"


def attempt(task: int, reward: float | None, *, failed: bool = False) -> Trajectory:
    failure = Failure(
        boundary=Boundary.TOOL, kind="E", message=NASTY, cause=FailureCause.SURROUNDINGS
    )
    return Trajectory(
        id=f"{task}/0",
        group_id=str(task),
        task_id=str(task),
        task={"question": f"{task} {NASTY}"},
        reward=reward,
        failure=failure if failed else None,
    )


def write_eval(run: RunFolder, label: str | None, *rewards: float | None, step: int = 0) -> None:
    made = [attempt(n, reward, failed=reward is None) for n, reward in enumerate(rewards)]
    run.write_eval(step, made, build_report(made).to_dict(), label=label)


@pytest.fixture
def run(
    run_config: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunFolder:
    """A run with evaluations, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    with RunFolder.create_or_resume(run_config(output_dir="runs")) as folder:
        write_eval(folder, None, *[0.0] * 12)
        write_eval(folder, None, *[1.0] * 9, 0.0, 0.0, None, step=20)
        write_eval(folder, "strong", *[1.0] * 12)
    return folder


def test_stored_evaluations_are_compared_without_a_model(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["runs/exp/t0/eval-000000", "runs/exp/t0/trajectories/eval-000020.json"]
    compare_command([*names, "runs/exp/t0/strong"], markdown=tmp_path / "t.md")
    text = capsys.readouterr().out
    assert "B is better than A by 0.818 (" in text
    assert "11 tasks: 9 improved, 0 got worse" in text
    assert "C is better than A by 1.000" in text
    assert "--evals training --step 20 --task 0" in text
    assert "--evals strong --task 0" in text
    assert "newly passed: 6 more tasks (--html and --json have all)" in text
    assert "B: 1 of 12 trajectories without a reward" in text
    assert "1 task of A and B left out of the difference" in text
    table = text[text.index("mean reward") :].splitlines()[:4]
    assert max(map(len, table)) <= 80
    assert "\x1b" not in text
    page = (tmp_path / "t.md").read_text()
    heads = [line.count("|") for line in page.splitlines() if line.startswith("|")]
    assert len(set(heads)) == 1
    assert "**B is better than A by 0.818" in page

    compare_command(names, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert len(found["comparisons"][0]["newly_passed"]) == 9
    assert found["comparisons"][0]["newly_passed"][0]["show"][0].endswith("--step 0 --task 0")
    assert found["models"][1]["report"]["num_unscored"] == 1


def test_hostile_names_and_endpoints_neither_steer_a_terminal_nor_break_a_table(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path("runs/exp/t\x1b]0;|<img>")
    Path("runs/exp/t0").rename(folder)
    names = [f"{folder}/eval-000000", f"{folder}/strong"]
    compare_command(names, markdown=tmp_path / "t.md")
    text, page = capsys.readouterr().out, (tmp_path / "t.md").read_text()
    assert "\x1b" not in text + page
    assert "<img>" not in page
    assert "t\\\\x1b\\]0;\\|&lt;img&gt;" in page


def test_a_page_replaces_the_earlier_one_with_the_files_beside_it(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_page, "MAX_INLINE_BYTES", 0)
    names = ["runs/exp/t0/eval-000000", "runs/exp/t0/strong"]
    with pytest.raises(UserInputError, match=r"--html c\.md: does not end in \.html"):
        compare_command(names, page=Path("c.md"))
    compare_command(names, page=Path("c.html"))
    first = {path.name for path in Path("c_files").iterdir()}
    compare_command(names, page=Path("c.html"), as_json=True)
    printed = capsys.readouterr()
    assert "written: c.html" in printed.err
    assert "in c_files (2 files): keep that folder beside the page" in printed.err
    again = {path.name for path in Path("c_files").iterdir()}
    assert (len(first), len(again), first & again) == (2, 2, set())


def test_names_lead_to_models(run: RunFolder, tmp_path: Path) -> None:
    with run.new_checkpoint(10) as older, run.new_checkpoint(20) as newer:
        (older / "config.json").write_text("{}")
        (newer / "config.json").write_text("{}")
    write_eval(run, None, *[1.0] * 12, step=10)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def find(name: str, *, best: bool = False) -> object:
        return find_model(name, best=best)

    def find_folder(name: str, *, best: bool = False) -> str:
        found = find(name, best=best)
        assert isinstance(found, Checkpoint)
        return str(found.folder)

    assert find_folder("runs/exp/t0").endswith("step-000020")
    assert find_folder("runs/exp/t0", best=True).endswith("step-000010")
    assert find_folder("runs/exp/t0/checkpoints/step-000010").endswith("step-000010")
    assert find_folder("model") == "model"
    assert find("api:http://h:1/v1?a=b#x/y") == Endpoint(
        "api:http://h:1/v1?a=b#x/y", "http://h:1/v1?a=b", "x/y"
    )
    stored = find("runs/exp/t0/strong")
    assert isinstance(stored, StoredEvaluation)
    assert (stored.step, stored.label) == (0, "strong")
    assert isinstance(find("runs/exp/t0/eval-000020"), StoredEvaluation)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["base"], "Allowed: 2 to 26"),
        (["base", "base"], "named twice"),
        (["base", "api:localhost#m"], "Type api:URL#MODEL"),
        (["base", "runs/exp/t0"], "no checkpoint yet"),
        (["base", "runs/exp/t0"], "runs/exp/t0/strong, runs/exp/t0/eval-000020"),
        (["base", "runs/exp/t1"], "Did you mean runs/exp/t0?"),
        (["base", "runs/exp/t0/stronk"], "did you mean 'strong'?"),
        (["base", "api:http://h/v1#m"], "Add --config FILE"),
    ],
)
def test_what_cannot_be_compared_is_refused(run: RunFolder, names: list[str], message: str) -> None:
    with pytest.raises(UserInputError) as caught:
        compare_command(names)
    assert message in str(caught.value)


def test_runs_with_another_reward_or_dataset_are_told(
    run: RunFolder, run_config: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(
        output_dir="runs",
        trial_name="t1",
        reward_fn_path="r.other",
        agent_builder_kwargs={"api_key": "sk-very-secret-key"},
        train={"total_steps": 7},
    )
    with RunFolder.create_or_resume(config) as other:
        write_eval(other, "strong", *[1.0] * 12)
    compare_command(["runs/exp/t0/eval-000000", "runs/exp/t1/strong"])
    text = capsys.readouterr().out
    assert 'another reward_fn_path than runs/exp/t0: "r.other", not null' in text.replace("\n", " ")
    assert "sk-very-secret-key" not in text
    assert "total_steps" not in text
    model = find_model("runs/exp/t1/strong", best=False)
    # Secrets are not saved, and are no difference.
    assert list_differences(config, [model], "c.yaml") == []
    with pytest.raises(UserInputError, match="holds no secrets"):
        load_shared_config(None, [], [model])


@pytest.mark.parametrize(
    ("current", "typed"),
    [(".", "elsewhere/moved"), ("elsewhere", "moved"), ("elsewhere/moved", "../moved"), ("/", "")],
)
def test_a_saved_configuration_keeps_its_results_where_the_run_is_now(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, current: str, typed: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    Path("runs/exp/t0").rename("elsewhere/moved")
    monkeypatch.chdir(tmp_path / current)
    model = find_model(f"{typed or tmp_path / 'elsewhere' / 'moved'}/strong", best=False)
    config = load_shared_config(None, ["rollout.max_turns=3"], [model])
    assert config.rollout.max_turns == 3
    with RunFolder.for_evaluation(config) as again:
        assert again.path.resolve() == (tmp_path / "elsewhere" / "moved").resolve()


def test_an_evaluation_is_made_again_only_if_something_it_comes_from_has_changed(
    run_config: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    agent, rows = tmp_path / "own_agent.py", tmp_path / "rows.jsonl"
    agent.write_text("def build(): ...\n")
    rows.write_text('{"question": "1"}\n{"question": "2"}\n')
    made: list[str] = []

    def evaluate(config, model, label, limit, observer) -> str:
        with RunFolder.for_evaluation(config) as folder:
            label = folder.claim_eval(0, label)
            write_eval(folder, label, 1.0)
        made.append(label)
        return label

    monkeypatch.setattr(compared_models, "_evaluate", evaluate)

    def compare(*, limit: int | None = None, again: bool = False, **sections: object) -> list[str]:
        made.clear()
        config = run_config(
            agent_builder_path="own_agent.py:build",
            train_dataset={"path": "rows.jsonl"},
            **sections,
        )
        names = ["base", "api:http://127.0.0.1:1/v1#m"]
        models = [find_model(name, best=False) for name in names]
        options = {"limit": limit, "again": again, "observer": SilentObserver()}
        found = list(compared_models.evaluate_models(config, models, **options))
        assert len(found) == 2
        return list(made)

    first = compare()
    assert len(first) == 2
    # How fast it runs, and how the model is trained, change nothing.
    assert compare(rollout={"max_concurrent": 3}, train={"learning_rate": 1e-2}) == []
    assert compare(again=True) == [f"{name}-2" for name in first]
    assert compare() == []
    # An endpoint has no part in agentrl's own model.
    assert [name.partition("-")[0] for name in compare(model={"path": "other"})] == ["base"]
    assert len(compare(gconfig={"max_tokens": 7})) == 2
    assert len(compare(limit=1)) == 2
    rows.write_text('{"question": "1"}\n{"question": "3"}\n')
    assert len(compare()) == 2


def test_curves_of_runs_stand_below_each_other_on_one_scale(
    run: RunFolder, run_config: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["runs/exp/t0", "runs/exp/t1"]
    with pytest.raises(UserInputError, match="no curve"):
        compare_command(["runs/exp/t0", "runs/exp/t0/"], curves=True)
    for trial, rewards in (("t0", [0.0, 2.0, 4.0, 4.0]), ("t1", [1.0, 2.0])):
        config = run_config(output_dir="runs", trial_name=trial)
        with RunFolder.create_or_resume(config) as folder:
            for step, reward in enumerate(rewards, 1):
                folder.append_metrics({"step": step, "reward_mean": reward})
    compare_command(names, curves=True)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-2:]]
    assert rows == [
        ["A", "4", "0.000", "▁▅██", "4.000", "4.000"],
        ["B", "2", "1.000", "▃▅", "2.000", "2.000"],
    ]
    compare_command(names, curves=True, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["curves"][1] == {"run": "runs/exp/t1", "reward_mean": [1.0, 2.0]}
