"""HiCacheConnector: keeps blocks in a storage back-end written for SGLang's HiCache, which is used as it is.

The contract is that of `HiCacheStorage` (`exists` or `batch_exists`, `get`, `set`; SGLang, November 2026): a key and a
tensor of bytes. The class is one that the operator names; it is made with a configuration of the fields that back-ends
read. Each value begins with a checksum, so a back-end that loses or mixes up bytes costs a computation and no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.config.kv_transfer import FIELD, MODULE
from quire.errors import ConfigError
from quire.kv_transfer.block_values import key_of, pack, unpack, value_bytes
from quire.kv_transfer.layout import KVCacheLayout
from quire.kv_transfer.stored_blocks import StoredBlocks
from quire.plugins import import_object
from quire.utils.checks import shown


@dataclass(slots=True, kw_only=True)
class HiCacheStorageConfig:
    """What a back-end is made with: SGLang's fields of this name, for one rank of everything."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = True
    model_name: str | None = None
    dp_rank: int = 0
    dp_size: int = 1
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None
    extra_config: dict[str, Any] = field(default_factory=dict)


class HiCacheConnector(StoredBlocks):
    """Blocks in the back-end `storage_class` of module `storage_module_path`."""

    quire_contract = 1
    extra_config_keys = ("storage_module_path", "storage_class", "storage_extra_config", "model_name")

    def open_storage(self) -> HiCacheBlocks:
        """As `StoredBlocks`."""
        extra = self.config.kv_connector_extra_config
        module, name = extra.get("storage_module_path"), extra.get("storage_class")
        if not (isinstance(module, str) and MODULE.fullmatch(module) and isinstance(name, str) and name.isidentifier()):
            raise ConfigError(
                f"{FIELD}: {self.config.kv_connector} needs storage_module_path and storage_class, the module and name "
                f"of a HiCacheStorage; got {shown(module)} and {shown(name)}",
                hint="give a dotted module name and a class name", field=FIELD,
            )  # fmt: skip
        kind = import_object(f"{module}:{name}", f"{FIELD}: storage_class {name!r} of {module}", FIELD)
        missing = [call for call in ("get", "set", "exists") if not callable(getattr(kind, call, None))]
        if missing:
            raise ConfigError(
                f"{FIELD}: {name} of {module} is not a HiCacheStorage: it lacks {', '.join(missing)}",
                hint="name a class that is derived from SGLang's HiCacheStorage", field=FIELD,
            )  # fmt: skip
        more = dict(extra.get("storage_extra_config") or {})
        backend = kind(HiCacheStorageConfig(model_name=extra.get("model_name"), extra_config=more))
        return HiCacheBlocks(backend, self.layout)


class HiCacheBlocks:
    """Blocks in a back-end, as one value each.

    Args:
        backend: a `HiCacheStorage`; whatever it raises is an OSError here.
    """

    def __init__(self, backend: Any, layout: KVCacheLayout) -> None:
        self._backend = backend
        self._digest = layout.digest

    def num_first(self, names: Sequence[bytes]) -> int:
        """As `BlockStorage`."""
        keys = [self._key(name) for name in names]
        find = getattr(self._backend, "batch_exists", None)
        if find is not None:
            return int(self._call(find, keys))
        return next((i for i, key in enumerate(keys) if not self._call(self._backend.exists, key)), len(keys))

    def store(self, name: bytes, tensors: Sequence[np.ndarray]) -> None:
        """As `BlockStorage`."""
        import torch  # late, as below: the scheduler's half does without

        key = self._key(name)
        value = pack(key, tensors)
        if not self._call(self._backend.set, key, torch.from_numpy(value)):
            raise OSError(f"block {name.hex()[:16]}: the storage did not take it")

    def load(self, name: bytes, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """As `BlockStorage`."""
        import torch

        key = self._key(name)
        target = torch.zeros(value_bytes(shapes), dtype=torch.uint8)
        found = self._call(self._backend.get, key, target)
        if found is None:
            raise OSError(f"block {name.hex()[:16]} is not in the storage")
        return unpack(key, found.reshape(-1).view(torch.uint8).numpy(), shapes)

    def remove(self, name: bytes) -> None:
        """As `BlockStorage`; the contract has no such call: it is stored again when it is computed."""

    def _key(self, name: bytes) -> str:
        return key_of(self._digest, name)

    def _call(self, call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:  # a foreign class may raise anything
            raise OSError(f"{type(error).__name__}: {error}") from error
