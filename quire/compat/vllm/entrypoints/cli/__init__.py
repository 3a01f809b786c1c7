"""vLLM's `entrypoints.cli`."""
