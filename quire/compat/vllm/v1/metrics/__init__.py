"""vLLM's `v1.metrics`."""
