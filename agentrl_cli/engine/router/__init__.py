"""Several engine servers as one engine that survives them."""
