"""Drafts from history by suffix automata in C++. Called by proposers of the control plane, so torch stays out.

Reference: kernels/reference/histories.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.errors import ShapeError
from quire.kernels.histories import (
    MAX_CONTEXT,
    MIN_STORE_BYTES,
    HistoryDrafts,
    HistoryLimits,
    HistoryRows,
    HistoryStats,
)
from quire.kernels.native.library import load_library

MAX_DRAFTS = 1 << 24  # of all rows of a call


class NativeHistories:
    """`Histories` of the native library.

    Raises:
        NativeLibraryError: the library cannot be loaded.
        ShapeError: limits outside of their ranges; in calls, arrays that are not what `HistoryRows` says.

    Cost: of a token that is indexed, 5 edges and links where nothing repeats, and `max_context` + 5 where all does; of
    a draft, one state. Memory: 33 to 116 bytes a token in texts of one token, of two, and of none twice.
    """

    def __init__(self, limits: HistoryLimits) -> None:
        _check_range("max_context", limits.max_context, 1, MAX_CONTEXT)
        _check_range("max_indexed_tokens", limits.max_indexed_tokens, 1, 1 << 40)
        _check_range("max_store_bytes", limits.max_store_bytes, MIN_STORE_BYTES, 1 << 46)
        _check_range("max_store_answers", limits.max_store_answers, 0, 1 << 31)
        self._max_context = limits.max_context
        self._library: Any = load_library()
        self._native: Any = self._library.Histories(
            limits.max_context, limits.max_indexed_tokens, limits.max_store_bytes, limits.max_store_answers
        )

    def begin(self, handle: int, namespace: bytes) -> None:
        """As `Histories.begin`."""
        self._native.begin(handle, namespace)

    def propose_ngram(self, rows: HistoryRows, min_length: int, max_length: int) -> HistoryDrafts:
        """As `Histories.propose_ngram`."""
        _check_range("max_length", max_length, 1, self._max_context)
        _check_range("min_length", min_length, 1, max_length)
        return self._propose(self._native.propose_ngram, rows, min_length, max_length)

    def propose_suffix(self, rows: HistoryRows, max_spec_factor: float, min_token_prob: float) -> HistoryDrafts:
        """As `Histories.propose_suffix`."""
        if not (0.0 <= max_spec_factor <= 1e6 and 0.0 <= min_token_prob <= 1.0):  # NaN is neither
            raise ShapeError(
                f"max_spec_factor={max_spec_factor}, min_token_prob={min_token_prob}: expected 0 to 1e6 and 0 to 1",
                field="max_spec_factor",
            )
        return self._propose(self._native.propose_suffix, rows, max_spec_factor, min_token_prob)

    def end(self, handle: int, answer: np.ndarray) -> None:
        """As `Histories.end`."""
        self._native.end(handle, _address("answer", answer, np.int32, (len(answer),)), len(answer))

    def stats(self) -> HistoryStats:
        """As `Histories.stats`."""
        native = self._native.stats()
        return HistoryStats(**{name: getattr(native, name) for name in HistoryStats.__dataclass_fields__})

    def _propose(self, propose: Any, rows: HistoryRows, *rule: float) -> HistoryDrafts:
        num_rows = len(rows.rows)
        if rows.token_ids.ndim != 2:
            raise ShapeError(f"token_ids has {rows.token_ids.ndim} dimensions, expected 2", field="token_ids")
        most = int(rows.max_tokens.sum(dtype=np.int64))
        _check_range("sum of max_tokens", most, 0, MAX_DRAFTS)
        counts, match_lengths = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
        token_ids, scores = np.empty(most, np.int32), np.empty(most, np.float32)
        native_rows = self._library.HistoryRows(
            _address("rows", rows.rows, np.int64, (num_rows,)),
            _address("handles", rows.handles, np.int64, (num_rows,)),
            _address("num_tokens", rows.num_tokens, np.int32, (num_rows,)),
            _address("max_tokens", rows.max_tokens, np.int32, (num_rows,)),
            _address("token_ids", rows.token_ids, np.int32, rows.token_ids.shape),
            num_rows,
            *rows.token_ids.shape,
        )
        drafts = self._library.DraftArrays(
            counts.ctypes.data, match_lengths.ctypes.data, token_ids.ctypes.data, scores.ctypes.data, most
        )
        try:
            propose(native_rows, drafts, *rule)
        except ValueError as cause:
            raise ShapeError(str(cause), field="rows") from cause
        num_drafts = int(counts.sum())
        return HistoryDrafts(counts, token_ids[:num_drafts], scores[:num_drafts], match_lengths)


def _check_range(name: str, value: int, smallest: int, largest: int) -> None:
    if not smallest <= value <= largest:
        raise ShapeError(f"{name} is {value}, expected {smallest} to {largest}", field=name)


def _address(name: str, array: np.ndarray, dtype: type[np.generic], shape: tuple[int, ...]) -> int:
    """Of `array`, which is what is expected."""
    is_plain = array.flags.c_contiguous and array.flags.aligned
    if array.shape != shape or array.dtype != dtype or not is_plain:
        raise ShapeError(
            f"{name} is {array.dtype} {list(array.shape)} with strides {array.strides}, "
            f"expected aligned, contiguous {np.dtype(dtype)} {list(shape)}",
            field=name,
        )
    return array.ctypes.data
