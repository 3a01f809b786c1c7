"""vLLM's `usage`."""
