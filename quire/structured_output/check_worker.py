"""The process in which large schemas are checked: its time is no event loop's.

Started by `form_checker` as a program. It reads a `CheckSetup` and then one `CheckRequest` after another from its
standard input, and answers each with a `CheckResult`. Loads no torch and no grammar library.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import msgspec

from quire.config.structured_outputs import StructuredOutputsConfig
from quire.core.call_grammar import CallGrammar
from quire.core.structured_outputs import StructuredOutputsParams
from quire.core.wire import ErrorInfo
from quire.errors import QuireError, ValidationError
from quire.structured_output.check_messages import CheckRequest, CheckResult, CheckSetup
from quire.structured_output.choose import resolve_structured_outputs
from quire.structured_output.compile.messages import read_message, write_message

NICENESS = 10
MAX_CPU_S = 5.0


class _OverTimeError(Exception):
    """A check took too much CPU time."""


def main() -> None:
    """Serve until standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, _stop)
    os.nice(NICENESS)
    inputs, outputs = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not be read as an answer
    data = read_message(inputs)
    if data is None:
        return
    config = msgspec.msgpack.decode(data, type=CheckSetup).config
    while (data := read_message(inputs)) is not None:
        request = msgspec.msgpack.decode(data, type=CheckRequest)
        write_message(outputs, _check(request, config))


def _check(request: CheckRequest, config: StructuredOutputsConfig) -> CheckResult:
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    try:
        grammar = msgspec.convert(request.fields.get("call_grammar"), CallGrammar | None)
        params = StructuredOutputsParams(**{**request.fields, "call_grammar": grammar})
        return CheckResult(resolve_structured_outputs(params, config))
    except QuireError as error:
        return CheckResult(error=ErrorInfo.of(error))
    except _OverTimeError:
        field = request.fields.get("source") or "structured_outputs"
        over = ValidationError(
            f"{field} takes more than {MAX_CPU_S:g} s to check", hint="use a simpler schema", field=field
        )
        return CheckResult(error=ErrorInfo.of(over))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _stop(number: int, frame: FrameType | None) -> None:
    raise _OverTimeError
