"""What a recording holds, and how it lies in a file.

A file is `MAGIC`, then records: length and CRC-32 of the payload (4 bytes each, little endian), then the payload, a
MessagePack array whose first entry names its kind. The first record is a `Head`; the others are the calls that the
scheduler got, in order. Written by `writer`, read by `reader`. No code crosses: values only.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from typing import Any

import msgspec
import numpy as np

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire.core.logprobs import LogprobsArrays
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import NewRequestData, SchedulerOutput
from quire.core.serial import DTYPES, MessageDecoder
from quire.scheduler.setup import SchedulerSetup

MAGIC = b"QUIREFR\n"
VERSION = 2
SUFFIX = ".qfr"
FRAME = struct.Struct("<II")


class Head(msgspec.Struct, frozen=True, array_like=True, tag="head"):
    """How a file begins.

    Attributes:
        version: of the format.
        quire_version: of the program that wrote it.
        run: name of the engine core's run; files of one run have equal ones.
        number: of the file within the run, from 0.
        wall_time: seconds since 1970 when it was begun, at `clock` on the recorded clock.
        clock: seconds.
        setup: what the scheduler was made from.
        follows: the file before it in the run ends where this one begins.
        state: the scheduler as it stood (`snapshot`), compressed; None = it had seen nothing.
    """

    version: int
    quire_version: str
    run: str
    number: int
    wall_time: float
    clock: float
    setup: SchedulerSetup
    follows: bool
    state: bytes | None = None


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """`add_request`; `clock` are the readings of the clock during a call, in seconds, as in all calls."""

    request: EngineCoreRequest
    is_refused: bool
    clock: list[float]


class Finish(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """`finish_requests`."""

    handles: list[int]
    reason: FinishReason
    error: str | None
    clock: list[float]
    error_field: str | None = None


class Hold(msgspec.Struct, frozen=True, array_like=True, tag="hold"):
    """`hold`."""

    handles: list[int]
    clock: list[float]


class Schedule(msgspec.Struct, frozen=True, array_like=True, tag="schedule"):
    """`schedule`, and what it decided.

    Attributes:
        is_step: False when nothing could be computed.
        rows: of the step; None = those of the step before.
        num_tokens: per row; None = one each.
        digest: of the whole decision, blocks included.
        verdicts: what gates outside the scheduler said, in order; empty = "go" each time.
        drafts: draft tokens of each row of the step; empty = no row has any.
    """

    is_step: bool
    rows: np.ndarray | None
    num_tokens: np.ndarray | None
    digest: int
    verdicts: list[str]
    clock: list[float]
    drafts: list[list[int]] = []


class Update(msgspec.Struct, frozen=True, array_like=True, tag="update"):
    """`update_from_output`, and a digest of what it told.

    Attributes:
        token_ids: sampled by the rows that sample, in their order; where some have none or several, `rest` says so.
        rest: the worker's answer without tokens and log-probabilities, when there is more in it.
        logprobs: of steps with beam searches, whose next tokens depend on them.
    """

    token_ids: np.ndarray
    seconds: float | None
    rest: ModelRunnerOutput | None
    digest: int
    clock: list[float]
    logprobs: LogprobsArrays | None = None


class Abandon(msgspec.Struct, frozen=True, array_like=True, tag="abandon"):
    """`abandon_step`."""

    clock: list[float]


class Take(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """`take_outputs`, and a digest of its outputs (0 = none)."""

    digest: int
    clock: list[float]


class Reset(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    """`reset_prefix_cache`, and its answer."""

    is_done: bool
    clock: list[float]
    reset_running_requests: bool = False


Call = Add | Finish | Hold | Schedule | Update | Abandon | Take | Reset
Record = Head | Add | Finish | Hold | Schedule | Update | Abandon | Take | Reset


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"a {type(value).__name__} is not recorded")
    code = "b1" if value.dtype == np.bool_ else f"{value.dtype.kind}{value.dtype.itemsize}"
    return code, value.shape, np.ascontiguousarray(value, dtype=DTYPES[code]).tobytes()


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
decoder: MessageDecoder[Record] = MessageDecoder(Record)
"""Decodes one payload, given in a list; raises `MessageError`."""


def frame(record: Record) -> bytes:
    """A record as it lies in a file."""
    payload = _encoder.encode(record)
    return FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def digest_of_schedule(scheduled: SchedulerOutput | None) -> int:
    """A number that differs when decisions differ, in blocks and tokens too; sampling parameters are left out."""
    crc = 0
    for name in _SCHEDULE_FIELDS if scheduled is not None else ():
        value = getattr(scheduled, name)
        if (name in ("drafts", "kv_transfers") and value is None) or (name == "states" and not value):
            continue  # as in older recordings
        if type(value) is np.ndarray:
            crc = zlib.crc32(value.tobytes(), crc)
        elif name == "new_reqs":
            crc = zlib.crc32(_encoder.encode([_decided(new) for new in value]), crc) if value else crc
        else:
            crc = zlib.crc32(_encoder.encode(value), crc)
    return crc


def _decided(new: NewRequestData) -> dict[str, Any]:
    return {one.name: getattr(new, one.name) for one in dataclasses.fields(new) if one.name != "sampling_params"}


_DIGESTED_STATS = (
    "step", "num_running", "num_waiting", "num_scheduled_tokens", "num_preemptions", "num_swapped",
    "num_swap_preemptions", "swapped_out_bytes", "swapped_in_bytes", "kv_cache_usage", "prefix_cache_queries",
    "prefix_cache_hits", "kv_event_batches_dropped",
)  # fmt: skip
# The statistics of version 1, as they were encoded: with those added since, older recordings would not replay.


def digest_of_outputs(outputs: EngineCoreOutputs | None) -> int:
    """A number that differs when the outputs to the front end differ; log-probabilities are left out."""
    if outputs is None:
        return 0
    crc = zlib.crc32(outputs.new_token_ids.tobytes(), zlib.crc32(outputs.handles.tobytes()))
    stats = {name: getattr(outputs.stats, name) for name in _DIGESTED_STATS}
    crc = zlib.crc32(_encoder.encode((outputs.timestamp, stats)), crc)
    if outputs.finished or outputs.events:
        crc = zlib.crc32(_encoder.encode((outputs.finished, outputs.events)), crc)
    return crc


def drafts_by_row(scheduled: SchedulerOutput) -> list[list[int]]:
    """The draft tokens of each row of a step; empty when no row has any."""
    if scheduled.drafts is None:
        return []
    ends = np.cumsum(scheduled.drafts.counts)
    return [ids.tolist() for ids in np.split(scheduled.drafts.token_ids, ends[:-1])]


def rest_of(output: ModelRunnerOutput) -> ModelRunnerOutput | None:
    """What else than tokens and log-probabilities is in a worker's answer; None when there is nothing."""
    if output.sampled_start_loc is None and all(getattr(output, name) == value for name, value in _REST.items()):
        return None
    return dataclasses.replace(
        output, rows=_NOTHING, sampled_token_ids=_NOTHING, logprobs=None, prompt_logprobs={}
    )  # fmt: skip


def whole_output(update: Update, scheduled: SchedulerOutput) -> ModelRunnerOutput:
    """The worker's answer to `scheduled`, without log-probabilities that only users see."""
    rows = scheduled.rows[scheduled.is_sampling]
    return dataclasses.replace(
        update.rest or _EMPTY, rows=rows, sampled_token_ids=update.token_ids, logprobs=update.logprobs
    )


_NOTHING = np.empty(0, dtype=np.int32)
_EMPTY = ModelRunnerOutput(rows=_NOTHING, sampled_token_ids=_NOTHING)
_NOT_REST = ("rows", "sampled_token_ids", "sampled_start_loc", "logprobs", "prompt_logprobs")
_REST = {
    one.name: getattr(_EMPTY, one.name) for one in dataclasses.fields(ModelRunnerOutput) if one.name not in _NOT_REST
}
# What rows are follows from their tokens, and is in no digest of older recordings.
_SCHEDULE_FIELDS = [one.name for one in dataclasses.fields(SchedulerOutput) if one.name != "is_prefill"]
