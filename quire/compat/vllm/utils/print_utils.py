"""vLLM's `utils.print_utils`."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["print_embeddings"]


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first four numbers, and how many there are."""
    shown = ", ".join(str(one) for one in embeds[:4])
    print(f"{prefix}: [{shown}{', ...' if len(embeds) > 4 else ''}] (size={len(embeds)})")
