"""One engine core's weights replaced by others, with every request kept. Called by `WeightControls` and `Replicas`."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.core_launcher import CoreProcess
from quire.engine.supervisor import Supervisor
from quire.errors import QuireError, ValidationError


async def replace_weights(
    supervisor: Supervisor, launch: Callable[[], CoreProcess], version: str, timeout_s: float
) -> None:
    """End what runs, and go on with a core that `launch` starts; new requests wait meanwhile.

    What a paused core has cannot end: it goes on with the new weights.

    Raises:
        ValidationError: what runs did not end in time, and nothing has changed.
        QuireError: the core cannot be started; one with the old weights is.
    """
    if not supervisor.is_paused and not await supervisor.finish(timeout_s):
        raise ValidationError(
            f"requests did not end within {timeout_s:g} s; they run on with the old weights",
            hint="try again, or give more drain_timeout", field="drain_timeout",
        )  # fmt: skip
    await supervisor.rest()
    try:
        await supervisor.wake(launch, version)
    except QuireError:
        await supervisor.wake()
        raise
