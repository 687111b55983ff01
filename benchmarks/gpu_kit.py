"""Collects what a GPU machine without network lacks, for benchmarks/gpu.py: ``make gpu-kit``.

Such a machine has Python 3.12, torch and transformers, though perhaps older ones than agentrl is
made for. Of pyarrow travels what reads and writes Parquet files: the whole of it has 52 MiB.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

_FOLDER = Path(".gpu-kit")
_MAX_MIB = 64
#: With all that they depend on.
_WHOLE = [
    *("pydantic", "pyyaml", "psutil", "openai", "httpx2", "starlette", "uvicorn", "httptools"),
    *("aiohttp", "orjson", "pebble", "filelock", "typer", "rich", "openai-agents"),
    *("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"),
]
#: What they depend on is there. The embedded engine drives the continuous batching of
#: transformers 5.19, which differs from that of 5.17.
_ALONE = ["transformers>=5.19,<5.20", "pyarrow"]
#: Flight, S3 and ORC are separate libraries, which pyarrow loads when they are asked for.
_LEFT_OUT = (
    "pyarrow/include/*",
    "pyarrow/tests/*",
    "pyarrow/src/*",
    "pyarrow/*.pyx",
    "pyarrow/*.pxi",
    "pyarrow/*.pxd",
    "pyarrow/*flight*",
    "pyarrow/*s3*",
    "pyarrow/_orc*",
    # The same file three times; libraries look for the one with the major version.
    "pyarrow/libarrow_python.so",
    "pyarrow/libarrow_python.so.*.*",
)


def shrink_wheel(path: Path, left_out: tuple[str, ...]) -> None:
    """Rewrites a wheel without the files whose names match one of the patterns.

    LZMA, which pip reads as well, makes libraries a third smaller than the usual method.
    """

    def stays(name: str) -> bool:
        return not any(fnmatch(name, pattern) for pattern in left_out)

    shrunk = path.with_suffix(".part")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(shrunk, "w", zipfile.ZIP_LZMA) as new:
        for entry in filter(lambda entry: stays(entry.filename), old.infolist()):
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines, kept = csv.reader(content.decode().splitlines()), io.StringIO()
                csv.writer(kept, lineterminator="\n").writerows(r for r in lines if stays(r[0]))
                content = kept.getvalue().encode()
            new.writestr(entry, content, zipfile.ZIP_LZMA)
    shrunk.replace(path)


def _download(*arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    chosen = ["--only-binary=:all:", "--python-version", "3.12", "--dest", str(_FOLDER)]
    subprocess.run([*pip, *chosen, *arguments], check=True)


def main() -> None:
    """Fills the folder, and says how large it is and what to type next."""
    shutil.rmtree(_FOLDER, ignore_errors=True)
    _download(*_WHOLE)
    _download("--no-deps", *_ALONE)
    for wheel in _FOLDER.glob("pyarrow-*.whl"):
        shrink_wheel(wheel, _LEFT_OUT)
    size = sum(wheel.stat().st_size for wheel in _FOLDER.iterdir()) / 2**20
    if size > _MAX_MIB:
        sys.exit(f"the wheels have {size:.1f} MiB; {_MAX_MIB} travel: shorten the lists above")
    print(
        f"{size:.1f} MiB. Carry {_FOLDER}, then type: python3 -m benchmarks.gpu --wheels {_FOLDER}"
    )


if __name__ == "__main__":
    main()
