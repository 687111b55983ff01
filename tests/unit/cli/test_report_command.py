"""What agentrl report refuses, and where it writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl_cli.cli.stored_runs.report_command import report_command
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunFolderError, UserInputError
from agentrl_cli.records import Trajectory
from agentrl_cli.store.run_folder import RunFolder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 9999}, "--port is of --serve. Add --serve"),
        ({"serve": True, "to": Path("a.html")}, "--serve writes no file. Leave out --html"),
        ({"to": Path("a.txt")}, "--html a.txt: does not end in .html. Type --html a.txt.html"),
        ({"to": Path()}, "--html .: is a folder. Type --html report.html"),
        ({"tokenizer": "nowhere"}, "--tokenizer nowhere: no such folder"),
    ],
)
def test_what_is_typed_wrong_is_said(
    run_config: Callable[..., ExperimentConfig], options: dict[str, object], message: str
) -> None:
    with RunFolder.create_or_resume(run_config()) as folder:
        pass
    with pytest.raises(UserInputError, match=re.escape(message)):
        report_command(str(folder.path), **options)  # type: ignore[arg-type]
    assert not (folder.path / "report.html").exists()


def test_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not a run folder"):
        report_command(str(tmp_path))


def test_a_run_that_has_nothing_yet_has_a_page(
    run_config: Callable[..., ExperimentConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    with RunFolder.create_or_resume(run_config()) as folder:
        report_command(str(folder.path))
        assert "report.html: 0 trajectories" in capsys.readouterr().out
        folder.write_trajectories(1, [Trajectory(id="g/0", group_id="g", task_id="1", step=1)])
        # A path inside of the run is of the run.
        folder.flush()
        report_command(str(folder.path / "trajectories"))
    assert f"{folder.path}/report.html: 1 trajectory, " in capsys.readouterr().out


def test_the_page_of_a_run_on_object_storage_is_in_the_current_folder(
    run_config: Callable[..., ExperimentConfig],
    s3_bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with RunFolder.create_or_resume(run_config(output_dir=s3_bucket)) as folder:
        folder.write_trajectories(1, [Trajectory(id="g/0", group_id="g", task_id="1", step=1)])
        folder.flush()
        report_command(folder.location)
    assert "report.html: 1 trajectory, " in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    # What a user calls the run, and not where its copy is.
    assert f'"run":"{folder.location}"' in page
