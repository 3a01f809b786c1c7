"""Which rank has which experts of a mixture, where whole experts are placed on ranks. Pure but for reading a file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire.errors import ConfigError

FIELD = "expert_placement_strategy"
STRATEGIES = ("linear", "round_robin")
MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The experts of a layer in slots, those of rank 0 first.

    Attributes:
        slots: of each expert; None = that of its own number.
        firsts: first slot of each rank; the last is the number of experts.
    """

    slots: tuple[int, ...] | None
    firsts: tuple[int, ...]

    def own(self, rank: int) -> tuple[int, ...]:
        """The experts of a rank, by slot."""
        slots = range(self.firsts[rank], self.firsts[rank + 1])
        if self.slots is None:
            return tuple(slots)
        expert_of = {slot: expert for expert, slot in enumerate(self.slots)}
        return tuple(expert_of[slot] for slot in slots)


def place_experts(strategy: str, num_experts: int, num_ranks: int) -> ExpertPlacement:
    """The placement of a layer's experts.

    Args:
        strategy: "linear" = consecutive experts, "round_robin" = in turns; else a JSON file, the rank of each expert.

    Raises:
        ConfigError: the file cannot be used, or a rank has no expert.
    """
    if strategy == "linear":
        least, more = divmod(num_experts, num_ranks)
        ranks = [rank for rank in range(num_ranks) for _ in range(least + (rank < more))]
    elif strategy == "round_robin":
        ranks = [expert % num_ranks for expert in range(num_experts)]
    else:
        ranks = _read(Path(strategy).expanduser(), num_experts, num_ranks)
    counts = [ranks.count(rank) for rank in range(num_ranks)]
    if 0 in counts:
        raise _error(
            f"rank {counts.index(0)} has none of {num_experts} experts", "use fewer ranks, or place some there"
        )
    firsts = tuple(sum(counts[:rank]) for rank in range(num_ranks + 1))
    return ExpertPlacement(_slots(ranks), firsts)


class ExpertPlaces:
    """The placements of a model's layers, made once for each number of experts.

    Attributes:
        key: what else the weights of a rank depend on: the strategy, or what its file says.
    """

    def __init__(self, strategy: str, num_ranks: int) -> None:
        self._strategy = strategy
        self._num_ranks = num_ranks
        self._made: dict[int, ExpertPlacement] = {}
        self.key = strategy
        if strategy not in STRATEGIES:
            self.key = hashlib.sha256(Path(strategy).expanduser().read_bytes()).hexdigest()

    def of(self, num_experts: int) -> ExpertPlacement:
        """As `place_experts`."""
        if num_experts not in self._made:
            self._made[num_experts] = place_experts(self._strategy, num_experts, self._num_ranks)
        return self._made[num_experts]


def _slots(ranks: Sequence[int]) -> tuple[int, ...] | None:
    order = sorted(range(len(ranks)), key=lambda expert: ranks[expert])  # of one rank: by number
    slots = [0] * len(ranks)
    for slot, expert in enumerate(order):
        slots[expert] = slot
    return None if slots == list(range(len(ranks))) else tuple(slots)


def _read(path: Path, num_experts: int, num_ranks: int) -> list[int]:
    hint = f"use {', '.join(STRATEGIES)}, or a JSON file like [0, 0, 1, 1] with a rank for each expert"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _error(f"{path} is larger than {MAX_BYTES} bytes", hint)
        ranks = msgspec.json.decode(path.read_bytes(), type=list[int])
    except (OSError, ValueError) as error:
        raise _error(f"{path} cannot be read: {error}", hint) from None
    except msgspec.MsgspecError as error:
        raise _error(f"{path} is not a list of ranks: {error}", hint) from None
    if len(ranks) != num_experts:
        raise _error(f"{path} has {len(ranks)} ranks for {num_experts} experts", hint)
    wrong = next((rank for rank in ranks if not 0 <= rank < num_ranks), None)
    if wrong is not None:
        raise _error(f"{path} names rank {wrong} of {num_ranks}", hint)
    return ranks


def _error(message: str, hint: str) -> ConfigError:
    return ConfigError(f"{FIELD}: {message}", hint=hint, field=FIELD)
