"""Tool calls and reasoning, as each family of models writes them."""
