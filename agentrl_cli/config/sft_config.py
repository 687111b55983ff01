"""The configuration of ``agentrl sft``: supervised training on conversations."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from agentrl_cli.config.config_schema import StrictConfig


class NewModelConfig(StrictConfig):
    """A new model of Qwen2's architecture, with a tokenizer learned from the dataset."""

    vocab_size: int = Field(1024, ge=300)
    """Maximum size of the vocabulary; a small dataset may give a smaller one."""
    hidden_size: int = Field(128, ge=8)
    intermediate_size: int = Field(384, ge=8)
    num_layers: int = Field(4, ge=1)
    num_heads: int = Field(4, ge=1)
    max_model_len: int = Field(8192, ge=64)
    """Maximum number of tokens of prompt and completion together."""
    initializer_range: float = Field(0.02, gt=0.0)
    """Standard deviation of the random weights; narrow models learn faster with more than
    the customary 0.02, near hidden_size ** -0.5."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} with num_heads {self.num_heads}: every head needs "
                "the same even width. Allowed: a hidden_size that is a multiple of "
                f"{2 * self.num_heads}"
            )
        return self


class SftModelConfig(StrictConfig):
    """What to start from: exactly one of ``path`` and ``new``."""

    path: str | None = None
    """Hub id, folder, or ``builtin:calculator``."""
    chat_template: str | None = None
    """As in an experiment: ``hermes-chatml``, or a Jinja file; null: the tokenizer's own. Only with
    ``path``: a new model gets a template that shows tools anyway."""
    new: NewModelConfig | None = None
    """The architecture of a model that starts from random weights."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Number type of the passes and of the saved weights; the optimizer works in float32."""

    @model_validator(mode="after")
    def _starts_from_one_thing(self) -> Self:
        if (self.path is None) == (self.new is None):
            found = "neither" if self.path is None else "both"
            raise ValueError(
                f"found {found} of path and new: give model.path to continue from a model, "
                "or model.new for a new one"
            )
        if self.new is not None and self.chat_template is not None:
            raise ValueError("chat_template goes with path alone. Type model.chat_template=null")
        return self


class SftDatasetConfig(StrictConfig):
    """Conversations: rows ``{"messages": [...], "tools": [...]}``, tools being optional."""

    path: str
    """A .jsonl file, or an import path ``module:function`` of a function that returns rows."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function."""
    shuffle: bool = True
    """A new order every epoch, from ``seed``; false: in the order of the rows, a curriculum."""
    limit: int | None = Field(None, ge=1)
    """Use the first ``limit`` rows only."""


class SftTrainConfig(StrictConfig):
    """How the model is updated; every token of the assistant weighs the same."""

    num_epochs: int = Field(1, ge=1)
    batch_tokens: int = Field(16384, ge=1)
    """Maximum number of tokens of one update, with padding; a longer row has one to itself."""
    max_row_tokens: int = Field(8192, ge=2)
    """Longer rows are refused."""
    learning_rate: float = Field(1.0e-5, gt=0.0)
    """Reached after ``warmup_steps``; a cosine then leads to ``min_learning_rate``."""
    min_learning_rate: float = Field(0.0, ge=0.0)
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0.0)
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    adam_beta2: float = Field(0.95, ge=0.0, lt=1.0)
    max_grad_norm: float = Field(1.0, gt=0.0)
    """Gradients are scaled down to this global norm."""
    device: Literal["cpu", "cuda"] | None = None
    """null: ``cuda`` where there is a GPU, ``cpu`` elsewhere."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads; null: all cores."""


class SftConfig(StrictConfig):
    """Everything ``agentrl sft`` needs."""

    output_path: str
    """The new folder that receives model and tokenizer, in Hugging Face format."""
    seed: int = Field(1, ge=0)
    model: SftModelConfig
    dataset: SftDatasetConfig
    train: SftTrainConfig = SftTrainConfig()
