"""vLLM's `entrypoints.serve`."""
