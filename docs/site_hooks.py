"""Hooks of mkdocs.yml: pages of the repository outside of docs/, and formulas without scripts."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from latex2mathml.converter import convert

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File, Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: Where pages of the repository stand on the site, by the same paths.
_PROJECT = "project/"
#: What the search needs where pages come from a disk, and where the theme would load it from.
_SHIM, _SHIM_URL = "assets/iframe-worker-1.0.4.js", "https://unpkg.com/iframe-worker/shim"
_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
_FORMULA = re.compile(r"(\$\$?)([^$\n]+?)\1")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds README, changelog, the guide for contributors and the examples' pages."""
    from mkdocs.structure.files import File

    pages = [*_PAGES, *(p.relative_to(ROOT).as_posix() for p in ROOT.glob("examples/**/README.md"))]
    for page in pages:
        files.append(File.generated(config, _PROJECT + page, abs_src_path=str(ROOT / page)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Has links lead to where pages stand on the site, and shows formulas as MathML."""
    parts = _CODE.split(markdown)
    # Every second part is code.
    for number in range(0, len(parts), 2):
        parts[number] = _FORMULA.sub(_format_formula, parts[number])
    source = _find_source(page.file)
    here = posixpath.dirname(page.file.src_uri)
    return _LINK.sub(lambda link: _move(link, source, here, files), "".join(parts))


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Has pages load nothing from elsewhere."""
    return output.replace(_SHIM_URL, posixpath.relpath(_SHIM, posixpath.dirname(page.url) or "."))


def on_post_template(output_content: str, *, template_name: str, config: MkDocsConfig) -> str:
    """As :func:`on_post_page`, for pages that have no Markdown."""
    return output_content.replace(_SHIM_URL, f"/{_SHIM}")


def _find_source(file: File) -> str:
    """The path of a page in the repository."""
    if file.src_uri.startswith(_PROJECT):
        return file.src_uri.removeprefix(_PROJECT)
    return f"docs/{file.src_uri}"


def _move(link: re.Match[str], source: str, here: str, files: Files) -> str:
    text, target, anchor = link[1], link[2], link[3] or ""
    if re.match(r"[a-z]+:", target):
        return link[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    page = path.removeprefix("docs/") if path.startswith("docs/") else _PROJECT + path
    if page in files.src_uris:
        return f"[{text}]({posixpath.relpath(page, here)}{anchor})"
    # A file or folder of the repository, which the site does not have; else mkdocs names the link.
    return text if (ROOT / path).exists() else link[0]


def _format_formula(formula: re.Match[str]) -> str:
    if formula[1] == "$$":
        return convert(formula[2], display="block")
    # At the beginning of a line Markdown would take the element itself for a block.
    return f"<span>{convert(formula[2])}</span>"
