"""How the embedded engine begins, dies and ends, and what it leaves alone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import EngineError

IDS = list(range(20, 40))
ENDLESS = Sampling(temperature=0.0)


def _engine_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "agentrl-embedded-engine"]


async def test_a_dead_engine_fails_calls_in_flight_and_later_ones(open_engine, build_tiny_model):
    model = build_tiny_model()
    async with open_engine(model, max_num_seqs=2, max_model_len=4096) as engine:
        tasks = [asyncio.create_task(engine.generate(IDS, ENDLESS)) for _ in range(4)]
        stream = engine.stream(IDS, ENDLESS)
        await asyncio.sleep(0.05)
        model.model.layers[1].mlp.up_proj.weight.data = torch.zeros(3, 3)
        failed = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        for error in failed:
            assert isinstance(error, EngineError)
            assert isinstance(error.__cause__, RuntimeError)
            assert "shapes cannot be multiplied" in str(error)
        with pytest.raises(EngineError, match="engine's thread died: RuntimeError"):
            await engine.generate(IDS, ENDLESS)
        with pytest.raises(EngineError, match="shapes cannot be multiplied") as caught:
            await anext(stream)
        assert isinstance(caught.value.__cause__, RuntimeError)
        for operation in (
            engine.policy_version(),
            engine.pause(),
            engine.publish_weights(1, dict(build_tiny_model().named_parameters())),
        ):
            with pytest.raises(EngineError, match="engine's thread died"):
                await operation


@pytest.mark.parametrize("paused", [False, True])
async def test_closing_ends_calls_and_may_be_done_twice(open_engine, paused):
    async with open_engine(max_num_seqs=1, max_model_len=4096) as engine:
        if paused:
            await engine.pause()
        tasks = [asyncio.create_task(engine.generate(IDS, ENDLESS)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert len(_engine_threads()) == 1
        await asyncio.wait_for(engine.close(), 3)
        assert not _engine_threads()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineError)
        with pytest.raises(EngineError, match="was closed"):
            await engine.generate(IDS, ENDLESS)
        with pytest.raises(EngineError, match="was closed"):
            engine.stream(IDS, ENDLESS)
        await engine.close()


async def test_the_trainers_threads_and_random_numbers_stay_its_own(open_engine):
    before = torch.get_num_threads()
    wanted = before + 2
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    async with open_engine(num_threads=wanted) as engine:
        await asyncio.gather(*(engine.generate(IDS, Sampling(max_tokens=5)) for _ in range(4)))
        in_engine: list[int] = []
        await asyncio.wrap_future(
            engine._manager.run_between_steps(lambda: in_engine.append(torch.get_num_threads()))
        )
        elsewhere = await asyncio.to_thread(torch.get_num_threads)
        assert torch.equal(torch.rand(4), expected)
        assert torch.get_num_threads() == before
    assert in_engine == [wanted]
    assert elsewhere == before


async def test_a_context_too_long_for_the_memory_is_refused(open_engine):
    with pytest.raises(EngineError, match=r"Type engine\.max_model_len=\d+ or less"):
        async with open_engine(max_model_len=4 * 10**9):
            pass
    assert not _engine_threads()


_LEAVES_ENGINES_RUNNING = """
import asyncio, sys
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2Tokenizer
from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.embedded.embedded_engine import EmbeddedEngine
from agentrl_cli.engine.protocol import Sampling

config = Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=1, bos_token_id=None,
                     eos_token_id=None, pad_token_id=None)
def open_engine():
    return EmbeddedEngine(
        AutoModelForCausalLM.from_config(config).eval(), Qwen2Tokenizer(),
        EngineConfig(max_model_len=20000, max_num_seqs=4, num_threads=1), model_name="tiny",
    )

torch.manual_seed(1)  # greedy text that meets no end token, on every machine
engines = [open_engine(), open_engine()]

async def main():
    endless = Sampling(temperature=0.0)
    calls = [asyncio.create_task(e.generate([1, 2], endless)) for e in engines for _ in range(6)]
    await asyncio.sleep(0.2)
    await engines[1].pause()
    print("leaving", len(calls))
    sys.exit(3)

asyncio.run(main())
"""


@pytest.mark.slow
def test_the_interpreter_ends_while_engines_run_and_pause(tmp_path: Path):
    script = tmp_path / "leave.py"
    script.write_text(_LEAVES_ENGINES_RUNNING)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done.stdout.strip() == "leaving 12", done.stderr
    assert done.returncode == 3
    assert done.stderr == ""
