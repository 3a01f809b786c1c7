"""Messages between processes: what goes in comes out, and garbage is an error, whatever it is."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import QuireConfig
from quire.config.build import build_config
from quire.core.draft_stats import DraftOutcomes
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest, FinishedRequest, FinishReason
from quire.core.logprobs import LogprobsArrays
from quire.core.sampling_params import SamplingParams
from quire.core.serial import INLINE_BYTES, MessageDecoder, MessageEncoder
from quire.core.speculation_stats import BucketStats, ControllerStats, Reason, SpeculationStats
from quire.core.stats import EventKind, RequestEvent, SchedulerStats
from quire.core.wire import AbortRequests, AddRequest, ErrorInfo, FromCore, RequestRefused, StepOutputs, ToCore
from quire.errors import EngineDeadError, MessageError, ValidationError

TO_CORE: MessageDecoder[ToCore] = MessageDecoder(ToCore)
FROM_CORE: MessageDecoder[FromCore] = MessageDecoder(FromCore)


def frames_of(message) -> list[bytes]:
    return [bytes(frame) for frame in MessageEncoder().encode(message)]


def same(one, other) -> bool:
    """Equality of values that hold arrays."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    names = getattr(one, "__struct_fields__", None) or getattr(one, "__dataclass_fields__", None)
    if names:
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in names)
    return one == other


def arrays(dtype, width=None):
    shape = (lambda n: (n,)) if width is None else (lambda n: (n, width))
    return st.integers(0, 600).map(lambda n: np.arange(np.prod(shape(n)), dtype=dtype).reshape(shape(n)))


REQUESTS = st.builds(
    EngineCoreRequest,
    handle=st.integers(0, 2**62),
    request_id=st.text(max_size=20),
    prompt_token_ids=arrays(np.int32),
    sampling_params=st.builds(
        SamplingParams,
        temperature=st.floats(0.01, 2),
        seed=st.none() | st.integers(0, 2**63 - 1),
        stop=st.none() | st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3),
        logit_bias=st.none() | st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), min_size=1, max_size=3),
        max_tokens=st.integers(1, 100),
    ),
    seed=st.integers(0, 2**64 - 1),
    cache_salt=st.none() | st.text(max_size=5),
    num_shared_tokens=st.integers(0, 2**31),
    output_token_ids=st.none() | arrays(np.int32),
)
LOGPROBS = st.integers(0, 300).map(
    lambda n: LogprobsArrays(
        np.arange(n, dtype=np.int32),
        np.ones((n, 3), dtype=np.int32),
        np.full((n, 3), np.nan, dtype=np.float32),
        np.ones((n, 3), dtype=np.int32),
    )
)
DECIDED = ControllerStats(
    {Reason.DRAFTED: 4, Reason.CLOSED: 2}, 1.25, 0.5, 3, 40, 0.01, (BucketStats("rows<=1", 0.9, True, 2),)
)
OUTPUTS = st.builds(
    EngineCoreOutputs,
    handles=arrays(np.int64),
    new_token_ids=arrays(np.int32),
    logprobs=st.none() | LOGPROBS,
    prompt_logprobs=st.lists(st.tuples(st.integers(0, 9), LOGPROBS), max_size=2).map(tuple),
    finished=st.lists(
        st.builds(FinishedRequest, st.integers(0, 9), st.sampled_from(FinishReason), st.none() | st.integers(0, 9)),
        max_size=3,
    ).map(tuple),
    events=st.just((RequestEvent(1, EventKind.QUEUED, 1.5),)),
    stats=st.just(SchedulerStats(step=3, kv_cache_usage=0.5)),
    timestamp=st.floats(0, 1e9),
    drafts=st.none() | st.just(DraftOutcomes(np.arange(2), np.array([3, 1], np.int32), np.array([0, 1], np.int32))),
    speculation=st.sampled_from((None, SpeculationStats(store_bytes=5), SpeculationStats(controller=DECIDED))),
)


@settings(max_examples=40, deadline=None)
@given(REQUESTS)
def test_a_request_comes_out_as_it_went_in(request: EngineCoreRequest):
    assert same(TO_CORE.decode(frames_of(AddRequest(request))), AddRequest(request))


@settings(max_examples=40, deadline=None)
@given(OUTPUTS)
def test_outputs_come_out_as_they_went_in(outputs: EngineCoreOutputs):
    assert same(FROM_CORE.decode(frames_of(StepOutputs(outputs))), StepOutputs(outputs))


def test_large_arrays_have_frames_of_their_own_and_small_ones_do_not():
    small, large = np.zeros(INLINE_BYTES // 4, np.int32), np.zeros(INLINE_BYTES // 4 + 1, np.int32)
    request = EngineCoreRequest(
        handle=1, request_id="a", prompt_token_ids=small, sampling_params=SamplingParams(), seed=1
    )
    assert len(frames_of(AddRequest(request))) == 1
    request = EngineCoreRequest(
        handle=1, request_id="a", prompt_token_ids=large, sampling_params=SamplingParams(), seed=1
    )
    assert len(frames_of(AddRequest(request))) == 2


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_garbage_is_an_error(frames: list[bytes]):
    with pytest.raises(MessageError):
        TO_CORE.decode(frames)


@settings(max_examples=200, deadline=None)
@given(REQUESTS, st.data())
def test_a_damaged_message_is_an_error_or_another_message(request: EngineCoreRequest, data: st.DataObject):
    frames = [bytearray(frame) for frame in frames_of(AddRequest(request))]
    frame = data.draw(st.sampled_from([frame for frame in frames if frame]))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del frame[data.draw(st.integers(0, len(frame) - 1)) :]
    try:
        message = TO_CORE.decode([bytes(one) for one in frames])
    except MessageError:
        return
    assert isinstance(message, ToCore)


@pytest.mark.parametrize(
    "array",
    [
        ["i4", [2], b"1234567"], ["i4", [-1], b""], ["O", [1], b"12345678"], ["i4", [2**40, 2**40], b""],
        ["i4", [2], 1], ["i4", [2], 0], ["i4", [2], True], ["i4", [], b"1234"], ["b1", [1], b"\x02"],
        ["i4", [1, 1, 1, 1], b"1234"], ["i4", [1.0], b"1234"], "i4", ["i4", [1]], ["i4", "1", b"1234"], 7,
    ],
)  # fmt: skip
def test_an_array_that_is_none_is_refused(array):
    request = {
        "handle": 1, "request_id": "a", "prompt_token_ids": array, "sampling_params": {}, "seed": 1,
    }  # fmt: skip
    with pytest.raises(MessageError):
        TO_CORE.decode([msgspec.msgpack.encode({"type": "add", "request": request})])


def test_parameters_are_checked_again_when_they_arrive():
    request = {
        "handle": 1, "request_id": "a", "prompt_token_ids": ["i4", [1], b"1234"],
        "sampling_params": {"temperature": -9.0}, "seed": 1,
    }  # fmt: skip
    with pytest.raises(MessageError, match="temperature"):
        TO_CORE.decode([msgspec.msgpack.encode({"type": "add", "request": request})])


def test_only_plain_values_and_numbers_are_encoded():
    with pytest.raises(NotImplementedError):
        frames_of(AbortRequests([object()]))
    with pytest.raises(NotImplementedError):
        frames_of(AbortRequests([np.array([None])]))
    assert TO_CORE.decode(frames_of(AbortRequests([np.int64(3)]))) == AbortRequests([3])


def test_an_error_is_raised_again_as_what_it_was():
    error = ValidationError("too long", hint="shorten it", field="prompt")
    again = ErrorInfo.of(error).to_error()
    assert (type(again), again.message, again.hint, again.field) == (
        ValidationError,
        "too long",
        "shorten it",
        "prompt",
    )
    refused = RequestRefused(3, ErrorInfo.of(error))
    assert FROM_CORE.decode(frames_of(refused)) == refused


def test_a_foreign_error_is_named():
    again = ErrorInfo.of(KeyError("x")).to_error()
    assert isinstance(again, EngineDeadError)
    assert "KeyError" in again.message
    assert isinstance(ErrorInfo("Iterable", "no error class").to_error(), EngineDeadError)


def test_a_configuration_crosses():
    config = build_config(model="leaf", max_model_len=77)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=QuireConfig) == config
