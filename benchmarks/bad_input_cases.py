"""Bad inputs: what is typed, and the files that it names."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

_CONFIG = """\
experiment_name: demo
model: {path: model, dtype: float32}
agent_builder_path: agents.py:build
reward_fn_path: rewards.py:reward
gconfig: {n_samples: 2, max_tokens: 4}
train_dataset: {path: rows.jsonl, batch_size: 2}
valid_dataset: {path: rows.jsonl}
engine: {kind: embedded, max_model_len: 256}
rollout: {reward_workers: 1}
train: {total_steps: 1}
"""
_AGENTS = """
def build(client):
    async def run(data):
        messages = [{"role": "user", "content": data["question"]}]
        await client.chat.completions.create(model="x", messages=messages)
    return run

def terminal(client): raise ValueError("\\x1b]0;owned\\x07\\ud83d\\x1b[2J")
def ends(client): raise SystemExit(0)
def nothing(client): return None
def needs(client, city): return None
number = 7
"""
_REWARDS = """
def reward(completions, answer): return 1.0
def huge(completions, answer): return 1e308
def asks(completions, solution): return 1.0
number = 7
"""
_ROWS = """
def deep():
    row = []
    for _ in range(100_000): row = [row]
    return [{"question": row}]
def half(): return [{"question": "\\ud83d"}]
def ends(): raise SystemExit(0)
def raises(): raise KeyError("city")
def number(): return 7
"""
_ROW = b'{"question": "1+1", "answer": "2"}\n'
_SFT = "{output_path: out, dataset: {path: %s}, model: {new: {vocab_size: 400}}}\n"


@dataclass(frozen=True, slots=True)
class Case:
    """One command with something wrong in it."""

    section: str
    name: str
    argv: list[str]
    exit_code: int = 2
    words: str = ""
    """That the answer must hold."""
    starts: bool = False
    """True: what is wrong shows only once it runs."""


def _train(section: str, *cases: tuple[str, str]) -> list[Case]:
    """Overrides of a configuration that is in order."""
    return [Case(section, name, ["train", "-c", "ok.yaml", text]) for name, text in cases]


def _dry(section: str, *cases: tuple[str, str]) -> list[Case]:
    command = ["train", "--dry-run", "-c", "ok.yaml"]
    return [Case(section, name, [*command, text]) for name, text in cases]


def _files(section: str, *cases: tuple[str, str]) -> list[Case]:
    return [Case(section, name, ["train", "--dry-run", "-c", text]) for name, text in cases]


def _commands(section: str, *cases: tuple[str, str]) -> list[Case]:
    return [Case(section, name, text.split(" ")) for name, text in cases]


def _damaged(*cases: tuple[str, str]) -> list[Case]:
    """Files that agentrl wrote and something else changed."""
    return [Case(_HOSTILE, name, text.split(" "), exit_code=1) for name, text in cases]


_HOSTILE, _YAML, _KEYS = "Hostile inputs", "Configuration files", "Values"
_CODE, _DATA, _MODELS, _OTHERS = "Agents and rewards", "Rows", "Models", "Commands and folders"
_LATE = "Known only once it runs"

CASES: tuple[Case, ...] = (
    *_train(
        _HOSTILE,
        ("half a surrogate pair in a row", "train_dataset.path=half.jsonl"),
        ("... from a function", "train_dataset.path=data:half"),
        ("terminal control in a builder's error", "agent_builder_path=agents.py:terminal"),
        ("a row nested 100,000 deep", "train_dataset.path=deep.jsonl"),
        ("... from a function", "train_dataset.path=data:deep"),
        ("a FIFO as rows", "train_dataset.path=fifo.jsonl"),
        ("a FIFO as template", "model.chat_template=fifo.jsonl"),
        ("a FIFO as model", "model.path=fifo.jsonl"),
        ("config.json cut off", "model.path=bad-models/cut-config"),
        ("config.json is a list", "model.path=bad-models/list-config"),
        ("config.json is a folder", "model.path=bad-models/folder-config"),
        ("a template that does not parse", "model.chat_template=broken.jinja"),
        ("a template that raises", "model.chat_template=raising.jinja"),
        ("a template that is no text", "model.chat_template=rows.parquet"),
        ("pickled weights", "model.path=bad-models/pickle"),
        ("auto_map in config.json", "model.path=bad-models/auto-map"),
        ("damaged Parquet rows", "train_dataset.path=rows.parquet"),
    ),
    Case(
        _HOSTILE,
        "a byte order mark in a CSV file (the column is question)",
        ["train", "-c", "ok.yaml", "train_dataset.path=bom.csv", "reward_fn_path=rewards.py:asks"],
        words="answer, question",
    ),
    *_dry(
        _HOSTILE,
        ("terminal control in a key", "\x1b]0;owned\x07=1"),
        ("a seed of 2**70", "seed=1180591620717411303424"),
        ("... as Python has it", "seed=2**70"),
        ("an infinite deadline", "rollout.timeout_seconds=.inf"),
        ("100,000 threads", "engine.num_threads=100000"),
        ("an S3 address as model", "model.path=s3://bucket/model"),
        ("... as rows", "train_dataset.path=s3://bucket/rows.jsonl"),
        ("... as runs", "output_dir=s3://bucket/runs"),
        ("a Windows path as model", "model.path=C:\\models\\qwen"),
        ("... as rows", "train_dataset.path=C:\\rows.jsonl"),
    ),
    *_files(
        _HOSTILE,
        ("an alias bomb", "bomb.yaml"),
        ("YAML nested 100,000 deep", "deep.yaml"),
        ("a FIFO as configuration", "fifo.jsonl"),
        ("an S3 address as configuration", "s3://bucket/demo.yaml"),
    ),
    *_damaged(
        ("a flipped byte in a checkpoint", "eval -c ok.yaml --checkpoint damaged"),
        (
            "a garbled saved configuration",
            "train -c ok.yaml output_dir=. experiment_name=garbled",
        ),
    ),
    *_commands(
        _HOSTILE,
        ("an S3 address as checkpoint", "eval -c ok.yaml --checkpoint s3://bucket/step-1"),
        ("an S3 address as run", "inspect-trajectories s3://bucket/run"),
        ("an S3 address to export to", "export run --to s3://bucket/model"),
        ("a FIFO as run", "inspect-trajectories fifo.jsonl"),
        ("a FIFO as conversations", "sft -c sft-fifo.yaml"),
        ("half a surrogate pair in conversations", "sft -c sft-half.yaml"),
        ("conversations nested 100,000 deep", "sft -c sft-deep.yaml"),
    ),
    Case(_HOSTILE, "garbled metrics", ["inspect-trajectories", "run"], exit_code=0, words="step 1"),
    Case(
        _HOSTILE,
        "garbled trajectories of one step",
        ["inspect-trajectories", "run", "--step", "all"],
        exit_code=0,
        words="is damaged",
    ),
    Case(
        _LATE,
        "auto_map of a tokenizer (transformers' own is used)",
        ["eval", "-c", "ok.yaml", "model.path=bad-models/tokenizer-auto-map"],
        exit_code=0,
        words="mean reward",
        starts=True,
    ),
    Case(
        _LATE,
        "a reward of 1e308",
        ["train", "-c", "ok.yaml", "reward_fn_path=rewards.py:huge", "trial_name=huge"],
        exit_code=1,
        words="1e+308",
        starts=True,
    ),
    *(
        Case(_LATE, name, ["train", "-c", "ok.yaml", f"model.path={folder}"], starts=True)
        for name, folder in (
            ("NaN weights", "bad-models/nan-weights"),
            ("another model's config.json", "bad-models/wider-config"),
        )
    ),
    *_files(
        _YAML,
        ("no such file", "ok.yml"),
        ("a folder", "model"),
        ("empty", "empty.yaml"),
        ("a list", "list.yaml"),
        ("a tab", "tab.yaml"),
        ("a key twice", "twice.yaml"),
        ("an unclosed quote", "quote.yaml"),
        ("UTF-16", "utf16.yaml"),
        ("binary", "rows.parquet"),
        ("NUL bytes", "nul.yaml"),
        ("a Python object", "object.yaml"),
        ("a date that is none", "date.yaml"),
        ("no model", "no-model.yaml"),
    ),
    *_dry(
        _KEYS,
        ("no equals sign", "gconfig.n_samples"),
        ("no key", "=1"),
        ("an unknown key", "gconfig.n_sample=4"),
        ("a key below a value", "seed.value=1"),
        ("text for a number", "gconfig.n_samples=many"),
        ("text for a list", "loggers=tensorboard"),
        ("none of a group", "gconfig.n_samples=0"),
        ("a negative temperature", "gconfig.temperature=-1"),
        ("a temperature that is no number", "gconfig.temperature=.nan"),
        ("top_p above 1", "gconfig.top_p=2"),
        ("an empty batch", "train_dataset.batch_size=0"),
        ("an algorithm misspelt", "train.algorithm.kind=gppo"),
        ("an engine misspelt", "engine.kind=vlm"),
        ("a number type that is none", "model.dtype=float8"),
        ("a learning rate that is text", "train.learning_rate=1e-3x"),
        ("a name that leaves the folder", "experiment_name=../../x"),
        ("an empty name", "trial_name="),
        ("a name of 300 characters", "trial_name=" + "x" * 300),
        ("no steps", "train.total_steps=0"),
        ("10**30 steps", "train.total_steps=1000000000000000000000000000000"),
        ("a launcher that is none", "launcher.kind=slurm"),
        ("a parser misspelt", "engine.tool_call_parser=hermse"),
        ("a NUL in a path", 'train_dataset.path="a\\0b"'),
        ("an unclosed bracket", "loggers=[{kind: wandb"),
    ),
    *_train(
        _CODE,
        ("no such module", "agent_builder_path=agnets.build"),
        ("no such file", "agent_builder_path=agnets.py:build"),
        ("no such name", "agent_builder_path=agents.py:biuld"),
        ("no import path", "agent_builder_path=build"),
        ("a syntax error", "agent_builder_path=syntax.py:build"),
        ("a module that ends itself", "agent_builder_path=ends.py:build"),
        ("not callable", "agent_builder_path=agents.py:number"),
        ("a builder that ends itself", "agent_builder_path=agents.py:ends"),
        ("a builder that returns nothing", "agent_builder_path=agents.py:nothing"),
        ("a builder that needs an argument", "agent_builder_path=agents.py:needs"),
        ("an argument too many", "agent_builder_kwargs.city=Paris"),
        ("no such reward", "reward_fn_path=rewards.py:rewrad"),
        ("a reward that is a number", "reward_fn_path=rewards.py:number"),
        ("a reward that asks for what no row has", "reward_fn_path=rewards.py:asks"),
    ),
    *_train(
        _DATA,
        ("no such file", "train_dataset.path=row.jsonl"),
        ("no such folder", "train_dataset.path=data2/rows.jsonl"),
        ("a folder", "train_dataset.path=model"),
        ("another kind of file", "train_dataset.path=agents.py"),
        ("an empty file", "train_dataset.path=empty.jsonl"),
        ("a line that is no JSON", "train_dataset.path=broken.jsonl"),
        ("a line that is a list", "train_dataset.path=list.jsonl"),
        ("JSON that is no list", "train_dataset.path=object.json"),
        ("a ragged CSV file", "train_dataset.path=ragged.csv"),
        ("Latin-1", "train_dataset.path=latin1.csv"),
        ("a number of 5,000 digits", "train_dataset.path=digits.jsonl"),
        ("a function that raises", "train_dataset.path=data:raises"),
        ("a function that ends itself", "train_dataset.path=data:ends"),
        ("a function that returns a number", "train_dataset.path=data:number"),
        ("a hub id without a connection", "train_dataset.path=nobody/nothing"),
        ("no such validation rows", "valid_dataset.path=row.jsonl"),
    ),
    *_train(
        _MODELS,
        ("no such folder", "model.path=modell"),
        ("a file", "model.path=agents.py"),
        ("an empty folder", "model.path=bad-models"),
        ("a built-in one misspelt", "model.path=builtin:calculater"),
        ("an unknown architecture", "model.path=bad-models/unknown"),
        ("no tokenizer", "model.path=bad-models/no-tokenizer"),
        ("no weights", "model.path=bad-models/no-weights"),
        ("weights cut off", "model.path=bad-models/cut-weights"),
        ("empty weights", "model.path=bad-models/empty-weights"),
        ("tokenizer.json cut off", "model.path=bad-models/cut-tokenizer"),
        ("no such tokenizer", "tokenizer_path=bad-models/none"),
        ("no such template", "model.chat_template=none.jinja"),
    ),
    *_commands(
        _OTHERS,
        ("no such command", "trian -c ok.yaml"),
        ("no such option", "train -c ok.yaml --dryrun"),
        ("no configuration", "train"),
        ("no tasks", "eval -c ok.yaml --limit 0"),
        ("an endpoint without a model", "eval -c ok.yaml --base-url http://localhost:1"),
        ("an endpoint that is no URL", "eval -c ok.yaml --base-url localhost --model m"),
        ("no such checkpoint", "eval -c ok.yaml --checkpoint runs/x"),
        ("a file as checkpoint", "eval -c ok.yaml --checkpoint agents.py"),
        ("no such run", "inspect-trajectories runs/x/y"),
        ("steps that are none", "inspect-trajectories run --step one"),
        ("no such step", "inspect-trajectories run --step 99"),
        ("no such trajectory", "inspect-trajectories run nobody"),
        ("a smallest above a largest", "inspect-trajectories run --min-reward 2 --max-reward 1"),
        ("a run without checkpoints", "export run --to out"),
        ("export into a folder that is there", "export run --to model"),
        ("a port that is none", "serve -c ok.yaml --port 99999"),
        ("no such conversations", "sft -c sft-missing.yaml"),
        ("conversations that are none", "sft -c sft-rows.yaml"),
        ("an experiment for sft", "sft -c ok.yaml"),
        ("a file as folder of runs", "train -c ok.yaml output_dir=agents.py"),
        ("a folder of runs that cannot be", "train -c ok.yaml output_dir=/proc/runs"),
    ),
)  # fmt: skip


def fill_desk() -> None:
    """Writes what the cases name, and what is in order, into the current folder."""
    bomb = "a0: &a0 [1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
    )
    texts = {
        "ok.yaml": _CONFIG, "agents.py": _AGENTS, "rewards.py": _REWARDS, "data.py": _ROWS,
        "bomb.yaml": _CONFIG + bomb, "deep.yaml": _CONFIG + "x: " + "[" * 100_000,
        "empty.yaml": "", "list.yaml": "- 1\n", "tab.yaml": "model:\n\tpath: x\n",
        "twice.yaml": _CONFIG + "seed: 1\nseed: 2\n", "quote.yaml": _CONFIG + 'seed: "1\n',
        "nul.yaml": _CONFIG + "seed: \0\n", "date.yaml": _CONFIG + "trial_name: 2001-99-99\n",
        "object.yaml": _CONFIG + "seed: !!python/object/apply:os.getpid []\n",
        "no-model.yaml": _CONFIG.replace("model: {", "models: {"),
        "sft-fifo.yaml": _SFT % "fifo.jsonl", "sft-missing.yaml": _SFT % "none.jsonl",
        "sft-rows.yaml": _SFT % "rows.jsonl",
        "sft-half.yaml": _SFT % "half-said.jsonl",
        "sft-deep.yaml": _SFT % "deep.jsonl",
        "half-said.jsonl": '{"messages": [{"role": "assistant", "content": "\\ud83d"}]}\n',
        "syntax.py": "def build(:\n", "ends.py": "import sys\nsys.exit(0)\n",
        "broken.jinja": "{% if %}", "raising.jinja": "{{ raise_exception('no') }}",
        "half.jsonl": '{"question": "\\ud83d", "answer": "2"}\n',
        "deep.jsonl": '{"question": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
        "digits.jsonl": '{"question": ' + "9" * 5000 + "}\n",
        "bom.csv": "\ufeffquestion,answer\n1+1,2\n", "ragged.csv": "question,answer\n1,2,3\n",
        "empty.jsonl": "", "broken.jsonl": '{"question": \n', "list.jsonl": "[1]\n",
        "object.json": '{"question": "1"}', "run/config.yaml": _CONFIG,
        "run/metrics.jsonl": '{"step": "x"}\n\0\ufffd\n[1]\n{"step": 1, "reward_mean": 0.5}\n{"st',
        "run/trajectories/step-000001.parquet": "PAR1", "garbled/t0/config.yaml": "{\0",
    }  # fmt: skip
    contents = {
        "rows.jsonl": _ROW * 4,
        "rows.parquet": b"PAR1" + b"\xff" * 300 + b"PAR1",
        "utf16.yaml": _CONFIG.encode("utf-16"),
        "latin1.csv": "question,answer\nné,2\n".encode("latin-1"),
        **{name: text.encode() for name, text in texts.items()},
    }
    for name, content in contents.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    os.mkfifo("fifo.jsonl")
    _save_models()


def _save_models() -> None:
    """One in order, and folders in which one file is another than there."""
    import torch

    from agentrl_cli.models.tokenizer_training import train_tokenizer
    from agentrl_cli.store.checksums import checksummed_folder
    from benchmarks.small_model import build_model

    tokenizer = train_tokenizer(["1+1 is 2"], 400)
    model = build_model(64, 1)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    good = {path.name: path.read_bytes() for path in Path("model").iterdir() if path.is_file()}
    weights, tokenizer_json = good["model.safetensors"], good["tokenizer.json"]
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    model.save_pretrained("nan")

    def changed(name: str, **keys: object) -> bytes:
        return json.dumps({**json.loads(good[name]), **keys}).encode()

    config, of_tokenizer = "config.json", "tokenizer_config.json"
    own_code = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    own_tokenizer = changed(
        of_tokenizer, tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]}
    )
    pickle = b"cos\nsystem\n(S'touch ran'\ntR."
    folders: dict[str, dict[str, bytes | None]] = {
        "cut-config": {config: good[config][:40]},
        "list-config": {config: b"[1]"},
        "folder-config": {config: None, "config.json/x": b""},
        "pickle": {"model.safetensors": None, "pytorch_model.bin": pickle},
        "auto-map": {config: changed(config, model_type="evil", auto_map=own_code)},
        "tokenizer-auto-map": {of_tokenizer: own_tokenizer},
        "unknown": {config: changed(config, model_type="gpt-9")},
        "no-tokenizer": {"tokenizer.json": None, of_tokenizer: None},
        "no-weights": {"model.safetensors": None},
        "cut-weights": {"model.safetensors": weights[: len(weights) // 2]},
        "empty-weights": {"model.safetensors": b""},
        "nan-weights": {"model.safetensors": Path("nan/model.safetensors").read_bytes()},
        "wider-config": {config: changed(config, hidden_size=128)},
        "cut-tokenizer": {"tokenizer.json": tokenizer_json[: len(tokenizer_json) // 2]},
    }
    for name, changes in folders.items():
        files = {**good, "evil.py": b"raise SystemExit('ran')\n", **changes}
        for file, content in files.items():
            if content is not None:
                path = Path("bad-models", name, file)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    with checksummed_folder(Path("damaged")) as folder:
        for file, content in good.items():
            (folder / file).write_bytes(content)
    flipped = weights[:-1] + bytes([weights[-1] ^ 1])
    Path("damaged/model.safetensors").write_bytes(flipped)
