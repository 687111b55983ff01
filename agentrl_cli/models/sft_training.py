"""Supervised training: a model learns to say what the assistant says in conversations."""

from __future__ import annotations

import itertools
import math
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agentrl_cli.config.sft_config import NewModelConfig, SftConfig, SftTrainConfig
from agentrl_cli.errors import DatasetError, ModelError, RunError
from agentrl_cli.log import CheckStop, Observer, never_stop
from agentrl_cli.models.model_files import load_tokenizer
from agentrl_cli.models.pretrained import load_model, without_progress_bars
from agentrl_cli.models.sft_rows import (
    EncodedRow,
    build_batches,
    check_tools_shown,
    encode_conversation,
    load_rows,
    render_conversation,
)
from agentrl_cli.models.tokenizer_training import build_untrained_tokenizer, train_tokenizer

#: A tokenizer is learned from so many rows, spread over the dataset: more would change
#: few of its merges.
_MAX_TOKENIZER_ROWS = 2000

#: Targets with this value have no loss.
_IGNORED = -100


def train_and_save(
    config: SftConfig,
    start_path: str | None,
    observer: Observer,
    check_stop: CheckStop = never_stop,
) -> Path:
    """The folder of the trained model, in Hugging Face format.

    The folder appears complete, at the end, or not at all. The same configuration
    gives the same bits on the same machine.

    Args:
        config: what to train on, and how.
        start_path: folder or hub id to start from; None: ``config.model.new`` describes a new one.
        observer: sees a stage with one unit per update.
        check_stop: called between rows and updates; what it raises ends the training.

    Raises:
        UserInputError: the model, the dataset or the output folder cannot be used.
        RunError: the loss stopped being a number, or the folder cannot be written.
    """
    output = Path(config.output_path)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ModelError(
            f"output_path: {output} exists already, and nothing is ever overwritten. Type "
            "output_path=NEW_FOLDER, or delete it"
        )
    rows = load_rows(config.dataset)
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        torch.set_num_threads(config.train.num_threads or os.cpu_count() or 1)
        try:
            model, tokenizer = _build_model(config, start_path, rows)
            encoded = _encode_rows(config, tokenizer, rows, check_stop)
            _train(model, encoded, config, observer, check_stop)
            _save(model, tokenizer, output, config.model.dtype)
        finally:
            torch.set_num_threads(threads)
    return output


def _build_model(
    config: SftConfig, start_path: str | None, rows: Sequence[Mapping[str, Any]]
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    device = config.train.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if start_path is not None:
        tokenizer = load_tokenizer(start_path, config.model.chat_template)
        return load_model(start_path, "float32", device), tokenizer
    new = config.model.new or NewModelConfig()
    tokenizer = train_tokenizer(_render_texts(rows), new.vocab_size)
    return _build_new_model(new, tokenizer).to(device), tokenizer


def _render_texts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The conversations as text, from which a new tokenizer is learned."""
    renderer = build_untrained_tokenizer()
    for index in range(0, len(rows), max(1, len(rows) // _MAX_TOKENIZER_ROWS)):
        row = rows[index]
        yield render_conversation(renderer, row["messages"], row.get("tools"), f"row {index + 1}")


def _build_new_model(config: NewModelConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A Qwen2 model with random weights.

    The output head is not tied to the embeddings: vLLM on CPU keeps a tied head's old
    weights when weights are reloaded.
    """
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_heads,
            max_position_embeddings=config.max_model_len,
            initializer_range=config.initializer_range,
            tie_word_embeddings=False,
            use_sliding_window=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _encode_rows(
    config: SftConfig,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[Mapping[str, Any]],
    check_stop: CheckStop,
) -> list[EncodedRow]:
    encoded = []
    shows_tools = False
    for number, row in enumerate(rows, start=1):
        check_stop()
        where = f"{config.dataset.path}, row {number}"
        if row.get("tools") and not shows_tools:
            check_tools_shown(tokenizer, row["tools"], where)
            shows_tools = True
        one = encode_conversation(tokenizer, row["messages"], row.get("tools"), where)
        if len(one.input_ids) > config.train.max_row_tokens:
            raise DatasetError(
                f"{where}: {len(one.input_ids)} tokens, and train.max_row_tokens is "
                f"{config.train.max_row_tokens}. Shorten the conversation, or type "
                f"train.max_row_tokens={len(one.input_ids)}"
            )
        encoded.append(one)
    return encoded


def _train(
    model: PreTrainedModel,
    rows: Sequence[EncodedRow],
    config: SftConfig,
    observer: Observer,
    check_stop: CheckStop,
) -> None:
    train = config.train
    rng = random.Random(config.seed) if config.dataset.shuffle else None
    epochs = (build_batches(rows, train.batch_tokens, rng) for _ in range(train.num_epochs))
    batches = list(itertools.chain.from_iterable(epochs))
    # Divided by each batch's own count, a token of a short answer would weigh several times one
    # of a long answer, for rows of one length share a batch: how often the model gives short
    # answers would then not be how often the demonstrations do.
    mean_scored = sum(map(_count_scored, rows)) * train.num_epochs / len(batches)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        weight_decay=train.weight_decay,
        fused=True,
    )
    model.train()
    observer.on_stage("warm start", total=len(batches))
    for index, batch in enumerate(batches):
        check_stop()
        for group in optimizer.param_groups:
            group["lr"] = compute_learning_rate(train, index, len(batches))
        with torch.autocast(
            model.device.type, torch.bfloat16, enabled=config.model.dtype == "bfloat16"
        ):
            summed = compute_summed_loss(model, batch)
        loss = summed.item() / max(1, sum(map(_count_scored, batch)))
        if not math.isfinite(loss):
            raise RunError(
                f"the loss is {loss} at update {index + 1} of {len(batches)}: training "
                f"diverged. Type train.learning_rate={train.learning_rate / 10:g}, or more "
                "train.warmup_steps"
            )
        torch.autograd.backward(summed / mean_scored)
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        observer.on_progress(index + 1, f"loss {loss:.3f}")
    model.eval()


def compute_learning_rate(config: SftTrainConfig, index: int, num_updates: int) -> float:
    """The learning rate of update ``index`` (from 0): linear warm-up, then half a cosine."""
    if index < config.warmup_steps:
        return config.learning_rate * (index + 1) / config.warmup_steps
    progress = (index - config.warmup_steps) / max(1, num_updates - config.warmup_steps)
    height = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_learning_rate + height * (config.learning_rate - config.min_learning_rate)


def _count_scored(row: EncodedRow) -> int:
    """Tokens with a loss: a row's first token has nothing before it to be predicted from."""
    return sum(row.loss_mask[1:])


def compute_summed_loss(model: PreTrainedModel, batch: Sequence[EncodedRow]) -> Tensor:
    """Cross entropy summed over the assistant's tokens of the batch, in nats; a scalar.

    Rows are padded on the right: under a causal mask no real token sees the padding.
    """
    width = max(len(row.input_ids) for row in batch)
    input_ids = torch.zeros(len(batch), width, dtype=torch.long)
    targets = torch.full((len(batch), width), _IGNORED)
    for index, row in enumerate(batch):
        ids = torch.tensor(row.input_ids)
        input_ids[index, : len(ids)] = ids
        targets[index, : len(ids)] = torch.where(torch.tensor(row.loss_mask), ids, _IGNORED)
    next_ids = targets[:, 1:].to(model.device)
    scored = (next_ids != _IGNORED).any(dim=0).nonzero()[:, 0]
    logits = model(
        input_ids=input_ids[:, :-1].to(model.device), use_cache=False, logits_to_keep=scored
    ).logits
    chosen = next_ids[:, scored]
    return functional.cross_entropy(
        logits.float().flatten(0, 1), chosen.flatten(), ignore_index=_IGNORED, reduction="sum"
    )


def _save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path, dtype: str
) -> None:
    """Writes beside ``output`` and renames: the folder is complete or not there."""
    partial = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with without_progress_bars():
            model.to(getattr(torch, dtype)).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.replace(output)
    except OSError as error:
        raise RunError(
            f"output_path: {output} cannot be written: {error}. Free some space or type "
            "output_path=ANOTHER_FOLDER; nothing else was changed"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
