"""Share of planted errors that the tests find, in advantages, losses and samples.

    python -m benchmarks.mutation [--survivors]

mutmut plants the errors (``[tool.mutmut]`` in pyproject.toml says where) and finds out which test
reaches which function. Here the tests are collected once, and for every error a fork of this
process runs those that reach it, until one fails: ``mutmut run`` says the same of each error, and
needs a second for each, most of it to collect. An error that no test reaches counts as not found.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

FOLDER = Path("mutants")

#: The one error that mutmut runs itself; it cannot be told to run none.
_ONE = "agentrl_cli.scores.x_compute_score__mutmut_1"

#: CPU seconds after which an error counts as found: it made a test run for ever.
_MAX_SECONDS = 60


@dataclass
class PlantErrors:
    """A pytest plugin that runs the collected tests on one planted error after the other.

    Args:
        tests: the ids of the tests that reach each error's function, by the error's name.
    """

    tests: Mapping[str, Sequence[str]]
    found: dict[str, bool] = field(default_factory=dict)
    is_sound: bool = False
    """True: without an error no test fails."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Takes the place of pytest's own loop."""
        items = {item.nodeid: item for item in session.items}
        # Tests that fail anyway would find everything.
        self.is_sound = not _finds(session.items, "none")
        if not self.is_sound:
            return True
        for name, ids in self.tests.items():
            self.found[name] = _finds([items[one] for one in ids if one in items], name)
        return True


def _finds(items: Sequence[pytest.Item], name: str) -> bool:
    """True: one of the tests fails on the error."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return status != 0
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (_MAX_SECONDS, _MAX_SECONDS))
        os.environ["MUTANT_UNDER_TEST"] = name
        for item in items:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if item.session.testsfailed:
                os._exit(1)
    except BaseException:
        os._exit(1)
    os._exit(0)


def plant() -> dict[str, list[str]]:
    """Lets mutmut plant the errors; the tests that reach each, by its name."""
    subprocess.run([sys.executable, "-m", "mutmut", "run", "--max-children", "1", _ONE], check=True)
    stats = FOLDER / "mutmut-stats.json"
    if not stats.is_file():
        sys.exit(f"mutmut wrote no {stats}: see its message above")
    reaching = json.loads(stats.read_text())["tests_by_mangled_function_name"]
    planted = {}
    for path in sorted(FOLDER.rglob("*.meta")):
        for name in json.loads(path.read_text())["exit_code_by_key"]:
            planted[name] = sorted(reaching.get(name.rpartition("__mutmut_")[0], ()))
    if not planted or not any(planted.values()):
        sys.exit("no error was planted that a test reaches: see mutmut's message above")
    return planted


def run_silently(arguments: Sequence[str], loop: PlantErrors) -> None:
    """Runs pytest: of what forks say of failing tests, nothing is worth reading."""
    kept = [os.dup(stream) for stream in (1, 2)]
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    try:
        pytest.main([*arguments], plugins=[loop])
    finally:
        for stream, own in zip((1, 2), kept, strict=True):
            os.dup2(own, stream)
    if not loop.is_sound:
        sys.exit(f"tests fail without a planted error: cd {FOLDER} and run pytest there")


def print_table(found: Mapping[str, bool]) -> None:
    """Found and planted errors of every module, as Markdown."""
    planted: Counter[str] = Counter()
    caught: Counter[str] = Counter()
    for name, is_found in found.items():
        module = name.rpartition(".")[0]
        planted[module] += 1
        caught[module] += is_found
    print("| module | planted | found | share |\n|---|---|---|---|")
    for module, count in planted.items():
        print(f"| `{module}` | {count} | {caught[module]} | {caught[module] / count:.1%} |")
    total = planted.total()
    print(f"| all | {total} | {caught.total()} | {caught.total() / total:.1%} |")


def main() -> None:
    """Plants, runs, and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--survivors", action="store_true", help="name the errors not found")
    arguments = parser.parse_args()
    planted = plant()
    tests = sorted({test for ids in planted.values() for test in ids})
    files = sorted({test.partition("::")[0] for test in tests})
    os.chdir(FOLDER)
    sys.path.insert(0, str(Path.cwd()))
    loop = PlantErrors(planted)
    run_silently(["-p", "no:cacheprovider", *files], loop)
    print_table(loop.found)
    if arguments.survivors:
        for name in (name for name, is_found in loop.found.items() if not is_found):
            print(f"{name}{'' if planted[name] else '  (no test reaches it)'}")


if __name__ == "__main__":
    main()
