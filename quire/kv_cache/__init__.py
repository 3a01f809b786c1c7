"""Paged KV cache, control plane: which request owns which block, which blocks hold which prefix. No torch."""
