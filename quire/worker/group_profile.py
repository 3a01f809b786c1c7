"""Profiles of several ranks: rank 0 tells the others when to record, and gathers what they did into one trace.

Messages come between those of steps, so that all ranks begin and end at the same one. Clocks of one machine are one
clock; those of others are set by the moment at which all ranks leave a barrier, when the recording begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec

from quire.config.profiler import ProfilerConfig
from quire.distributed.communicator import Communicator
from quire.logger import get_logger
from quire.worker.device.recording import FORWARD, Event, Recording
from quire.worker.group_bytes import MAX_BYTES, receive_bytes, send_bytes
from quire.worker.group_lead import GroupLead
from quire.worker.group_messages import ProfileSteps

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

logger = get_logger(__name__)


class RankEvents(msgspec.Struct, frozen=True):
    """What a rank recorded.

    Attributes:
        machine: which clock its times are of.
        begun_us: when it left the barrier at which all began.
    """

    machine: str
    begun_us: float
    events: list[Event]


class GroupProfile:
    """One rank's side.

    Args:
        communicator: between all ranks.
        config: None = no profiles are taken.
        record: makes a recording of this rank.
        lead: rank 0's way to the others.
    """

    def __init__(
        self,
        communicator: Communicator,
        config: ProfilerConfig | None,
        record: Callable[[ProfilerConfig, int], Recording],
        lead: GroupLead,
    ) -> None:
        self._communicator = communicator
        self._config = config
        self._record = record
        self._lead = lead
        self._begun_us = 0.0
        self.recording: Recording | None = None

    # --- rank 0 ---

    def begin(self) -> None:
        """The other ranks record from the next step on."""
        with self._lead.together("a profile"):
            self._lead.send(ProfileSteps(""))
            self._meet()

    def gather(self, name: str) -> list[Event]:
        """The other ranks stop: what they recorded, by this rank's clock.

        Args:
            name: of the profile's files, without their ends.
        """
        found: list[Event] = []
        with self._lead.together("a profile"):
            self._lead.send(ProfileSteps(name))
            self._lead.take_all()
            for rank in range(1, self._communicator.size):
                body = receive_bytes(self._communicator, rank, "a profile")
                of_rank = msgspec.msgpack.decode(body, type=RankEvents)
                shift = 0.0 if of_rank.machine == _machine() else self._begun_us - of_rank.begun_us
                for event in of_rank.events:
                    if "ts" in event:
                        event["ts"] += shift
                found += of_rank.events
        return found

    # --- the others ---

    def follow(self, message: ProfileSteps) -> None:
        """Begin, or end and send what was recorded."""
        assert self._config is not None, "rank 0 has the same settings"
        rank = self._communicator.rank
        if not message.name:
            self.recording = self._record(self._config, rank)
            self._meet()
            return
        recording, self.recording = self.recording, None
        assert recording is not None, "a profile has begun"
        recording.stop()
        folder = Path(self._config.torch_profiler_dir).expanduser()
        try:
            recording.write_torch(folder / f"{message.name}.rank{rank}.torch.json")
        except OSError as error:
            logger.error("rank %d: torch's profile cannot be written: %s", rank, error)
        body = msgspec.msgpack.encode(RankEvents(_machine(), self._begun_us, list(recording.events())))
        if len(body) > MAX_BYTES:
            logger.error("rank %d: its profile of %d bytes is too large to be sent", rank, len(body))
            body = msgspec.msgpack.encode(RankEvents(_machine(), self._begun_us, []))
        send_bytes(self._communicator, body)

    def note_forward(self, start_ns: int, num_tokens: int) -> None:
        """A step that began at `start_ns` was computed here."""
        if self.recording is not None:
            self.recording.note(FORWARD, start_ns, {"tokens": num_tokens})

    def _meet(self) -> None:
        self._communicator.barrier()
        self._begun_us = time.perf_counter_ns() / 1e3


@cache
def _machine() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
