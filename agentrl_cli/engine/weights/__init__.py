"""How new weights reach engine servers: through files, as LoRA adapters, or over NCCL."""
