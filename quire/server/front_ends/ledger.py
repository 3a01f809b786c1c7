"""Ledger: counts that front-end processes share, in memory that they share, changed under one lock.

Made by the owner of the front ends, opened by each of them. Each front end has a slot. What is in use is counted by
slot, so that the owner takes back what a front end held when it dies; buckets, which stay used, are written in a way
that a death between two words leaves the old value. The lock is the kernel's, on the file: it ends with its holder.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from enum import IntEnum
from types import TracebackType

from quire.errors import ConfigError

MAX_TENANTS = 1 << 16
MAX_TICKETS = 1 << 15
"""Requests that a front end runs at once: more than it can have connections."""
BUCKET_WORDS = 5
TICKET_WORDS = 5
IN_USE_WORDS = 3
FLOCK = "hhqqi4x"
"""struct flock of 64-bit Linux: type, whence, start, length, pid."""


class SlotWord(IntEnum):
    """Words of a slot."""

    NUM_TICKS = 0  # of its event loop
    NUM_CLOSED = 1  # connections that it was given and that are closed
    NUM_ANSWERS = 2
    NUM_TOKENS = 3
    PLACES = 4  # that it has taken
    WAITING_SINCE = 5  # since when its first prompt waits for places, nanoseconds; 0 = none does
    BODY_BYTES = 6
    TICKETS_END = 7  # no ticket is behind it
    COUNT = 8


class InUse(IntEnum):
    """What a tenant uses at a front end."""

    REQUESTS = 0
    ANSWERS = 1
    BODY_BYTES = 2


class Ledger:
    """The counts of all front ends.

    Args:
        fd: of the file, which stays open.
        num_slots: front ends.
        slot: of this process; None = it is the owner.
    """

    def __init__(self, fd: int, num_slots: int, slot: int | None = None) -> None:
        self.fd = fd
        self.num_slots = num_slots
        self.slot = -1 if slot is None else slot
        self.lock = LedgerLock(fd)
        self._numbers: dict[int, int] = {}  # of tenants, by the hash of their names
        self._row_words = 1 + 2 * BUCKET_WORDS + IN_USE_WORDS * num_slots
        self._tenants_at = 1 + SlotWord.COUNT * num_slots
        self._tickets_at = self._tenants_at + MAX_TENANTS * self._row_words
        size = 8 * (self._tickets_at + MAX_TICKETS * TICKET_WORDS * num_slots)
        if slot is None:
            os.ftruncate(fd, size)
        self._words = memoryview(mmap.mmap(fd, size)).cast("q")

    @staticmethod
    def create(num_slots: int) -> Ledger:
        """A new one, all zero. Most of its file is never written and takes no memory."""
        directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryFile(dir=directory) as file:
            return Ledger(os.dup(file.fileno()), num_slots)

    # --- slots ---

    def of_slot(self, word: SlotWord, slot: int | None = None) -> int:
        """A word of a slot; None = this process's."""
        return self._words[self._slot_at(self.slot if slot is None else slot) + word]

    def add(self, word: SlotWord, amount: int) -> None:
        """Count in this process's slot."""
        self._words[self._slot_at(self.slot) + word] += amount

    def set(self, word: SlotWord, value: int) -> None:
        """Write in this process's slot."""
        self._words[self._slot_at(self.slot) + word] = value

    def total(self, word: SlotWord) -> int:
        """Of all slots."""
        return sum(self._words[self._slot_at(slot) + word] for slot in range(self.num_slots))

    def others(self, word: SlotWord) -> list[int]:
        """Of the other slots."""
        return [self.of_slot(word, slot) for slot in range(self.num_slots) if slot != self.slot]

    def clear_slot(self, slot: int) -> None:
        """The owner: the front end of a slot has ended, and what it held is free.

        Needs no lock, as no other process writes there.
        """
        for ticket in range(self.of_slot(SlotWord.TICKETS_END, slot)):
            self._words[self._ticket_at(slot, ticket)] = 0
        for tenant in range(self._words[0]):
            start = self._in_use_at(tenant, slot)
            for word in range(IN_USE_WORDS):
                self._words[start + word] = 0
        for word in range(SlotWord.COUNT):
            self._words[self._slot_at(slot) + word] = 0

    # --- tenants ---

    def tenant(self, name: str) -> int:
        """The number of a tenant, which has one from then on.

        Raises:
            ConfigError: there were too many.
        """
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
        if key in self._numbers:
            return self._numbers[key]
        with self.lock:
            count = self._words[0]
            for number in range(len(self._numbers), count):  # others have added these
                self._numbers[self._words[self._tenant_at(number)]] = number
            if key in self._numbers:
                return self._numbers[key]
            if count == MAX_TENANTS:
                raise ConfigError(
                    f"this server has had {MAX_TENANTS} tenants, as many as its front ends can count",
                    hint="restart it", field="api_key_file",
                )  # fmt: skip
            self._words[self._tenant_at(count)] = key
            self._words[0] = count + 1
            self._numbers[key] = count
            return count

    def in_use(self, tenant: int, what: InUse) -> int:
        """What a tenant uses, of all front ends."""
        return sum(self._words[self._in_use_at(tenant, slot) + what] for slot in range(self.num_slots))

    def use(self, tenant: int, what: InUse, amount: int) -> None:
        """A tenant uses more, or less, at this front end."""
        self._words[self._in_use_at(tenant, self.slot) + what] += amount

    def bucket(self, tenant: int, kind: int) -> tuple[int, int]:
        """(level, time) of a bucket of a tenant; (0, 0) = it was never written."""
        start = self._bucket_at(tenant, kind)
        copy = start + 1 + 2 * self._words[start]
        return self._words[copy], self._words[copy + 1]

    def set_bucket(self, tenant: int, kind: int, level: int, time_us: int) -> None:
        """Write a bucket, whole or not at all."""
        start = self._bucket_at(tenant, kind)
        other = 1 - self._words[start]
        self._words[start + 1 + 2 * other] = level
        self._words[start + 2 + 2 * other] = time_us
        self._words[start] = other

    # --- requests that were admitted ---

    def put_ticket(self, place: int, num_answers: int, num_tokens: int, max_tokens: int | None, tenant: int) -> None:
        """Write a request of this front end to one of its places."""
        start = self._ticket_at(self.slot, place)
        self._words[start + 1] = num_answers
        self._words[start + 2] = num_tokens
        self._words[start + 3] = -1 if max_tokens is None else max_tokens
        self._words[start + 4] = tenant
        self._words[start] = time.monotonic_ns()
        if place >= self.of_slot(SlotWord.TICKETS_END):
            self.set(SlotWord.TICKETS_END, place + 1)
        self.add(SlotWord.NUM_ANSWERS, num_answers)
        self.add(SlotWord.NUM_TOKENS, num_tokens)

    def remove_ticket(self, place: int) -> None:
        """A request has ended."""
        start = self._ticket_at(self.slot, place)
        self._words[start] = 0
        self.add(SlotWord.NUM_ANSWERS, -self._words[start + 1])
        self.add(SlotWord.NUM_TOKENS, -self._words[start + 2])

    def tickets(self) -> Iterator[tuple[int, int, int | None, int]]:
        """(answers, tokens, `max_tokens`, tenant) of every request, of all front ends, the newest first."""
        found = []
        for slot in range(self.num_slots):
            for place in range(self.of_slot(SlotWord.TICKETS_END, slot)):
                start = self._ticket_at(slot, place)
                if self._words[start]:
                    found.append((self._words[start], start))
        for _, start in sorted(found, reverse=True):
            num_answers, num_tokens, max_tokens, tenant = self._words[start + 1 : start + 5]
            yield num_answers, num_tokens, None if max_tokens < 0 else max_tokens, tenant

    # --- places ---

    def _slot_at(self, slot: int) -> int:
        return 1 + SlotWord.COUNT * slot

    def _tenant_at(self, tenant: int) -> int:
        return self._tenants_at + tenant * self._row_words

    def _bucket_at(self, tenant: int, kind: int) -> int:
        return self._tenant_at(tenant) + 1 + BUCKET_WORDS * kind

    def _in_use_at(self, tenant: int, slot: int) -> int:
        return self._tenant_at(tenant) + 1 + 2 * BUCKET_WORDS + IN_USE_WORDS * slot

    def _ticket_at(self, slot: int, place: int) -> int:
        return self._tickets_at + (slot * MAX_TICKETS + place) * TICKET_WORDS


class LedgerLock:
    """The lock of a ledger, for one thread of each process; may be taken again while it is held.

    Args:
        fd: of the file.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._depth = 0

    def __enter__(self) -> LedgerLock:
        if not self._depth:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def holder(self) -> int | None:
        """Process id of who holds it; None = none does, or this one."""
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else pid
