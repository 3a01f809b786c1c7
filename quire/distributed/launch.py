"""Launch: this process's place among those that torchrun, srun or mpirun have started, from their variables. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.errors import ConfigError

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HINT = (
    "start the script with 'torchrun --nproc-per-node N script.py', or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR "
    "and MASTER_PORT for each process (srun: RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS)"
)
MAX_NAME = 255  # of a machine, in DNS


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One of the processes that a launcher has started, which all run the same script.

    Attributes:
        rank: of this process among all.
        world_size: number of all.
        local_rank: of this process among those of its machine; None = the launcher does not say.
        local_size: number of those; None = the launcher does not say.
        address, port: where rank 0 can be found.
        group_size: ranks of one engine; consecutive ones are a group, and each group is a replica.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_size: int | None
    address: str
    port: int
    group_size: int

    @property
    def group(self) -> int:
        """The engine that this process is a rank of."""
        return self.rank // self.group_size

    @property
    def group_rank(self) -> int:
        """Its rank there."""
        return self.rank % self.group_size


def read_launch(variables: Mapping[str, str], group_size: int, num_groups: int, sizes: str) -> Launch:
    """The launch that the variables describe.

    Args:
        group_size: ranks of an engine.
        num_groups: engines, which share nothing.
        sizes: the settings that say so, with their values, for messages.

    Raises:
        ConfigError: a variable is missing or wrong, and is named.
    """
    missing = [name for name in REQUIRED if not variables.get(name)]
    if missing:
        names = ", ".join(missing)
        raise ConfigError(
            f"distributed_executor_backend='external_launcher' needs what a launcher sets in the environment: {names} "
            f"{'is' if len(missing) == 1 else 'are'} missing", hint=HINT, field=missing[0],
        )  # fmt: skip
    needed = group_size * num_groups
    world_size = _number(variables, "WORLD_SIZE", 1, 1 << 20)
    if world_size != needed:
        raise ConfigError(
            f"WORLD_SIZE is {world_size}, and {sizes} needs {needed} process{'es' * (needed > 1)}",
            hint=f"start {needed}, or change the sizes: their product is the number of processes", field="WORLD_SIZE",
        )  # fmt: skip
    rank = _number(variables, "RANK", 0, world_size - 1)
    local_rank = _number(variables, "LOCAL_RANK", 0, rank) if variables.get("LOCAL_RANK") else None
    local_size = None
    if local_rank is not None and variables.get("LOCAL_WORLD_SIZE"):
        local_size = _number(variables, "LOCAL_WORLD_SIZE", local_rank + 1, world_size)
    address = variables["MASTER_ADDR"]
    if len(address) > MAX_NAME or not address.isprintable() or " " in address:
        raise ConfigError(f"MASTER_ADDR={address[:80]!r} is not the name of a machine", hint=HINT, field="MASTER_ADDR")
    return Launch(
        rank=rank, world_size=world_size, local_rank=local_rank, local_size=local_size, address=address,
        port=_number(variables, "MASTER_PORT", 1, 65535), group_size=group_size,
    )  # fmt: skip


def _number(variables: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = variables[name]
    if not text.isascii() or not text.isdecimal() or not least <= int(text[:20]) <= most:
        raise ConfigError(f"{name}={text[:40]!r} is not a number from {least} to {most}", hint=HINT, field=name)
    return int(text)
