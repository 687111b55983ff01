"""vLLM servers: their client, and what is said to them and heard from them."""
