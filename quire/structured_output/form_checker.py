"""FormChecker: whether a library honours a large schema, found out by a process; owned by a server's engine client.

To look at every keyword of a schema takes 80 ms of Python for 190 kB, in which an event loop would not run. What has
been checked is kept, refusals too, and found again by requests of the same salt alone, so that its time tells no other
tenant of it.
"""

from __future__ import annotations

import hashlib
import subprocess
import threading
from collections import OrderedDict
from contextlib import suppress

import msgspec

from quire.config.structured_outputs import StructuredOutputsConfig
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import EngineGenerateError, QuireError
from quire.structured_output.check_messages import CheckRequest, CheckResult, CheckSetup
from quire.structured_output.choose import resolve_structured_outputs
from quire.structured_output.compile.messages import read_message, write_message
from quire.utils.children import Child, describe_exit, start_module

MAX_KEPT, MAX_KEPT_BYTES = 256, 32 << 20

_encoder = msgspec.msgpack.Encoder()


class FormChecker:
    """Checks forms; safe to use from several threads, of which one waits for the other.

    Args:
        config: the engine's settings.
    """

    def __init__(self, config: StructuredOutputsConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._process: Child | None = None
        self._is_closed = False
        self._kept: OrderedDict[tuple[str, bytes], CheckResult] = OrderedDict()
        self._num_bytes = 0

    def resolve(self, params: StructuredOutputsParams, salt: str) -> StructuredOutputsParams:
        """As `resolve_structured_outputs`; a large form is checked by the process, and waited for.

        Args:
            salt: of the request's pages.
        """
        if not params.is_large:
            return resolve_structured_outputs(params, self._config)
        fields = {name: getattr(params, name) for name in params.__struct_fields__}
        try:
            data = _encoder.encode(fields)
        except (TypeError, ValueError, OverflowError, RecursionError):  # nothing that JSON or a message has
            return resolve_structured_outputs(params, self._config)
        key = (salt, hashlib.sha256(data).digest())
        with self._lock:
            result = self._kept.get(key)
            if result is None:
                result = self._ask(CheckRequest(fields))
                self._keep(key, result)
            else:
                self._kept.move_to_end(key)
        if result.error is not None:
            raise result.error.to_error()
        assert result.resolved is not None, "it is one or the other"
        return result.resolved

    def close(self) -> None:
        """End the process; harmless when repeated."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._dispose()

    def _keep(self, key: tuple[str, bytes], result: CheckResult) -> None:
        self._kept[key] = result
        self._num_bytes += _size(result)
        while len(self._kept) > MAX_KEPT or self._num_bytes > MAX_KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= _size(oldest)

    def _ask(self, request: CheckRequest) -> CheckResult:
        data = None
        with suppress(OSError):
            process = self._started()
            assert process.stdin is not None and process.stdout is not None, "both were asked for"
            write_message(process.stdin, request)
            data = read_message(process.stdout)
        if data is None:
            raise self._ended()
        return msgspec.msgpack.decode(data, type=CheckResult)

    def _started(self) -> Child:
        if self._is_closed:
            raise OSError("closed")
        if self._process is None or self._process.poll() is not None:
            self._dispose()
            self._process = start_module(
                "quire.structured_output.check_worker", stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert self._process.stdin is not None, "it was asked for"
            write_message(self._process.stdin, CheckSetup(self._config))
        return self._process

    def _ended(self) -> QuireError:
        code = self._dispose()
        told = "was shut down" if self._is_closed else describe_exit(code) if code is not None else "did not start"
        return EngineGenerateError(f"the process that checks schemas {told}")

    def _dispose(self) -> int | None:
        """Wait for the process, which is ended; its return code."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        code = process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):  # what was not sent any more
                    stream.close()
        return code


def _size(result: CheckResult) -> int:
    return len(_encoder.encode(result))
