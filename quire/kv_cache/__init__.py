"""Paged KV cache, control plane: which request owns which page, which pages hold which prefix. No torch."""
