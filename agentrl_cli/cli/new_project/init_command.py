"""``agentrl init``."""

from __future__ import annotations

import importlib.util
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from agentrl_cli.errors import UserInputError, format_nearest

_TEMPLATES = Path(__file__).parent / "templates"
#: Files that every project has, by their names in the templates' folder.
_FILES = {
    "README.md": "README.md",
    "calculator.py": "calculator.py",
    "gitignore": ".gitignore",
    "make_rows.py": "make_rows.py",
    "reward.py": "reward.py",
    "test_project.py": "test_project.py",
    "train.yaml": "train.yaml",
}
#: Those in which names are filled in.
_FILLED_IN = ("README.md", "train.yaml")
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class Framework:
    """What the agent of a project is written with."""

    title: str
    modules: tuple[str, ...] = ()
    """What its agent imports of the framework."""

    @property
    def is_installed(self) -> bool:
        """Whether the agent can be imported here."""
        return all(importlib.util.find_spec(module) is not None for module in self.modules)


FRAMEWORKS = {
    "plain": Framework("plain Python on OpenAI's client"),
    "openai-agents": Framework("the OpenAI Agents SDK", ("agents",)),
    "langgraph": Framework("LangGraph", ("langgraph", "langchain_openai")),
    "camel": Framework("CAMEL", ("camel",)),
    "anthropic": Framework("Anthropic's SDK", ("anthropic",)),
}


def init_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The folder to make.")],
    framework: Annotated[
        str, typer.Option(help=f"One of {', '.join(FRAMEWORKS)}.", metavar="NAME")
    ] = "plain",
) -> None:
    """Write a project that can be trained at once: agent, reward, rows, configuration, test."""
    if framework not in FRAMEWORKS:
        raise UserInputError(
            f"--framework {framework}: there is no such framework; "
            f"{format_nearest(framework, FRAMEWORKS)}"
        )
    target = Path(name).expanduser()
    _check_name(name, target.name)
    try:
        _check_target(target)
        write_project(target, framework)
    except OSError as error:
        raise UserInputError(
            f"{target}: the project cannot be written: {error.strerror or error}. Type another "
            "NAME, or go to a folder that you may write to"
        ) from error
    _print_next(target, framework)


def write_project(target: Path, framework: str) -> None:
    """Makes ``target`` a project, which is there as a whole or not at all."""
    install = "" if framework == "plain" else f"    {format_install(framework)}\n"
    values = {
        "name": target.name,
        "description": f"written with {FRAMEWORKS[framework].title}",
        "install": install,
        "install_vllm": _format_vllm_install(framework),
    }
    agent = f"agent_{framework.replace('-', '_')}.py"
    # In the same file system, so that it can be renamed.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        folder = Path(temporary, target.name)
        folder.mkdir()
        for source, written in {agent: "agent.py", **_FILES}.items():
            text = (_TEMPLATES / source).read_text(encoding="utf-8")
            if source in _FILLED_IN:
                text = Template(text).substitute(values)
            (folder / written).write_text(text, encoding="utf-8")
        from agentrl_cli.cli.new_project.templates.make_rows import write_rows

        write_rows(folder / "data")
        folder.rename(target)


def format_install(framework: str) -> str:
    """The command that installs a framework's package."""
    return f"pip install 'agentrl-cli[{framework}]'"


def _format_vllm_install(framework: str) -> str:
    if framework == "camel":
        # vLLM and CAMEL ask for versions of mcp that exclude each other, and both run on this one.
        return (
            "    printf 'mcp>=1.19,<2\\npydantic>=2.12.2\\n' > overrides.txt\n"
            "    uv pip install --override overrides.txt 'agentrl-cli[vllm,camel]'\n"
        )
    extras = "vllm" if framework == "plain" else f"vllm,{framework}"
    return f"    pip install 'agentrl-cli[{extras}]'\n"


def _check_name(typed: str, name: str) -> None:
    """Refuses a folder's name that cannot name an experiment."""
    from pydantic import TypeAdapter, ValidationError

    from agentrl_cli.config.experiment import FolderName

    try:
        TypeAdapter(FolderName).validate_python(name)
    except ValidationError as error:
        raise UserInputError(
            f"{typed!r} cannot name a project: the folder's name also names the experiment. "
            "Allowed: up to 120 letters, digits, '.', '_' and '-', beginning with a letter or "
            "digit, such as my-agent"
        ) from error


def _check_target(target: Path) -> None:
    """Refuses a place where a project would not stand alone."""
    if not target.parent.is_dir():
        parent = shlex.quote(str(target.parent))
        raise UserInputError(f"{target}: there is no folder {parent}. Type: mkdir -p {parent}")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise UserInputError(f"{target}: there is a file or a link of that name. Type another NAME")
    found = sorted(path.name for path in target.iterdir()) if target.is_dir() else []
    if found:
        more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        raise UserInputError(
            f"{target}: the folder is not empty: it holds {', '.join(found[:_MAX_LISTED])}{more}. "
            "Type another NAME, or empty it"
        )


def _print_next(target: Path, framework: str) -> None:
    chosen = FRAMEWORKS[framework]
    typer.echo(f"{target}: a project with an agent, written with {chosen.title}. Next:\n")
    if not chosen.is_installed:
        typer.echo(f"    {format_install(framework)}    # not installed here yet")
    typer.echo(
        f"    cd {shlex.quote(str(target))}\n"
        "    agentrl train --config train.yaml    # two to three minutes on a laptop's CPU\n\n"
        "README.md says what is where, and what to change for your own task and a real model."
    )
