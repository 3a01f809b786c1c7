"""vLLM's `entrypoints.serve.utils`."""
