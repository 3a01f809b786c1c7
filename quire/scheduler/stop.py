"""Which requests end with the token they were just given.

Called by the scheduler's update. Pure functions over rows; only rows with stop ids of their own are looped over.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.core.engine_messages import FinishReason
from quire.scheduler.request_table import RequestTable, RowFlag

# A plain integer: operators of flag types cost as much as a small array's.
_HAS_STOP_IDS = int(RowFlag.HAS_STOP_IDS)


class Stop(NamedTuple):
    """One request that ends: its row, why, and the stop id that matched."""

    row: int
    reason: FinishReason
    stop_token_id: int | None = None


def find_stops(table: RequestTable, rows: np.ndarray, token_ids: np.ndarray) -> list[Stop]:
    """Requests that end now, in the order of `rows`. The first that holds decides:

    1. the token is EOS, and at least `min_tokens` are out: STOP;
    2. the token is a stop id, and at least `min_tokens` are out: STOP with that id;
    3. the length limit is reached: LENGTH.

    Args:
        table: lengths and limits; the tokens are appended already.
        rows: [num_sampled] rows.
        token_ids: [num_sampled] the newest token of each.
    """
    is_eos = token_ids == table.eos_token_id[rows]
    is_full = table.num_tokens[rows] >= table.max_total_tokens[rows]
    is_stop_id = _is_own_stop_id(table, rows, token_ids)
    stops = []
    for i in (is_eos | is_stop_id | is_full).nonzero()[0].tolist():
        row = int(rows[i])
        may_stop = table.num_tokens[row] >= table.min_total_tokens[row]
        if may_stop and is_eos[i]:
            stops.append(Stop(row, FinishReason.STOP))
        elif may_stop and is_stop_id[i]:
            stops.append(Stop(row, FinishReason.STOP, int(token_ids[i])))
        elif is_full[i]:
            stops.append(Stop(row, FinishReason.LENGTH))
    return stops


def may_stop(table: RequestTable, rows: np.ndarray, token_ids: np.ndarray, turns: np.ndarray) -> bool:
    """Whether some of these tokens, which are not appended yet, ends its request.

    Args:
        rows, token_ids: [num_sampled] several tokens of each row.
        turns: [num_sampled] how many of its row come before each.
    """
    is_eos = token_ids == table.eos_token_id[rows]
    is_full = table.num_tokens[rows] + turns >= table.max_total_tokens[rows] - 1
    return bool(np.count_nonzero(is_eos | is_full | _is_own_stop_id(table, rows, token_ids)))


def _is_own_stop_id(table: RequestTable, rows: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """[num_sampled] bool; the slow path of rows flagged HAS_STOP_IDS."""
    matches = np.zeros(len(rows), dtype=np.bool_)
    (flagged,) = (table.flags[rows] & _HAS_STOP_IDS).nonzero()
    if not len(flagged):
        return matches
    for i, row, token_id in zip(flagged.tolist(), rows[flagged].tolist(), token_ids[flagged].tolist(), strict=True):
        matches[i] = token_id in table.request_on(row).stop_token_ids
    return matches
