"""Whether every bad input is answered with what to type: ``python -m benchmarks.bad_inputs``.

Writes docs/results/bad-inputs.md: for each input the exit code and the first line of the message.
Exits with 1 if one was answered with a traceback, "bug in agentrl", a control character, no end or
another exit code than it should be, or if a file was written for it. Commands run one after the
other in forks of this process, which has imported what they need; ``--only WORD`` runs some, and
prints what they say.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import bad_input_cases
from benchmarks.bad_input_cases import CASES, Case

_PAGE = Path("docs/results/bad-inputs.md")
#: What takes longer was started, or waits for ever.
_MAX_SECONDS = 90
_WIDTH = 150
_HEAD = """\
# Bad inputs

`python -m benchmarks.bad_inputs` types each of these in a folder with a small model, an agent and
rows that are in order. The tables have the exit code and the first line of the message, cut at
{width} characters. Nothing was written for any but those that are known only once they run.

{verdict}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="inputs with this word in their name")
    only = parser.parse_args().only
    os.environ.update(HF_HUB_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1", COLUMNS="200")
    sys.dont_write_bytecode = True
    for name in ("app", "train_command", "final_report", "progress_display"):
        importlib.import_module(f"agentrl_cli.cli.{name}")
    for name in ("launch.local_run", "launch.model_export", "models.sft_training"):
        importlib.import_module(f"agentrl_cli.{name}")
    # Loaded lazily, else in every fork.
    for name in ("pyarrow.parquet", "transformers.models.qwen2.modeling_qwen2"):
        importlib.import_module(name)
    sections: dict[str, list[str]] = {}
    problems = []
    with tempfile.TemporaryDirectory() as scratch:
        desk = Path(scratch) / "desk"
        desk.mkdir()
        if _run_in_fork(bad_input_cases.fill_desk, desk)[0] != 0:
            sys.exit("the folder of inputs could not be made")
        for case in (case for case in CASES if only in case.name):
            code, text, problem = _try(case, desk)
            line = _find_message(text)
            print(f"{case.name}: exit {code}: {line}", flush=True)
            if problem:
                problems.append(f"{case.name}: {problem}")
            if only or problem:
                print(text)
            sections.setdefault(case.section, []).append(_format_row(case, code, line))
    print("\n".join(problems) or f"{len(CASES)} inputs, no problem")
    if not only:
        _PAGE.write_text(_format_page(sections, problems), encoding="utf-8")
    sys.exit(bool(problems))


def _try(case: Case, desk: Path) -> tuple[int, str, str]:
    """Exit code, all that was printed, and what is wrong with it, if anything."""
    before = set(desk.rglob("*"))
    code, text = _run_in_fork(_type_command, desk, case.argv)
    written = sorted(str(path.relative_to(desk)) for path in set(desk.rglob("*")) - before)
    shutil.rmtree(desk / "runs", ignore_errors=True)
    found = []
    if code != case.exit_code:
        found.append(f"exit code {code}, not {case.exit_code}")
    found += [f"says {words!r}" for words in ("Traceback", "bug in agentrl") if words in text]
    if not all(c.isprintable() or c in "\n\t\r" for c in text):
        found.append("prints control characters")
    if written and not case.starts:
        found.append(f"wrote {', '.join(written[:4])}")
    if case.words not in text:
        found.append(f"does not say {case.words!r}")
    return code, text, "; ".join(found)


def _type_command(argv: list[str]) -> None:
    from agentrl_cli.cli.app import main as run_command

    sys.argv = ["agentrl", *argv]
    run_command()


def _run_in_fork(function: Callable[..., Any], folder: Path, *args: Any) -> tuple[int, str]:
    """Exit code and output of ``function``, called in ``folder`` by a process of its own."""
    log = folder.parent / "output.txt"
    pid = os.fork()
    if pid == 0:
        code: Any = 1
        try:
            os.setpgid(0, 0)
            signal.alarm(_MAX_SECONDS)
            os.chdir(folder)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(descriptor, stream)
            function(*args)
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return code, log.read_text(encoding="utf-8", errors="replace")


def _find_message(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if line.lower().startswith("error: ")]
    first = errors[0] if errors else 0
    # "... has 1 problem:" says nothing without what follows.
    is_heading = first < len(lines) and lines[first].endswith(":")
    return " ".join(lines[first : first + 1 + is_heading])


def _format_row(case: Case, code: int, line: str) -> str:
    command = " ".join(json.dumps(w)[:60] if set(w) & set(' "\\\x1b') else w for w in case.argv)
    cells = (case.name, f"`{_cut(command, 90)}`", str(code), _cut(line, _WIDTH))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _format_page(sections: dict[str, list[str]], problems: list[str]) -> str:
    num_rows = sum(map(len, sections.values()))
    verdict = f"{num_rows} inputs; none was answered with a traceback."
    if problems:
        verdict = f"{num_rows} inputs, of which {len(problems)} are not answered as they should be:"
        verdict += "".join(f"\n- {problem}" for problem in problems)
    blocks = [_HEAD.format(width=_WIDTH, verdict=verdict)]
    for section, rows in sections.items():
        table = ["| input | `agentrl` ... | exit | first line |", "|---|---|---|---|", *rows]
        blocks.append(f"## {section}\n\n" + "\n".join(table) + "\n")
    return "\n".join(blocks)


if __name__ == "__main__":
    main()
