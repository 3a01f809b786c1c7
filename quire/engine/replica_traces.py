"""The profiles of several replicas as one trace, with a process for each rank. Called where a profile is stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from quire.logger import get_logger

RANKS_OF_REPLICA = 1000
"""A replica's processes have numbers from its own times this."""

logger = get_logger(__name__)


def merge_traces(files: Mapping[int, Path]) -> Path | None:
    """Write the traces of replicas, by their numbers, as one, in whose place they go; None where there are none.

    Raises:
        OSError: one cannot be read, or the merged one not be written.
    """
    if not files:
        return None
    merged: list[dict[str, Any]] = []
    for index, path in sorted(files.items()):
        for event in msgspec.json.decode(path.read_bytes())["traceEvents"]:
            event["pid"] += RANKS_OF_REPLICA * index
            if event["name"] == "process_name":
                event["args"]["name"] = f"replica {index} {event['args']['name']}"
            merged.append(event)
    first = files[min(files)]
    target = first.with_name(f"{first.stem.partition('-steps')[0]}-of-{len(files)}-replicas.json")
    target.write_bytes(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": merged}))
    for path in files.values():
        path.unlink()
    logger.info("profile of %d replicas: %s", len(files), target)
    return target
