"""A storage back-end with SGLang's contract is hosted as it is; what it loses or mixes up is never used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.config.kv_transfer import KVTransferConfig
from quire.errors import ConfigError
from quire.kv_transfer.block_files import DamagedBlockError
from quire.kv_transfer.conformance import check_connector
from quire.kv_transfer.connector import KVConnectorRole
from quire.kv_transfer.hicache import HiCacheBlocks, HiCacheConnector, HiCacheStorageConfig
from tests.unit.kv_transfer.test_block_files import BLOCK, NAME, OTHER, SHAPES
from tests.unit.kv_transfer.test_layout import LAYOUT

KEPT: dict[str, torch.Tensor] = {}


class Backend:
    """The calls of `HiCacheStorage`, with the values in a dictionary."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        assert (storage_config.tp_rank, storage_config.tp_size, storage_config.is_mla_model) == (0, 1, False)
        self.colour = storage_config.extra_config.get("colour")

    def exists(self, key: str) -> bool:
        return key in KEPT

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        if key not in KEPT:
            return None
        return target_location.copy_(KEPT[key])  # type: ignore[no-any-return]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        KEPT[key] = value.clone()
        return True


class Broken(Backend):
    def exists(self, key: str) -> bool:
        raise RuntimeError("no connection")


def config(**extra: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector="HiCacheConnector", kv_connector_extra_config=extra)


@pytest.fixture(autouse=True)
def empty() -> None:
    KEPT.clear()


@pytest.fixture
def blocks() -> HiCacheBlocks:
    extra = {"storage_module_path": __name__, "storage_class": "Backend", "storage_extra_config": {"colour": "red"}}
    blocks = HiCacheConnector(config(**extra), KVConnectorRole.WORKER, LAYOUT).open_storage()
    assert blocks._backend.colour == "red"
    blocks.store(NAME, BLOCK)
    return blocks


def test_it_keeps_the_contract_of_connectors():
    assert check_connector(config(storage_module_path=__name__, storage_class="Backend")) == {}


def test_a_block_comes_back_as_it_was_and_no_other_one(blocks):
    assert blocks.num_first([NAME, OTHER]) == 1
    assert all(np.array_equal(part, whole) for part, whole in zip(blocks.load(NAME, SHAPES), BLOCK, strict=True))
    with pytest.raises(OSError, match="is not in the storage"):
        blocks.load(OTHER, SHAPES)


def test_changed_and_mixed_up_values_are_noticed(blocks):
    key, value = next(iter(KEPT.items()))
    for position in range(len(value)):
        KEPT[key] = value.clone()
        KEPT[key][position] ^= 1
        with pytest.raises(DamagedBlockError):
            blocks.load(NAME, SHAPES)
    blocks.store(OTHER, BLOCK)
    KEPT[key] = KEPT[next(one for one in KEPT if one != key)]
    with pytest.raises(DamagedBlockError):
        blocks.load(NAME, SHAPES)


def test_whatever_a_backend_raises_is_a_failed_lookup():
    with pytest.raises(OSError, match="RuntimeError: no connection"):
        HiCacheBlocks(Broken(HiCacheStorageConfig()), LAYOUT).num_first([NAME])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "needs storage_module_path and storage_class"),
        ({"storage_module_path": "/tmp/x.py", "storage_class": "Backend"}, "needs storage_module_path"),
        ({"storage_module_path": __name__, "storage_class": "KEPT"}, "it lacks set, exists"),
        ({"storage_module_path": __name__, "storage_class": "Absent"}, "has no 'Absent'"),
    ],
)
def test_what_is_not_a_backend_is_refused(extra, message):
    with pytest.raises(ConfigError, match=message):
        HiCacheConnector(config(**extra), KVConnectorRole.WORKER, LAYOUT)
