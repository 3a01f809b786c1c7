"""vLLM's `v1.engine`."""
