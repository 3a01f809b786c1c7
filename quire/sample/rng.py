"""Counter-based random numbers: a draw is a pure function of (request seed, position in the sequence).

Called by the sampler. Owns no state, so a draw cannot depend on the batch, the row, the device, preemption or a
restart. Philox4x32-10 is used because it is specified bit for bit, has published known answers, and is cheap
in any kernel language. Only one number per sampled token is needed (the draw is by inverse CDF), so it runs on
the host.
"""

from __future__ import annotations

import numpy as np

# Uses of (seed, position), each with numbers of its own.
STREAM_SAMPLE = 0  # the token itself
STREAM_DRAFT = 1  # a draft, by the proposer that draws it
STREAM_ACCEPT = 2  # whether a draft stands
STREAM_RESIDUAL = 3  # the token in the place of a draft that does not
_NUM_STREAMS = 4

_ROUNDS = 10
_WORD = np.uint64(0xFFFFFFFF)
_BITS_32 = np.uint64(32)
# Multipliers of counter words (0, 2); the products feed words (2, 0), hence the flips below.
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)


def philox4x32(key: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox on n counters.

    Args:
        key: [2, n] uint64 holding 32-bit words.
        counter: [4, n] uint64 holding 32-bit words.

    Returns:
        [4, n] uint64 holding 32-bit words, uniform and independent between distinct (key, counter).

    Source: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
    """
    even, odd = counter[0::2], counter[1::2]  # words (0, 2) and (1, 3)
    for _ in range(_ROUNDS):
        product = (even * _MULTIPLIERS)[::-1]
        even, odd = (product >> _BITS_32) ^ odd ^ key, product & _WORD
        key = (key + _WEYL) & _WORD
    return np.stack((even[0], odd[0], even[1], odd[1]))


def attempt(stream: int, num_before: np.ndarray) -> np.ndarray:
    """[n] streams of drafts that have `num_before` ([n] integers) drafts before them in their step.

    Of block verification alone. A position may be drafted in several steps, each time behind fewer drafts. Block
    verification looks at the numbers of drafts that it then drops, so the next step must not see these again.
    """
    streams: np.ndarray = stream + _NUM_STREAMS * num_before
    return streams


def uniform(seeds: np.ndarray, positions: np.ndarray, stream: int | np.ndarray = STREAM_SAMPLE) -> np.ndarray:
    """One uniform number per (seed, position).

    Args:
        seeds: [n] uint64; keys of the requests.
        positions: [n] integers >= 0; index in its sequence of the token to be drawn.
        stream: which of the independent numbers of (seed, position), in [0, 2**32); one for all, or [n].

    Returns:
        [n] float64 in [0, 1), of 53 random bits.
    """
    seed, position = seeds.astype(np.uint64, copy=False), positions.astype(np.uint64)
    key = np.stack((seed & _WORD, seed >> _BITS_32))
    zeros = np.zeros_like(position)
    counter = np.stack((position & _WORD, position >> _BITS_32, zeros + np.asarray(stream, dtype=np.uint64), zeros))
    words = philox4x32(key, counter)
    mantissa = (words[0] << np.uint64(21)) | (words[1] >> np.uint64(11))
    uniforms: np.ndarray = mantissa.astype(np.float64) * 2.0**-53
    return uniforms
