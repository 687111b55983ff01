"""The page of a run as a file: what is in it, where, and that no text of a model becomes markup."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_cli.inspector.report import report_page
from agentrl_cli.inspector.report.report_page import write_report
from agentrl_cli.store.run_folder import RunFolder
from tests.unit.inspector.report.conftest import HOSTILE


def unzip(text: str) -> bytes:
    return gzip.decompress(base64.b64decode(text))


class Page:
    """A page's parts."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        self.head = json.loads(self.find('id="head"'))

    def find(self, attribute: str) -> str:
        found = re.search(rf"<script [^>]*{attribute}>(.*?)</script>", self.text, re.DOTALL)
        assert found, attribute
        return found[1]

    def block(self, name: str) -> bytes:
        return unzip(self.find(f'id="block:{name}"'))

    def columns(self, name: str) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, list[str]]]:
        block = self.block(name)
        length = int.from_bytes(block[:4], "little")
        header = json.loads(block[4 : 4 + length])
        columns = {
            column: np.frombuffer(block, dtype, count, 4 + length + start)
            for column, (dtype, start, count) in header["columns"].items()
        }
        return columns, header["texts"]


def read_texts(page: Page, block: str, name: str) -> Sequence[str | None]:
    columns, texts = page.columns(block)
    return [None if code < 0 else texts[name][code] for code in columns[name]]


def test_a_small_run_is_inside_the_page(folder: RunFolder, tmp_path: Path) -> None:
    path = tmp_path / "out" / "page.html"
    written = write_report(folder, path)
    page = Page(path)
    assert written.num_trajectories == 8
    assert written.folder is None
    assert [*path.parent.iterdir()] == [path]
    assert path.stat().st_mode & 0o077 == 0
    keys = [source["key"] for source in page.head["sources"]]
    assert keys == ["step-000001", "step-000002", "eval-000000", "eval-000002-manual"]
    assert [source["start"] for source in page.head["sources"]] == [0, 2, 6, 7]
    assert page.head["details"]["where"] == "page"

    columns, _ = page.columns("summary")
    rewards = columns["reward"].tolist()
    assert rewards[:3] == [1.0, 0.0, 0.5]
    assert np.isnan(rewards[3:5]).all()
    assert columns["tokens"].tolist()[:2] == [4, 2]
    assert columns["logprob_min"][0] == -0.5
    assert read_texts(page, "summary", "boundary")[2:6] == [None, "timeout", "tool", None]
    assert read_texts(page, "summary", "mismatch")[0] == "retokenized"
    # Ids that their group and place say are not written again.
    assert set(read_texts(page, "summary", "id")) == {None}
    assert read_texts(page, "texts", "question")[0] == "What is 17 x 23?"

    block = json.loads(page.block("step-000001.0"))
    first = block["rows"][0]
    assert first["id"] == "000001.000/0"
    assert "tokens" not in block
    calls = first["interactions"]
    lengths, logprobs = calls["rollout_logprobs"]
    assert lengths == [2, 1, 1, 0]
    assert np.frombuffer(base64.b64decode(logprobs), "<i2").tolist() == [-500, -250, -125, -125]
    assert json.loads(first["messages_json"][calls["reply"][1]])["content"] == "391"


def test_tokens_are_spelled_where_there_is_a_tokenizer(folder: RunFolder, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_report(folder, path, lambda token_id: f"<{token_id}>")
    block = json.loads(Page(path).block("step-000001.0"))
    assert block["tokens"]["7"] == "<7>"
    assert block["tokens"].keys() == {"1", "2", "3", "4", "5", "6", "7"}


def test_a_large_run_has_its_details_beside_the_page(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_page, "MAX_INLINE_BYTES", 100)
    path = tmp_path / "page.html"
    written = write_report(folder, path)
    beside = tmp_path / "page_files"
    assert written.folder == beside
    details = Page(path).head["details"]
    assert (details["where"], details["folder"], details["numFiles"]) == ("files", "page_files", 4)
    first = {file.name for file in beside.iterdir()}
    assert f"step-000001.0.{details['tag']}.js" in first
    script = (beside / f"step-000001.0.{details['tag']}.js").read_text()
    name, text = re.fullmatch(r'addBlock\("(.*?)", "(.*?)"\);\n', script).groups()  # type: ignore[union-attr]
    assert name == "step-000001.0"
    assert json.loads(unzip(text))["rows"][1]["id"] == "000001.000/1"
    assert 'id="block:step-000001.0"' not in Path(path).read_text()

    # The next page's replace them; what somebody else has put there stays.
    (beside / "notes.js").write_text("mine")
    write_report(folder, path)
    names = {file.name for file in beside.iterdir()}
    assert "notes.js" in names
    assert len(names) == 5
    assert not names & first
    (beside / "notes.js").unlink()
    monkeypatch.setattr(report_page, "MAX_INLINE_BYTES", 10**6)
    write_report(folder, path)
    assert not beside.exists()


def test_no_text_becomes_markup(hostile_folder: RunFolder, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_report(hostile_folder, path)
    page = Page(path)
    # Head, scripts and blocks end where they should, and nothing else begins.
    assert page.text.count("</script>") == page.text.count("<script")
    assert "alert(1)" in json.dumps(page.head)
    assert "<script>alert" not in page.text
    assert "<img" not in page.text
    assert HOSTILE in read_texts(page, "summary", "agent")


def test_the_policy_allows_the_pages_own_scripts_alone(folder: RunFolder, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_report(folder, path)
    text = path.read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    for inline in re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    # Nothing is loaded from anywhere.
    assert not re.findall(r'(?:src|href)=[`"]?(?:https?:)?//', text)


def test_what_is_damaged_is_said(folder: RunFolder, tmp_path: Path) -> None:
    folder.find_trajectory_file(2).write_bytes(b"torn")
    path = tmp_path / "page.html"
    written = write_report(folder, path)
    head = Page(path).head
    assert written.num_trajectories == 4
    [problem] = head["problems"]
    assert problem == written.problems[0]
    assert "step-000002.parquet: is damaged" in problem
