"""KVCacheLayout: how blocks of an engine's KV cache lie in memory, and of which model and build they are.

Made by the worker, given to both halves of a connector and to its store: blocks of one layout mean nothing in another,
so a connector refuses what differs before a byte of it is read. A value; no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLayout:
    """One tensor of a block.

    Attributes:
        names: of the layers that keep their keys and values in it.
        shape: of one block.
        strides: of one block, in elements.
        dtype: of its elements, as torch names it.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheLayout:
    """What two engines have to agree on before one reads the blocks of the other.

    Attributes:
        block_size: tokens per block.
        order: what the dimensions of a block are, keys and values among them, as the attention backend has them.
        layers: the tensors of a block, in the order in which blocks are read and written.
        groups: what each KV cache group keeps, in words.
        model: digest of the model's weights and configuration.
        build: version of Quire and of its kernels: another one may compute other bits.
    """

    block_size: int
    order: str
    layers: tuple[LayerLayout, ...]
    groups: tuple[str, ...]
    model: str
    build: str

    @property
    def digest(self) -> str:
        """64 hexadecimal digits, the same for equal layouts."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """One line, keys in order."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    def differences(self, other: KVCacheLayout) -> dict[str, tuple[Any, Any]]:
        """Field -> (here, there), of those that differ."""
        pairs = {one.name: (getattr(self, one.name), getattr(other, one.name)) for one in dataclasses.fields(self)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def check_same(self, other: KVCacheLayout, where: str) -> None:
        """Refuse blocks of another layout.

        Args:
            where: they are, for the message.

        Raises:
            ConfigError: some field differs; the message names each.
        """
        found = self.differences(other)
        if not found:
            return
        shown = "; ".join(
            f"{name}: {_short(here)} here, {_short(there)} there" for name, (here, there) in found.items()
        )
        raise ConfigError(
            f"KV blocks in {where} have another layout than this engine's ({shown})",
            hint="use the same model, settings and version of Quire for both, or another place",
            field="kv_transfer_config",
        )


def layout_from_json(text: str | bytes, where: str) -> KVCacheLayout:
    """What `to_json` wrote.

    Raises:
        ConfigError: it is not a layout; the message says `where`.
    """
    try:
        return msgspec.json.decode(text, type=KVCacheLayout)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{where} does not describe a KV cache layout: {error}", hint="give another place, or delete the file",
            field="kv_transfer_config",
        ) from None  # fmt: skip


def digest_of(values: Mapping[str, object]) -> str:
    """64 hexadecimal digits of plain values by name."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
