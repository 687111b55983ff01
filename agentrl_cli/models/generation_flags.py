"""How a model's own generation flags are kept from ending a run when it is saved."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedModel


def make_savable(model: PreTrainedModel) -> PreTrainedModel:
    """``model``, whose generation flags no longer contradict each other.

    Some on the hub do (a temperature, and no sampling). transformers loads them with a warning
    and refuses to save them, which would end a run at its first checkpoint. agentrl samples by
    ``gconfig``, so the flags count for those who use the trained model alone.
    """
    flags = model.generation_config
    if flags is None or _is_valid(flags):
        return model
    flags.do_sample = True
    if not _is_valid(flags):
        end_ids = {"eos_token_id": flags.eos_token_id, "bos_token_id": flags.bos_token_id}
        model.generation_config = GenerationConfig(**end_ids)
    return model


def _is_valid(flags: GenerationConfig) -> bool:
    try:
        flags.validate(strict=True)
    except ValueError:
        return False
    return True
