"""Every command of the pages, typed in the folder of a project that has been trained.

What a page types one after the other is typed so here: a command finds what those before it wrote.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.forked_commands import ForkedCommand, command_environment

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(path for folder in ("docs", "examples") for path in sorted(ROOT.glob(f"{folder}/**/*.md"))),
    *(
        path
        for folder in ("configs", "examples")
        for path in sorted(ROOT.glob(f"{folder}/**/*.yaml"))
    ),
]
#: What a line or a span of code begins with that is a command.
PROGRAM = (
    r"(?:\w+=\S+ )*(?:agentrl|python3?|make|pip|uv|git|cd|source|ssh|curl|ray|torchrun|sbatch|sky"
    r"|vllm|inspect|tensorboard|trackio|mlflow|wandb) "
)

#: Commands that are not typed here, and why.
NOT_TYPED = {
    r"^(git|cd|source|ssh|uv venv)\b": "they prepare the shell that all others are typed in",
    r"\bcurl |^read_field|^SESSION_\w+=|^REWARD=": "tests/e2e/cli/test_external_agents.py does",
    r"^(ray|torchrun|sbatch) |launcher\.kind=ray": "clusters: tests/e2e/train starts small ones",
    r"^(vllm|inspect|tensorboard|trackio|mlflow|wandb) ": "programs of others, which do not end",
    r"^agentrl sft .*examples/": "tests/e2e/examples types them, in small",
    r" api:": "a model that costs money",
    r"^python docs/make_": "tests/unit/test_docs.py holds the pages to what they write",
    r"^python -m pytest$": "tests/e2e/cli/test_wheel.py does, in an untouched project",
}
#: Names in the pages, and what they are here.
NAMES = {
    r"--config (?:it\.yaml|my\.yaml|c\.yaml|lexicon\.yaml|C)(?= |$)": "--config train.yaml",
    r"\bRUN\b": "runs/demo/t0",
    r"compare A B": "compare base runs/demo/t0",
    r"runs/[\w-]+/t0": "runs/demo/t0",
    r"runs/[\w-]+/t1": "runs/demo/other",
    r"model\.path=runs/[\w-]+-warm": "model.path=model",
    r"init demo (?=--framework)": "init another ",
    r"step-\d{6}": "step-000002",
    r"--step \d\d": "--step 2",
    r"--evals NAME": "--evals model",
    r"\[DIR\]": "runs",
    r"--save-tasks FILE\.jsonl": "--save-tasks tasks.jsonl",
    r"FILE\.jsonl": "data/train.jsonl",
    r"\$\(python -m benchmarks\.real_model\)": "model",
    r"\bURL(?:/EXPERIMENT/TRIAL)?\b": "s3://bucket/runs/demo/t0",
}
#: Typed again, that one prints its report, and others may not take its place.
NOT_THE_PROJECTS_RUN = r"(?!--config train\.yaml( output_dir=\S+)?$)"
#: What is added to commands: the rest of one that a sentence names in part, and what makes a run
#: small. Shipped configurations are trained elsewhere: tests/e2e/train and tests/e2e/examples.
ADDED = {
    r"^agentrl (?!env|runs)[\w-]+( slurm)?$": "--help",
    r"^agentrl (train|eval|serve) --(?!config|online)": "--config train.yaml",
    r"^agentrl (train|serve) .*(configs/|examples/|kind=vllm)": "engine.kind=embedded",
    rf"^agentrl train (?!.*--dry-run){NOT_THE_PROJECTS_RUN}": "--dry-run",
    rf"^agentrl train (?!.*trial_name=){NOT_THE_PROJECTS_RUN}": "trial_name=typed",
    r"^agentrl serve .*configs/": "model.path=model engine.num_servers=1",
    r"outside\.yaml": "model.path=model",
}
#: Of the project, whose own values take minutes.
SMALL: dict[str, dict[str, Any]] = {
    "model": {"path": "model"},
    "gconfig": {"n_samples": 2, "max_tokens": 16},
    "train_dataset": {"limit": 4, "batch_size": 2},
    "valid_dataset": {"limit": 2},
    "train": {"total_steps": 2, "eval_every_steps": 1, "save_every_steps": 1},
}
#: An untrained model solves nothing, and a page asks for what was solved.
REWARD = """
def score(completions, question):
    return 1.0 if question.startswith("What") else float(len(completions) % 2)
"""
SFT = """
model: {path: model, dtype: float32}
dataset: {path: best.jsonl, limit: 4}
output_path: warm
"""
SERVING = re.compile("Ctrl-C ends it|^serving ", re.MULTILINE)


def list_commands(page: Path) -> list[str]:
    """The commands of a page in their order, each once."""
    text = re.sub(r"\s*\\\n[ #]*", " ", page.read_text(encoding="utf-8"))
    if page.suffix == ".yaml":
        found = [(0, line) for line in re.findall(rf"^# +({PROGRAM}.*)$", text, re.MULTILINE)]
    else:
        found = []
        fences = list(re.finditer(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
        for fence in fences:
            # Every line of a script; of what was printed, what was typed.
            start = {"bash": "(?=.)", "text": rf"\$ (?={PROGRAM})", "python": "(?!)"}.get(
                fence[1], rf" *(?:\w+: )?(?={PROGRAM})"
            )
            lines = re.finditer(rf"^{start}(.*)$", fence[2], re.MULTILINE)
            found += [(fence.start() + line.start(), line[1]) for line in lines]
            text = text.replace(fence[0], " " * len(fence[0]))
        code = rf"^ {{4,}}({PROGRAM}.*)$|`({PROGRAM.rstrip()}\s[^`]*)`"
        for match in re.finditer(code, text, re.MULTILINE):
            found.append((match.start(), match[1] or " ".join(match[2].split())))
    lines = [re.split(r"\s\s|\s#|\s>", line)[0] for _, line in sorted(found)]
    return list(dict.fromkeys(part.strip() for line in lines for part in line.split(" && ")))


def shorten(command: str, bucket: str) -> list[str]:
    """The words to type for a command of a page."""
    command = re.sub(r"^(\w+=\S+ )+|^uv (?=pip)", "", command)
    for pattern, here in NAMES.items():
        command = re.sub(pattern, here, command)
    added = [words for pattern, words in ADDED.items() if re.search(pattern, command)]
    return shlex.split(" ".join([command, *added]).replace("s3://bucket", bucket))


class Typist:
    """Types one command after the other."""

    def __init__(self, log: Path, environment: dict[str, str]) -> None:
        self._log = log
        self._environment = os.environ | command_environment() | environment

    def type(self, words: Sequence[str], folder: Path) -> None:
        """Types a command, which must end well."""
        with self._log.open("w") as log:
            options: dict[str, Any] = {
                **{"cwd": folder, "env": self._environment},
                **{"stdout": log, "stderr": subprocess.STDOUT},
            }
            if words[0] == "agentrl":
                process = ForkedCommand([*words[1:]], **options)
            else:
                process = subprocess.Popen([sys.executable, *words[1:]], text=True, **options)
        with process:
            if not {"serve", "--serve"}.isdisjoint(words) and "--help" not in words:
                deadline = time.monotonic() + 60
                while not SERVING.search(self._log.read_text()) and time.monotonic() < deadline:
                    time.sleep(0.05)
                process.send_signal(signal.SIGINT)
            code = process.wait(300)
        printed = self._log.read_text()
        assert code == 0, f"exit code {code}: {shlex.join(words)}\n{printed}"
        assert "Traceback" not in printed


@pytest.fixture(scope="module")
def bucket(s3_server: Any) -> str:
    return str(s3_server.make_bucket())


@pytest.fixture(scope="module")
def typist(tmp_path_factory: pytest.TempPathFactory, s3_server: Any) -> Typist:
    log = tmp_path_factory.mktemp("typed") / "printed.txt"
    own = {"AGENTRL_API_KEY": "a-key-of-one's-own", "CUDA_VISIBLE_DEVICES": ""}
    return Typist(log, s3_server.environment | own)


@pytest.fixture(scope="module")
def project(
    tmp_path_factory: pytest.TempPathFactory, typist: Typist, brief_model_folder: Path, bucket: str
) -> Path:
    """The folder that pages are read in: what ``agentrl init`` writes, trained in small, and what
    the pages say that the reader has beside it."""
    folder = tmp_path_factory.mktemp("desk")
    typist.type(["agentrl", "init", "demo"], folder)
    project = folder / "demo"
    config = yaml.safe_load((project / "train.yaml").read_text())
    for section, values in SMALL.items():
        config[section] |= values
    (project / "train.yaml").write_text(yaml.safe_dump(config))
    (project / "reward.py").write_text(REWARD)
    (project / "sft.yaml").write_text(SFT)
    outside = (ROOT / "docs" / "external-agents.md").read_text(encoding="utf-8")
    (project / "outside.yaml").write_text(re.findall(r"```yaml\n(.*?)```", outside, re.DOTALL)[0])
    shutil.copy(project / "data" / "train.jsonl", project / "tasks.jsonl")
    shutil.copytree(brief_model_folder, project / "model")
    for name in ("builders", "configs", "examples", "rewards"):
        (project / name).symlink_to(ROOT / name)

    train = ["agentrl", "train", "--config", "train.yaml"]
    typist.type(train, project)
    runs = project / "runs" / "demo"
    shutil.copytree(runs / "t0", runs / "other")
    typist.type([*train, f"output_dir={bucket}/runs"], project)
    return project


def find_commands() -> list[Any]:
    return [
        pytest.param(commands, id=str(page.relative_to(ROOT)))
        for page in PAGES
        if (commands := list_commands(page))
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("commands", find_commands())
def test_a_page_can_be_followed(
    commands: list[str], project: Path, typist: Typist, bucket: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(project, tmp_path / "demo", symlinks=True)
    for command in commands:
        if any(re.search(pattern, command) for pattern in NOT_TYPED):
            continue
        words = shorten(command, bucket)
        if words[0] == "pip":
            check_packages(words)
        elif words[0] == "make":
            subprocess.run([*words, "-n"], cwd=ROOT, check=True, capture_output=True)
        elif words[:2] == ["python", "-m"]:
            # What they measure takes minutes, and their imports seconds.
            source = (ROOT / f"{words[2].replace('.', '/')}.py").read_text(encoding="utf-8")
            used = [word for word in words if word.startswith("--")]
            assert all(f'"{option}"' in source for option in ["__main__", *used]), command
        else:
            typist.type(words, folder)


def check_packages(words: list[str]) -> None:
    """What is installed is the project with extras that it has, or a package that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = {re.split(r"[\[<>=]", text)[0] for group in extras.values() for text in group}
    for word in words[2:]:
        name, _, typed = word.rstrip("]").partition("[")
        if name in ("agentrl-cli", "PATH/TO/agentrl", "."):
            assert set(filter(None, typed.split(","))) <= extras.keys(), word
        elif word != "-e":
            assert re.split(r"[<>=]", name)[0] in named, word


def test_the_tables_hold_nothing_that_no_page_has() -> None:
    commands = [command for page in PAGES for command in list_commands(page)]
    assert len(commands) > 200
    unused = [p for p in NOT_TYPED if not any(re.search(p, command) for command in commands)]
    typed = [c for c in commands if not any(re.search(p, c) for p in NOT_TYPED)]
    for pattern, here in NAMES.items():
        unused += [] if any(re.search(pattern, command) for command in typed) else [pattern]
        typed = [re.sub(pattern, here, command) for command in typed]
    unused += [p for p in ADDED if not any(re.search(p, command) for command in typed)]
    assert unused == []
