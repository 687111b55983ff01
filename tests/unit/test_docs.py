"""The pages that are made from code are what the code makes."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shutil
import tomllib
from collections.abc import Collection
from pathlib import Path

import pytest

from agentrl_cli.agents import plain_python
from agentrl_cli.config.config_file import load_config, load_config_as
from agentrl_cli.config.key_names import AREAL, TRL, VERL
from agentrl_cli.config.sft_config import SftConfig
from agentrl_cli.rollout import rewards, workflow_building
from agentrl_cli.tracking.formats.format_table import (
    REASONING_ALIASES,
    REASONING_BY_TOOL_CALLS,
    REASONING_FORMATS,
    TOOL_CALL_ALIASES,
    TOOL_CALL_FORMATS,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", ["make_configuration", "make_coming_from", "make_parsers"])
def test_pages_made_from_code_are_current(script: str) -> None:
    path = ROOT / "docs" / f"{script}.py"
    spec = importlib.util.spec_from_file_location(script, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text(encoding="utf-8")
    assert page == module.format_page(), f"run: python docs/{script}.py"


def test_every_run_on_a_real_model_has_a_configuration_that_can_be_trained() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.real_models import VARIANTS

    for variant in VARIANTS:
        path = ROOT / "examples" / variant.example / "config.yaml"
        load_config(path, variant.overrides).check_trainable()


def test_the_page_of_real_models_and_its_curves_are_what_the_records_give(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.real_models import RECORDS, read_records
    from benchmarks.real_models_page import write_page

    results = ROOT / RECORDS.parent
    folder = tmp_path / RECORDS.name
    folder.mkdir()
    shutil.copy(ROOT / RECORDS / "notes.md", folder)
    write_page(read_records(ROOT / RECORDS), tmp_path)
    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert made, "it made no page"
    for path in made:
        committed = results / path.relative_to(tmp_path)
        same = path.read_bytes() == committed.read_bytes()
        assert same, f"{committed} differs: run python -m benchmarks.real_models --page"


def test_the_arithmetic_of_scaling_is_what_the_recorded_costs_give() -> None:
    from benchmarks.cluster_costs import Costs
    from benchmarks.cluster_simulation import format_arithmetic, format_costs

    costs = Costs.load(ROOT / "docs" / "results" / "cluster-costs.json")
    for page, made in (
        ("scaling.md", format_arithmetic(costs)),
        ("results/cluster-simulation.md", format_costs(costs)),
    ):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert f"\n{made}\n" in text, f"{page} differs: run python -m benchmarks.cluster_simulation"


@pytest.mark.parametrize("names", [AREAL, VERL, TRL])
def test_other_trainers_keys_lead_to_keys_that_exist(names: dict[str, str]) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    keys = [
        key.replace(".0.", "[].").replace("eval_gconfig.", "gconfig.")
        for meaning in names.values()
        if not meaning.startswith("nothing to set")
        for key in meaning.partition(" (")[0].split(", ")
    ]
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_the_configuration_for_who_comes_from_elsewhere_loads(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    path = tmp_path / "c.yaml"
    path.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    load_config(path).check_trainable()


def test_parsers_page_names_every_format_once() -> None:
    text = (ROOT / "docs" / "parsers.md").read_text(encoding="utf-8")
    rows = (
        "\n".join(line for line in part.splitlines() if line.startswith("|"))
        for part in text.split("## Reasoning\n")
    )
    calls, reasoning = rows
    for name in (*TOOL_CALL_FORMATS, *TOOL_CALL_ALIASES):
        assert len(re.findall(rf"[|,] `{re.escape(name)}`", calls)) == 1, name
    for name in (*REASONING_FORMATS, *REASONING_ALIASES, *REASONING_BY_TOOL_CALLS):
        assert len(re.findall(rf"[|,] `{re.escape(name)}`", reasoning)) == 1, name


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("rewards.md", rewards.SUPPLIED),
        ("workflows.md", workflow_building.SUPPLIED),
        ("agents.md", (*plain_python.SUPPLIED, "anthropic_client")),
    ],
)
def test_every_name_that_a_signature_may_use_is_documented(
    page: str, names: Collection[str]
) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert [name for name in names if f"`{name}`" not in text] == []


def test_readme_begins_with_its_commands_and_the_users_own_agent() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert blocks[0].splitlines()[0].startswith("git clone ")
    assert blocks[0].splitlines()[1:] == ["make quickstart"]
    assert blocks[1] == "make test\n"
    screen = "\n".join(text.splitlines()[:60])
    for sight in ("my_agent.py", "reward_fn_path", "agentrl train --config", "agentrl-cli"):
        assert sight in screen


def test_the_wheel_holds_the_package_and_needs_nothing_beside_it() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["name"] == "agentrl-cli"
    assert settings["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["agentrl_cli"]}
    beside = re.compile(
        r"^\s*(?:from|import) (?:builders|rewards|benchmarks|tests)\b", re.MULTILINE
    )
    sources = sorted((ROOT / "agentrl_cli").rglob("*.py"))
    assert [path.name for path in sources if beside.search(path.read_text("utf-8"))] == []


def test_whoever_installs_is_never_sent_to_the_strangers_package() -> None:
    """``agentrl`` on the package index is another project."""
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "agentrl_cli").rglob("*.py"),
    ]
    wrong = re.compile(r"pip install (?:-\S+ )*'?agentrl(?:\[|'|\s|$)", re.MULTILINE)
    assert [p.name for p in pages if wrong.search(p.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "path",
    sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "examples").glob("*/*.yaml")]),
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_every_config_loads_and_says_what_to_expect(path: Path) -> None:
    is_sft = path.name.startswith(("sft", "warm_start"))
    load = load_config_as(SftConfig, path) if is_sft else load_config(path)
    assert load is not None
    first_line = path.read_text(encoding="utf-8").splitlines()[0]
    assert first_line.startswith("# Hardware:")


def test_rows_of_tables_have_as_many_cells_as_their_head() -> None:
    """A bar inside a cell ends it, and what follows is not shown."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    wrong = []
    for page in pages:
        num_cells = 0
        for line in page.read_text(encoding="utf-8").splitlines():
            if not line.startswith("|"):
                num_cells = 0
                continue
            found = len(re.findall(r"(?<!\\)\|", line))
            num_cells = num_cells or found
            if found != num_cells:
                wrong.append((page.name, line[:60]))
    assert wrong == []


def test_links_of_the_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    links = [
        (page.name, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
        if not link.startswith("http") and not (page.parent / link).exists()
    ]
    assert links == []


def test_python_of_the_pages_compiles_and_imports_what_is_there() -> None:
    """Whole examples are run elsewhere; this holds for every piece."""
    found = []
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]:
        for code in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            imports = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.ImportFrom)]
            found += [(n.module, name.name) for n in imports for name in n.names]
    own = {(module, name) for module, name in found if module and "agentrl_cli" in module}
    assert ("agentrl_cli", "PPOTrainer") in own
    for module, name in own:
        assert hasattr(importlib.import_module(module), name), f"from {module} import {name}"
