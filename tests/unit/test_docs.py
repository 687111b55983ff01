"""The pages that are made from code are what the code makes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from agentrl_cli.config.loading import load_config, load_config_as
from agentrl_cli.config.sft import SftConfig

ROOT = Path(__file__).parents[2]


def test_configuration_page_is_current() -> None:
    path = ROOT / "docs" / "make_configuration.py"
    spec = importlib.util.spec_from_file_location("make_configuration", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.format_page(), (
        "run: python docs/make_configuration.py"
    )


def test_readme_begins_with_its_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert blocks[:2] == ["make quickstart\n", "make test\n"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_config_loads_and_says_what_to_expect(path: Path) -> None:
    load = load_config_as(SftConfig, path) if path.name.startswith("sft") else load_config(path)
    assert load is not None
    first_line = path.read_text(encoding="utf-8").splitlines()[0]
    assert first_line.startswith("# Hardware:")


def test_links_of_the_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    links = [
        (page.name, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
        if not link.startswith("http") and not (page.parent / link).exists()
    ]
    assert links == []
