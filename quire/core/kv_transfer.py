"""Blocks that travel between the KV cache and a tier behind it (another process, a disk, a dictionary), as messages.

Made by the scheduler's half of a tier, carried out by the worker's half, reported back with a later step. A swap, whose
host blocks the scheduler numbers itself, has `BlockCopies` of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Whole blocks that are loaded from a tier, or saved to it.

    Attributes:
        transfer_id: by which it is reported; unique within an engine core.
        keys: the tier's name of each block.
        block_ids: [num_pages] int32; the blocks of the cache. They belong to the transfer until it is reported.
        time_limit_s: seconds after which a load is to fail; None = there is no limit.
        is_async: no row reads or writes the blocks before it is reported; False = the step that carries it needs them.
            Of a save that means that others write them: they are copied before it computes, and nothing is reported.
        request_id: of the request that they are of (`Request.unique_id`).
        is_repeated: an earlier step that carried it failed; the worker may have begun it.
        tier: number of the tier, where there are several.
    """

    transfer_id: int
    keys: tuple[bytes, ...]
    block_ids: np.ndarray
    is_async: bool = True
    time_limit_s: float | None = None
    request_id: str = ""
    is_repeated: bool = False
    tier: int = 0


@dataclass(frozen=True, slots=True)
class ConnectorMessage:
    """What the scheduler's half of a connector sends to the worker's half with one step.

    Attributes:
        metadata: the connector's own value, from `build_connector_meta`; None = it has nothing to say.
        finished_req_ids: requests that have ended since the last message.
        has_failed: the connector could not make its metadata; transfers that come with it never begin.
    """

    metadata: Any = None
    finished_req_ids: frozenset[str] = frozenset()
    has_failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConnectorOutput:
    """What the worker's half of a connector reports after one step.

    Attributes:
        finished_sending: requests whose blocks were saved, as `request_finished` had announced.
        finished_recving: requests whose blocks were loaded.
        invalid_block_ids: blocks that could not be loaded.
        worker_meta: the connector's own value.
        stats: counts since the last report, by name.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()
    worker_meta: Any = None
    stats: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KVTransferMeta:
    """Transfers that begin with a step, before it computes.

    Attributes:
        connector: of a tier that is a connector, which reads the transfers out of it.
    """

    loads: tuple[BlockTransfer, ...] = ()
    saves: tuple[BlockTransfer, ...] = ()
    connector: ConnectorMessage | None = None

    def __bool__(self) -> bool:
        return bool(self.loads or self.saves or self.connector)


@dataclass(frozen=True, slots=True)
class KVTransferResults:
    """Ids of transfers that have ended since the last report; blocks of a failed load hold anything.

    Attributes:
        connector: of a tier that is a connector: its own report.
    """

    done: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    connector: KVConnectorOutput | None = None
