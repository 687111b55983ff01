"""The documentation as a site: built without a network, and read without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow]


def test_the_site_is_built_without_warnings_and_loads_nothing_from_elsewhere(
    tmp_path: Path,
) -> None:
    pytest.importorskip("material", reason="needs MkDocs (extra docs)")
    # Pages of the theme that ask for others' scripts or fonts would be blank on a train.
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    pages = {page: page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")}
    asked = re.compile(r"<(?:script|img|link)[^>]+(?:src|href)=[\"']?(https?://[^\"'> ]+)")
    assert [(page.name, url) for page, text in pages.items() for url in asked.findall(text)] == []
    assert "<math" in pages[tmp_path / "algorithms.html"]
    assert "PPOTrainer" in pages[tmp_path / "python-api.html"]
