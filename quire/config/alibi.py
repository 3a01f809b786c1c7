"""ALiBi: positions as a slope per head. Called by model families, whose layers carry the slopes. Pure."""

from __future__ import annotations


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """The slope of each head: a geometric sequence that ends at 2 ** -max_bias where num_heads is a power of two.

    Otherwise the heads past the largest power of two below it take every second slope of the next power of two.

    Source: Press et al. 2022 (ALiBi), section 3, and its reference code for other numbers of heads.
    """
    largest = 1 << (num_heads.bit_length() - 1)

    def slopes(count: int) -> list[float]:
        return [2.0 ** (-max_bias * (head + 1) / count) for head in range(count)]

    return tuple(slopes(largest) + slopes(2 * largest)[::2][: num_heads - largest])
