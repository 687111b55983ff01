"""Whether verification is silent on sound engines and finds planted faults:
``python -m benchmarks.weight_verification``.

Writes docs/results/weight-verification.md: for the real model and a tiny random one, in float32 and
bfloat16, on the embedded engine and on vLLM, publications as a run makes them before its first step
by an engine that never loads something; publications of updated weights, each on other probe
prompts; and then some in which something stays as it was. Every cell of the tables is a
process of its own; ``--cell real bfloat16 vllm`` measures one and prints it as JSON. A cell that
reaches ``--max-seconds`` plants its last faults after fewer publications, and the table says so.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.engine.embedded.embedded_engine import EmbeddedEngine
from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.engine.router.engine_router import EngineRouter
from agentrl_cli.engine.vllm.vllm_server import VllmServer
from agentrl_cli.engine.weights.weight_transfer import build_weight_transfer
from agentrl_cli.errors import WeightMismatchError
from agentrl_cli.launch.run_resolution import with_output_head
from agentrl_cli.launch.servers.server_group import ServerGroup
from agentrl_cli.log import SilentObserver
from agentrl_cli.models.model_files import load_tokenizer
from agentrl_cli.models.pretrained import load_model
from agentrl_cli.models.tokenizer_training import train_tokenizer
from agentrl_cli.train import publish
from agentrl_cli.train.learner import Learner
from benchmarks.real_model import fetch_real_model
from benchmarks.small_model import build_model

_PAGE = Path("docs/results/weight-verification.md")
_TEXT = Path("docs/how-it-works.md")
#: Learning rate of every update: ten times the default of train.learning_rate.
_UPDATE_SIZE = 1e-5
#: What an adapter is trained with.
_ADAPTER_UPDATE_SIZE = 1e-4
_NUM_ADAPTER_UPDATES = 20
_HEAD = "lm_head.weight"
_EMBEDDINGS = "model.embed_tokens.weight"
_LORA = {"rank": 8, "alpha": 16.0}


def build_config(folder: Path, dtype: str, engine: str, lora: bool = False) -> ExperimentConfig:
    """An experiment with that model; whole weights reach the servers."""
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "weight-verification",
            "model": {"path": str(folder), "dtype": dtype, "lora": _LORA if lora else None},
            "agent_builder_path": "some.module.build",
            "train_dataset": {"path": "rows.jsonl"},
            "engine": {
                "kind": engine,
                "max_model_len": 512,
                "max_num_seqs": 64,
                "num_threads": 1,
                "start_timeout_seconds": 600.0,
                **({"weight_transfer": {"kind": "disk"}} if engine == "vllm" else {}),
                **({"cpu_kv_cache_gib": 0.5} if engine == "vllm" else {}),
            },
        }
    )


def save_tiny_model(folder: Path) -> None:
    """A random model whose tokens differ in probability by orders of magnitude."""
    tokenizer = train_tokenizer(["What is 2 + 2? The answer is 4."] * 3, 400)
    model = build_model(128, 4, tied=True)
    model.resize_token_embeddings(len(tokenizer))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.15)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@asynccontextmanager
async def open_engine(config: ExperimentConfig, scratch: Path) -> AsyncIterator[Any]:
    """The engine with an output head of its own, so that the head alone can be stale."""
    folder = config.model.path
    if config.engine.kind == "embedded":
        model = load_model(folder, config.model.dtype, "cpu")
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        engine = EmbeddedEngine(model, load_tokenizer(folder), config.engine, model_name="m")
        yield engine
        await engine.close()
        return
    machine = Machine.detect({**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    run = with_output_head(resolve_run(config, machine, purpose="train"), config, folder)
    observer = SilentObserver()
    with ServerGroup(config, run, folder, log_dir=scratch, observer=observer) as group:
        await asyncio.to_thread(group.wait)
        transfer = build_weight_transfer(config, model_folder=folder, kind="disk", tied_names={})
        clients = [VllmServer(endpoint, config.engine) for endpoint in group.endpoints]
        router = EngineRouter(clients, config.engine, model_name=folder, transfer=transfer)
        try:
            await router.start(None)
            yield router
        finally:
            await router.close()


class Meddler:
    """A learner whose published weights somebody changes on their way."""

    def __init__(self, learner: Learner, changes: Mapping[str, Tensor]) -> None:
        self._learner = learner
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def weights(self) -> dict[str, Tensor]:
        """What the engine gets, with an output head."""
        weights = self._learner.weights()
        return weights | {_HEAD: weights[_EMBEDDINGS]} | dict(self._changes)


class Updater:
    """Updates a learner's model by AdamW on next tokens of text; no reward is needed for that."""

    def __init__(self, learner: Learner, texts: Sequence[Sequence[int]], size: float) -> None:
        self._model, self._texts, self._size = learner.model, itertools.cycle(texts), size
        self._optimizer = learner._policy.optimizer

    def update(self) -> None:
        """One update, from 32 tokens."""
        ids = torch.tensor([next(self._texts)])
        logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        torch.nn.functional.cross_entropy(logits, ids[0, 1:]).backward()
        self._optimizer.step(self._size)


def plant_faults(
    now: Mapping[str, Tensor], old: Mapping[str, Tensor], trial: int
) -> dict[str, dict[str, Tensor]]:
    """What goes to the engine instead of the weights, by the fault's name."""
    num_layers = 1 + max(int(n.split(".")[2]) for n in now if n.startswith("model.layers."))
    layer = f"model.layers.{trial * 7 % num_layers}."
    generator = torch.Generator().manual_seed(trial)
    foreign = {
        name: torch.randn(tensor.shape, generator=generator).to(tensor) * tensor.float().std()
        for name, tensor in now.items()
        if tensor.dim() == 2
    }
    return {
        "stale head": {_HEAD: old[_EMBEDDINGS]},
        "one stale layer": {name: old[name] for name in now if name.startswith(layer)},
        "nothing loaded": {**old, _HEAD: old[_EMBEDDINGS]},
        "foreign model": {**foreign, _HEAD: foreign[_EMBEDDINGS]},
    }


class Cell:
    """One model, number type and engine."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, scratch: Path) -> None:
        self._model, self._dtype, self._engine_kind = arguments.cell
        self._arguments, self._folder, self._scratch = arguments, folder, scratch
        tokenizer = load_tokenizer(folder)
        ids = tokenizer.encode(_TEXT.read_text(), add_special_tokens=False)
        source = random.Random(0)
        starts = [source.randrange(len(ids) - 32) for _ in range(500)]
        self._texts = [ids[start : start + 32] for start in starts]
        self._own_prompts = publish.build_probes(tokenizer, 512)
        self._ratios: dict[str, list[float]] = {}
        self._seconds: list[float] = []
        self._version = 0

    async def publish(self, engine: Any, learner: Any, kind: str) -> None:
        """One publication; how far the gap is above or below what is allowed is kept."""
        self._version += 1
        prompts = self._own_prompts
        if self._version % 2:
            at = 8 * self._version % len(self._texts)
            prompts = [text[: 9 + i] for i, text in enumerate(self._texts[at : at + 8])]
        found: list[float] = []
        check = publish._check

        def keep(name: str, version: int, gap: Any, tolerance: float) -> None:
            found.append(gap.mean / tolerance)
            check(name, version, gap, tolerance)

        publish._check = keep
        try:
            metrics = await publish.publish_and_verify(engine, learner, self._version, prompts)
            self._seconds.append(metrics["probe_seconds"])
        except WeightMismatchError:
            # A gap that was judged is a result, of a fault or a false alarm; all else is neither.
            if not found:
                raise
        finally:
            publish._check = check
        self._ratios.setdefault(kind, []).append(found[0])
        print(f"{self._version} {kind}: {found[0]:.3g} of what is allowed", file=sys.stderr)

    async def measure(self) -> dict[str, Any]:
        """Everything that the tables show of the cell."""
        ends = time.monotonic() + self._arguments.max_seconds
        config = build_config(self._folder, self._dtype, self._engine_kind)
        async with open_engine(config, self._scratch) as engine:
            learner = self._build_learner(config)
            old = {name: tensor.clone() for name, tensor in learner.weights().items()}
            with learner.visibly_changed():
                await self._plant(engine, learner, old, "at start")
            updater = Updater(learner, self._texts, _UPDATE_SIZE)
            num_updates = 0
            while num_updates < self._arguments.publications and time.monotonic() < ends:
                updater.update()
                num_updates += 1
                await self.publish(engine, Meddler(learner, {}), "sound")
            busy_seconds = await self._measure_busy(engine, learner)
            await self._plant(engine, learner, old, "later")
            del learner, updater
            await self._plant_missing_adapter(engine, old)
        sound = self._ratios.pop("sound")
        return {
            "cell": self._arguments.cell,
            "publications": len(sound),
            "false_alarms": sum(ratio > 1 for ratio in sound),
            "largest": max(sound),
            "probe_seconds": statistics.median(self._seconds),
            "busy_probe_seconds": busy_seconds,
            "updates": num_updates,
            "faults": {
                kind: [sum(r > 1 for r in ratios), len(ratios), min(ratios)]
                for kind, ratios in self._ratios.items()
            },
        }

    def _build_learner(self, config: ExperimentConfig) -> Learner:
        return Learner(load_model(str(self._folder), "float32", "cpu"), config)

    async def _plant(
        self, engine: Any, learner: Learner, old: Mapping[str, Tensor], when: str
    ) -> None:
        await self.publish(engine, Meddler(learner, {}), "sound")
        for trial in range(self._arguments.trials):
            for kind, changes in plant_faults(learner.weights(), old, trial).items():
                await self.publish(engine, Meddler(learner, changes), f"{kind}, {when}")

    async def _plant_missing_adapter(self, engine: Any, base: Mapping[str, Tensor]) -> None:
        config = build_config(self._folder, self._dtype, self._engine_kind, lora=True)
        learner = self._build_learner(config)
        with learner.visibly_changed():
            await self._publish_without_adapter(engine, learner, base, "at start")
        updater = Updater(learner, self._texts, _ADAPTER_UPDATE_SIZE)
        for _ in range(_NUM_ADAPTER_UPDATES):
            updater.update()
        await self._publish_without_adapter(engine, learner, base, "later")

    async def _publish_without_adapter(
        self, engine: Any, learner: Learner, base: Mapping[str, Tensor], when: str
    ) -> None:
        await self.publish(engine, Meddler(learner, {}), "sound")
        for _ in range(self._arguments.trials):
            await self.publish(engine, Meddler(learner, base), f"adapter not applied, {when}")

    async def _measure_busy(self, engine: Any, learner: Learner) -> float:
        """Seconds of the probe while 16 calls are in flight."""
        calls = [
            asyncio.create_task(engine.generate(ids, Sampling(max_tokens=200, seed=seed)))
            for seed, ids in enumerate(self._texts[:16])
        ]
        await asyncio.sleep(1.0)
        await self.publish(engine, Meddler(learner, {}), "sound")
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return self._seconds[-1]


def measure_cell(arguments: argparse.Namespace) -> dict[str, Any]:
    """The cell that was asked for."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "tiny"
        if arguments.cell[0] == "real":
            folder = fetch_real_model()
        else:
            save_tiny_model(folder)
        return asyncio.run(Cell(arguments, folder, Path(scratch)).measure())


def format_page(results: Sequence[Mapping[str, Any]]) -> str:
    """The page: false alarms and cost, and two tables of faults."""
    lines = [
        "# Verification of weights",
        "",
        f"Measured by `python -m benchmarks.weight_verification` on {os.cpu_count()} cores "
        f"({platform.machine()}). *real* is SmolLM2-135M-Instruct, *tiny* a random model. Each "
        "number in brackets is the probability-weighted mean gap in parts of what is allowed: "
        "above 1 a publication ends the run.",
        "",
        "## Sound publications",
        "",
        f"Each follows an update of AdamW with a learning rate of {_UPDATE_SIZE:g}, and is "
        "verified on prompts of its own. The largest gap is in brackets. The last columns are the "
        "cost of one verification, with no call and with 16 calls in flight.",
        "",
        "| model | type | engine | false alarms | probe | with 16 calls |",
        "|---|---|---|---|---|---|",
    ]
    for one in results:
        alarms = f"{one['false_alarms']} of {one['publications']} ({one['largest']:.2g})"
        seconds = [f"{one['probe_seconds']:.2f} s", f"{one['busy_probe_seconds']:.2f} s"]
        lines.append("| " + " | ".join([*one["cell"], alarms, *seconds]) + " |")
    lines += [
        "",
        "## Faults that are there from the start",
        "",
        "Before its first step a run publishes weights that are visibly changed, so an engine that "
        "never loads something is found there, whatever the learning rate. The smallest gap is in "
        "brackets.",
        "",
        *_format_faults(results, "at start"),
        "",
        "## Faults that begin later",
        "",
        "They are planted once, after all updates; what is stale is so by all of them, as "
        f"their number says. An adapter that is not applied has had {_NUM_ADAPTER_UPDATES} "
        f"updates of {_ADAPTER_UPDATE_SIZE:g}. A stale weight that differs by less than the "
        "engine's rounding is not found here: its version, which is confirmed, is what speaks "
        "against it.",
        "",
        *_format_faults(results, "later"),
    ]
    return "\n".join(lines) + "\n"


def _format_faults(results: Sequence[Mapping[str, Any]], when: str) -> list[str]:
    kinds = [kind for kind in results[0]["faults"] if kind.endswith(when)]
    names = [kind.removesuffix(f", {when}") for kind in kinds]
    lines = [
        "| model | type | engine | updates | " + " | ".join(names) + " |",
        "|---" * (4 + len(kinds)) + "|",
    ]
    for one in results:
        counted = [one["faults"][kind] for kind in kinds]
        shown = [f"{n} of {m} ({low:.2g})" for n, m, low in counted]
        updates = "0" if when == "at start" else str(one["updates"])
        lines.append("| " + " | ".join([*one["cell"], updates, *shown]) + " |")
    return lines


def main() -> None:
    """Measures all cells, or one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", nargs=3, metavar=("MODEL", "TYPE", "ENGINE"))
    parser.add_argument("--publications", type=int, default=200)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--max-seconds", type=float, default=3600.0)
    parser.add_argument(
        "--results",
        type=Path,
        default=Path(tempfile.gettempdir()) / "weight-verification.jsonl",
        help="cells that are in this file are not measured again",
    )
    arguments = parser.parse_args()
    if arguments.cell:
        print(json.dumps(measure_cell(arguments)))
        return
    kept = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    results = {tuple(one["cell"]): one for one in map(json.loads, kept)}
    for cell in itertools.product(("tiny", "real"), ("float32", "bfloat16"), ("embedded", "vllm")):
        if cell not in results:
            results[cell] = _measure_apart(cell, arguments)
            with arguments.results.open("a") as file:
                file.write(json.dumps(results[cell]) + "\n")
    _PAGE.write_text(format_page(list(results.values())))


def _measure_apart(cell: tuple[str, ...], arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.weight_verification", "--cell", *cell]
    for name in ("publications", "trials", "max_seconds"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


if __name__ == "__main__":
    main()
