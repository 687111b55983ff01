"""SIGKILL at random moments inside of saving: what is there afterwards is one whole checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

#: Forks what it has imported for every round.
ROUNDS = """
import os, random, signal, sys, time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.train.resume import DataCursor
from agentrl_cli.train.learner import Learner
from agentrl_cli.train.resume import CheckpointSaver

config = ExperimentConfig.model_validate({
    "experiment_name": "exp",
    "output_dir": "runs",
    "model": {"path": "none", "dtype": "bfloat16"},
    "workflow_path": "none.none",
    "train_dataset": {"path": "none"},
    "train": {"keep_last_checkpoints": 2},
})
shape = Qwen2Config(
    vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)


def make_learner():
    learner = Learner(Qwen2ForCausalLM(shape), config)
    optimizer = learner._policy.optimizer
    for weight in optimizer._masters.values():
        weight.grad = torch.zeros_like(weight)
    optimizer.step(0.0)
    return learner, optimizer


def fill(tensors, step):
    return {name: torch.full_like(tensor, step) for name, tensor in tensors.items()}


def save_until_killed():
    learner, optimizer = make_learner()
    with RunFolder.create_or_resume(config) as folder:
        latest = folder.latest_checkpoint()
        step = latest[0] if latest else 0
        saver = CheckpointSaver(config.train, folder, learner, DataCursor(1, "x"))
        while True:
            step += 1
            with torch.no_grad():
                masters, state = optimizer.master_weights(), optimizer.state_tensors()
                optimizer.load_master_weights(fill(masters, step))
                optimizer.load_state_tensors(fill(state, step))
            learner.step = step
            saver.save(step)


def check_what_is_there():
    with RunFolder.create_or_resume(config) as folder:
        hidden = [p.name for p in (folder.path / "checkpoints").iterdir() if p.name[0] == "."]
        assert hidden == [], hidden
        found = folder.list_checkpoints()
        assert len(found) <= 3, found
        for step, path in found:
            learner, optimizer = make_learner()
            learner.load(path)
            assert learner.step == step
            tensors = {**optimizer.master_weights(), **optimizer.state_tensors()}
            for name, tensor in tensors.items():
                assert bool((tensor == step).all()), (path, name)
            loaded = Qwen2ForCausalLM.from_pretrained(path)
            assert all(bool((w == step).all()) for w in loaded.parameters()), path
        print("checked", [step for step, _ in found], flush=True)


def fork(run):
    pid = os.fork()
    if pid:
        return pid
    try:
        run()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(1)


rng = random.Random(int(sys.argv[1]))
latest = 0
for _ in range(int(sys.argv[2])):
    pid = fork(save_until_killed)
    folder = Path("runs/exp/t0/checkpoints")
    deadline = time.monotonic() + 60
    # Somewhere after a further checkpoint has come.
    while not (folder / f"step-{latest + 1:06d}").is_dir():
        assert time.monotonic() < deadline
        assert os.waitpid(pid, os.WNOHANG)[0] == 0
        time.sleep(0.002)
    time.sleep(rng.uniform(0.0, 0.25))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    left = sorted(p.name for p in folder.iterdir() if p.name[0] == ".")
    latest = max(int(p.name[5:]) for p in folder.iterdir() if p.name.startswith("step-"))
    print("killed", left, flush=True)
    assert os.waitpid(fork(check_what_is_there), 0)[1] == 0
"""


@pytest.mark.slow
def test_the_last_whole_checkpoint_is_left(tmp_path: Path, run_python: Callable[..., str]) -> None:
    output = run_python("-c", ROUNDS, "3", "8", folder=tmp_path, OMP_NUM_THREADS="1")
    assert output.count("checked") == 8
    # Else no kill fell into the writing of one, and nothing is shown.
    assert ".step-" in output
