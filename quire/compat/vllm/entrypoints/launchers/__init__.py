"""vLLM's `entrypoints.launchers`."""
