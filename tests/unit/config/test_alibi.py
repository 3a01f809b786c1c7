"""The slopes of ALiBi."""

from __future__ import annotations

import pytest

from quire.config.alibi import alibi_slopes


def test_a_power_of_two_gives_a_geometric_sequence():
    assert alibi_slopes(8) == tuple(2.0**-n for n in range(1, 9))
    assert alibi_slopes(1) == (2.0**-8,)
    assert alibi_slopes(4, max_bias=16.0) == (2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16)


@pytest.mark.parametrize("num_heads", [3, 12, 14, 71])
def test_other_numbers_of_heads_add_every_second_slope_of_the_next_power(num_heads: int):
    largest = 1 << (num_heads.bit_length() - 1)
    slopes = alibi_slopes(num_heads)
    assert slopes[:largest] == alibi_slopes(largest)
    assert slopes[largest:] == alibi_slopes(2 * largest)[::2][: num_heads - largest]
    assert len(set(slopes)) == num_heads
