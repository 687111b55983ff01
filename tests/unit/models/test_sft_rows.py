from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentrl_cli.config.sft_config import SftDatasetConfig
from agentrl_cli.errors import DatasetError, ImportPathError, ModelError
from agentrl_cli.models.calculator_tasks import build_demonstrations
from agentrl_cli.models.sft_rows import (
    EncodedRow,
    build_batches,
    check_tools_shown,
    encode_conversation,
    load_rows,
)
from agentrl_cli.models.tokenizer_training import TAG_TOKENS, train_tokenizer

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "\nHello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye"},
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["Hello Hi Bye Be brief."] * 9, vocab_size=300)


def split_by_mask(tokenizer: PreTrainedTokenizerFast, row: EncodedRow) -> list[tuple[bool, str]]:
    runs: list[tuple[bool, list[int]]] = []
    for token, trained in zip(row.input_ids, row.loss_mask, strict=True):
        if not runs or runs[-1][0] != trained:
            runs.append((trained, []))
        runs[-1][1].append(token)
    return [(trained, tokenizer.decode(ids)) for trained, ids in runs]


def test_exactly_the_assistants_turns_are_trained(tokenizer):
    row = encode_conversation(tokenizer, CONVERSATION, None, "row 1")
    assert split_by_mask(tokenizer, row) == [
        (
            False,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (True, "\nHello<|im_end|>"),
        (False, "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Bye<|im_end|>"),
        (False, "\n"),
    ]
    # The reply begins with a line break, which would merge with the last one of the prompt that
    # a server tokenizes.
    prompt = tokenizer.apply_chat_template(CONVERSATION[:2], add_generation_prompt=True)
    ids = tuple(prompt["input_ids"])
    assert row.input_ids[: len(ids)] == ids


def test_tool_calls_are_trained_and_results_are_not(tokenizer):
    demo = build_demonstrations(num_bare_rows=0, num_tool_rows=1, num_mixed_rows=0)[0]
    row = encode_conversation(tokenizer, demo["messages"], demo["tools"], "row 1")
    trained = [text for is_trained, text in split_by_mask(tokenizer, row) if is_trained]
    result = demo["messages"][-1]["content"]
    expression = demo["messages"][2]["tool_calls"][0]["function"]["arguments"]["expression"]
    assert trained == [
        '<tool_call>\n{"name": "calculate", "arguments": {"expression": '
        f'"{expression}"}}}}\n</tool_call><|im_end|>',
        f"{result}<|im_end|>",
    ]


RENDERED = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
            CONVERSATION,
            r"row 7, message 3: .*differently",
        ),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            [CONVERSATION[1], {"role": "assistant", "content": "<think>Hm</think>Hello"}],
            r"row 7, message 2: .*does not render this turn as it is",
        ),
        (RENDERED, CONVERSATION[1:3], r"end token '<\|im_end\|>'"),
        (
            RENDERED + "{% if not add_generation_prompt %}<|im_end|>{% endif %}",
            CONVERSATION,
            "row 7, message 5: ",
        ),
        (None, [{"role": "assistant", "content": "a<|im_end|>b"}], "message 1"),
        (
            "{{ raise_exception('roles must alternate') }}",
            CONVERSATION,
            r"row 7: .*roles must alternate",
        ),
    ],
)
def test_what_cannot_be_rendered_turn_by_turn_is_refused(tokenizer, template, messages, problem):
    tokenizer.chat_template = template or tokenizer.chat_template
    with pytest.raises(ModelError, match=problem):
        encode_conversation(tokenizer, messages, None, "row 7")


def rows_of(lengths: list[int]) -> list[EncodedRow]:
    return [EncodedRow((index,) * n, (True,) * n) for index, n in enumerate(lengths)]


def test_batches_hold_every_row_once_within_the_budget() -> None:
    rng = random.Random(3)
    rows = rows_of([rng.randint(1, 300) for _ in range(500)])
    batches = list(build_batches(rows, 1000, random.Random(1)))
    assert sorted(row.input_ids for batch in batches for row in batch) == sorted(
        row.input_ids for row in rows
    )
    padded = [len(batch) * max(len(row.input_ids) for row in batch) for batch in batches]
    assert max(padded) <= 1000
    assert sum(padded) < 1.25 * sum(len(row.input_ids) for row in rows)


def test_a_row_longer_than_the_budget_goes_alone() -> None:
    batches = list(build_batches(rows_of([5, 50, 5]), 10, None))
    assert sorted(len(batch) for batch in batches) == [1, 2]


def test_the_order_is_kept_or_shuffled_by_the_seed_alone() -> None:
    rows = rows_of([10] * 1000)
    firsts = [batch[0].input_ids[0] for batch in build_batches(rows, 50, None)]
    assert firsts == sorted(firsts)
    once, again, other = (list(build_batches(rows, 50, random.Random(n))) for n in (1, 1, 2))
    assert once == again != other


def write_lines(path: Path, *lines: str) -> SftDatasetConfig:
    path.write_text("\n".join(lines), encoding="utf-8")
    return SftDatasetConfig(path=str(path))


def test_rows_from_a_file(tmp_path: Path) -> None:
    line = json.dumps({"messages": CONVERSATION})
    config = write_lines(tmp_path / "rows.jsonl", line, "", line)
    assert load_rows(config) == [{"messages": CONVERSATION}] * 2
    assert len(load_rows(config.model_copy(update={"limit": 1}))) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"rows.jsonl:2: not a line of JSON"),
        ('{"prompt": "x"}', r"row 2: found {'prompt': 'x'}; a row is"),
        ('{"messages": []}', "row 2: found"),
        ("[1]", r"row 2: found \[1\]"),
        ('{"messages": [{"content": "x"}]}', "row 2: found"),
        ('{"messages": [{"role": "assistant", "content": "x"}], "tools": "add"}', "row 2: found"),
        ('{"messages": [{"role": "user", "content": "x"}]}', r"row 2: no message has the role"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, line: str, message: str) -> None:
    good = json.dumps({"messages": CONVERSATION})
    with pytest.raises(DatasetError, match=message):
        load_rows(write_lines(tmp_path / "rows.jsonl", good, line))


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"none.jsonl cannot be read"):
        load_rows(SftDatasetConfig(path=str(tmp_path / "none.jsonl")))
    with pytest.raises(DatasetError, match="has no rows"):
        load_rows(write_lines(tmp_path / "empty.jsonl", ""))


def test_functions_that_cannot_be_used() -> None:
    function = "agentrl_cli.models.calculator_tasks:build_demonstrations"
    for path, kwargs, problem in (
        (function, {"rows": 1}, "unexpected keyword argument 'rows'"),
        (function, {"num_bare_rows": "many"}, "TypeError"),
        ("agentrl_cli.models.calculator_tasks:SYSTEM_PROMPT", {}, "not callable"),
    ):
        with pytest.raises(DatasetError, match=f"gave no list of rows: .*{problem}"):
            load_rows(SftDatasetConfig(path=path, kwargs=kwargs))
    with pytest.raises(ImportPathError, match="build_demonstrations"):
        load_rows(SftDatasetConfig(path=function + "s"))


TEXTS = ["A baker has 47 rolls and bakes 38 more.", "How many rolls are there?"] * 20


@pytest.fixture(scope="module")
def learned() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, vocab_size=400)


@pytest.mark.parametrize(
    "text",
    [
        "A baker has 4738 rolls",
        "  two  spaces\n\n\nand lines\t",
        "héllo 日本語 🙂 unseen",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>\n',
        "it's 3.14",
    ],
)
def test_round_trip_also_after_saving(learned, tmp_path, text):
    learned.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = learned(text)["input_ids"]
    assert loaded(text)["input_ids"] == ids
    assert loaded.decode(ids) == text
    assert loaded.chat_template == learned.chat_template
    assert loaded.eos_token == "<|im_end|>"
    assert loaded.eos_token_id == learned.eos_token_id != loaded.pad_token_id


def test_digits_and_tags_are_one_token_and_survive_skipping_special_ones(learned):
    assert learned.tokenize("1234") == ["1", "2", "3", "4"]
    for tag in TAG_TOKENS:
        assert len(learned(tag)["input_ids"]) == 1
    ids = learned("<|im_start|>x<tool_call>y<|im_end|>")["input_ids"]
    assert learned.decode(ids, skip_special_tokens=True) == "x<tool_call>y"


def test_the_vocabulary_is_limited_learned_and_the_same_again(learned):
    assert len(learned) <= 400
    assert len(learned(" rolls")["input_ids"]) == 1
    again = train_tokenizer(TEXTS, vocab_size=400)
    assert again.backend_tokenizer.to_str() == learned.backend_tokenizer.to_str()


def test_a_template_without_tools_is_refused_with_the_remedy(tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    check_tools_shown(tokenizer, tools, "row 1")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ModelError, match=r"row 1: .*the tools.*Type model.chat_template=hermes"):
        check_tools_shown(tokenizer, tools, "row 1")
