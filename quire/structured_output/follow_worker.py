"""The process in which expensive grammars are followed: one that may be ended when a grammar takes too much.

Started by `followers` as a program, with a socket for its standard input. It reads a `WorkerSetup`, then one connection
after another, and forks for each a child that follows one grammar: it reads a `FollowStart` and then `FollowStep`s, and
answers each with a `FollowReply`. The kernel holds the child to its limits, in all: too much CPU time ends it by
SIGPROF, too much memory it does not get, and while it computes, the end of its connection ends it by SIGIO. Loads no
torch.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
from contextlib import suppress

import msgspec
import numpy as np

from quire.structured_output.answer_steps import advance, begin
from quire.structured_output.compile.messages import Stream, WorkerSetup, read_message, write_message
from quire.structured_output.compile.worker import NICENESS, limit_memory
from quire.structured_output.follow_messages import FollowReply, FollowStart, FollowStep
from quire.structured_output.interface import Matcher, StructuredOutputBackend, Vocabulary
from quire.structured_output.reasoning_state import ReasoningMasks
from quire.structured_output.registry import make_backend
from quire.structured_output.vocabulary import read_vocabulary

MAX_SETUP_BYTES = 1 << 16


def main() -> None:
    """Serve until standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit statuses of children are not read
    os.nice(NICENESS)
    inputs = socket.socket(fileno=os.dup(0))
    setup = msgspec.msgpack.decode(inputs.recv(MAX_SETUP_BYTES), type=WorkerSetup)
    vocabulary = read_vocabulary(setup.tokenizer_path, setup.vocab_size, setup.eos_token_id)
    backends: dict[str, StructuredOutputBackend] = {}
    while True:
        name, descriptors, _, _ = socket.recv_fds(inputs, MAX_SETUP_BYTES, 1)
        if not name:
            return
        backend = name.decode()
        if backend not in backends:
            backends[backend] = make_backend(backend, vocabulary)
        if os.fork() == 0:
            try:
                inputs.close()
                _serve(socket.socket(fileno=descriptors[0]), backends[backend], vocabulary, setup)
            finally:  # whatever was raised: only the parent goes back to the loop
                os._exit(0)
        os.close(descriptors[0])


def _serve(
    connection: socket.socket, backend: StructuredOutputBackend, vocabulary: Vocabulary, setup: WorkerSetup
) -> None:
    limit_memory(setup.memory_bytes)
    signal.setitimer(signal.ITIMER_PROF, setup.cpu_s)
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    with suppress(OSError), connection.makefile("rwb") as stream:
        data = read_message(stream)
        if data is None:
            return
        start = msgspec.msgpack.decode(data, type=FollowStart)
        followed = _Followed(start, backend, vocabulary)
        _may_be_ended(connection)
        reply = followed.begin()
        _send(stream, reply)
        while reply.error is None and (data := read_message(stream)) is not None:
            step = msgspec.msgpack.decode(data, type=FollowStep)
            _may_be_ended(connection)
            reply = followed.go_on([step.token_id])
            _send(stream, reply)


def _may_be_ended(connection: socket.socket) -> None:
    """From here on the end of the connection ends the process; it is over if that has come already."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    poll = select.poll()
    poll.register(connection, 0)
    if poll.poll(0):  # hung up
        os._exit(0)


def _send(stream: Stream, reply: FollowReply) -> None:
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    write_message(stream, reply)


class _Followed:
    """An answer and its grammar."""

    def __init__(self, start: FollowStart, backend: StructuredOutputBackend, vocabulary: Vocabulary) -> None:
        self._start = start
        self._backend = backend
        self._vocabulary = vocabulary
        self._grammar: Matcher | None = None
        self._bitmask = np.empty((1, vocabulary.bitmask_size), dtype=np.int32)

    def begin(self) -> FollowReply:
        """Make the grammar, and take it through the tokens so far."""
        start = self._start
        assert start.spec is not None, "any text is not followed here"
        try:
            compiled = self._backend.load(start.spec, self._backend.compile(start.spec))
            masks = None if start.reasoning is None else ReasoningMasks(self._vocabulary)
            self._grammar = begin(compiled, start, self._vocabulary, masks)
        except Exception as error:  # a library's limits show themselves in many classes
            return _failed(error)
        return self.go_on(start.token_ids)

    def go_on(self, token_ids: list[int]) -> FollowReply:
        """Behind further tokens."""
        grammar, eos_token_id = self._grammar, self._vocabulary.eos_token_id
        assert grammar is not None, "it was begun"
        try:
            for token_id in token_ids:
                if not advance(grammar, token_id, eos_token_id, self._start.end_ids):
                    return FollowReply(refused_id=token_id)
            if grammar.is_terminated():
                return FollowReply(is_terminated=True, line=bytes(self._bitmask.nbytes))
            grammar.fill_bitmask(self._bitmask, 0)
        except Exception as error:
            return _failed(error)
        return FollowReply(line=self._bitmask.tobytes())


def _failed(error: Exception) -> FollowReply:
    return FollowReply(error=str(error)[:500] or type(error).__name__)
