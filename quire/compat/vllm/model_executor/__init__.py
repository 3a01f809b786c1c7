"""vLLM's `model_executor`."""
