"""Messages between processes as frames: a msgpack header, then one raw buffer for each large array. No code crosses.

Used by both ends of a core's sockets. A malformed message is a `MessageError`, whatever its bytes are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from quire.core.kv_spec import KVCacheSpec, spec_from_fields
from quire.errors import MessageError

MAX_HEADER_BYTES = 256 << 20
MAX_FRAMES = 1 << 16
MAX_ARRAY_BYTES = 1 << 30
MAX_DIMENSIONS = 3
# Arrays up to this size stay in the header: a frame of its own costs more than copying them.
INLINE_BYTES = 1024
DTYPES: dict[str, np.dtype[Any]] = {
    "i4": np.dtype("<i4"),
    "i8": np.dtype("<i8"),
    "f4": np.dtype("<f4"),
    "f8": np.dtype("<f8"),
    "b1": np.dtype("?"),
}

T = TypeVar("T")
Frame = bytes | memoryview


class MessageEncoder:
    """Encodes messages. Keeps nothing between calls; not for two threads at once."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)

    def encode(self, message: Any) -> list[Frame]:
        """The frames of a message; large arrays are referred to, not copied, so they must not change until sent."""
        self._frames = []
        header = self._encoder.encode(message)
        frames, self._frames = self._frames, []
        return [header, *frames]

    def _encode_array(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(f"a {type(value).__name__} cannot be sent between processes")
        code = "b1" if value.dtype == np.bool_ else f"{value.dtype.kind}{value.dtype.itemsize}"
        if code not in DTYPES:
            raise NotImplementedError(f"an array of {value.dtype} cannot be sent between processes")
        array = np.ascontiguousarray(value, dtype=DTYPES[code]).reshape(value.shape)
        if array.nbytes <= INLINE_BYTES:
            return code, array.shape, array.tobytes()
        self._frames.append(memoryview(array).cast("B"))
        return code, array.shape, len(self._frames)


class MessageDecoder(Generic[T]):
    """Decodes messages of one type, or of a union of tagged types. Not for two threads at once."""

    def __init__(self, kind: Any) -> None:
        self._frames: Sequence[Frame] = ()
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=self._decode_value)

    def decode(self, frames: Sequence[Frame]) -> T:
        """The message; its arrays are read-only and keep their frame alive.

        Raises:
            MessageError: the frames are not a message of this type.
        """
        if not 0 < len(frames) <= MAX_FRAMES or len(frames[0]) > MAX_HEADER_BYTES:
            raise MessageError(f"{len(frames)} frames are not a valid message, or exceed the size limit")
        self._frames = frames
        try:
            message: T = self._decoder.decode(frames[0])
        except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise MessageError(f"malformed message: {error}") from None
        finally:
            self._frames = ()
        return message

    def _decode_value(self, kind: type, value: Any) -> Any:
        if kind is KVCacheSpec:
            return spec_from_fields(value)
        if kind is not np.ndarray:
            raise NotImplementedError(f"no encoding for {kind}")
        if not isinstance(value, list) or len(value) != 3:
            raise ValueError("an array is (dtype, shape, bytes or frame)")
        code, shape, source = value
        if not isinstance(code, str) or code not in DTYPES:
            raise ValueError("unknown dtype of an array")
        if not isinstance(shape, list) or not 0 < len(shape) <= MAX_DIMENSIONS:
            raise ValueError(f"an array has 1 to {MAX_DIMENSIONS} dimensions")
        num_items = 1
        for size in shape:
            if type(size) is not int or not 0 <= size <= MAX_ARRAY_BYTES:
                raise ValueError("sizes of an array are integers >= 0")
            num_items *= size
        buffer = self._buffer(source)
        if num_items * DTYPES[code].itemsize != len(buffer) or len(buffer) > MAX_ARRAY_BYTES:
            raise ValueError(f"{len(buffer)} bytes are not an array of shape {shape} of {code}")
        if code == "b1" and not set(bytes(buffer)) <= {0, 1}:
            raise ValueError("booleans are 0 or 1")
        array = np.frombuffer(buffer, DTYPES[code])
        return array if len(shape) == 1 else array.reshape(shape)

    def _buffer(self, source: Any) -> Frame:
        if isinstance(source, bytes):
            return source
        if type(source) is int and 0 < source < len(self._frames):
            return self._frames[source]
        raise ValueError("an array refers to a missing frame")
