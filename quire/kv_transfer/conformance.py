"""Whether a connector keeps its contract, tried on a small cache of random blocks: no model, no scheduler.

Called by `quire connector-check`, and by the tests of connectors of other packages:

    problems = check_connector(KVTransferConfig(kv_connector="MyConnector", kv_connector_module_path="my_package"))
    assert not problems

Each check makes both halves anew, over the same settings, and plays the engine's part in the order of the contract.
Owns the blocks of one check.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.config.kv_transfer import KVTransferConfig
from quire.core.engine_messages import EngineCoreRequest
from quire.core.kv_transfer import KVConnectorOutput
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler_output import SchedulerOutput
from quire.errors import ConfigError
from quire.kv_transfer.connector import KVConnector, KVConnectorRole
from quire.kv_transfer.layout import KVCacheLayout, LayerLayout
from quire.kv_transfer.registry import connector_class, make_connector
from quire.kv_transfer.requests import ConnectorRequest, ConnectorStep

BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS, BLOCK_SHAPE = 16, 64, 3, (2, 2, 16 * 8)
PATIENCE_S = 20.0
"""Seconds after which a transfer that is not reported counts as lost."""
POLL_S = 0.002


class _Broken(AssertionError):
    """What the connector did that it may not do."""


class _Cache:
    """Blocks of random bytes; implements `BlockAccess`, and notes who may touch a block."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_BLOCKS, *BLOCK_SHAPE)
        layers = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for _ in range(NUM_LAYERS)]
        self.layers = {f"layer.{i}": layer for i, layer in enumerate(layers)}

    def read(self, block_ids: np.ndarray | Sequence[int]) -> list[torch.Tensor]:
        return [layer[torch.from_numpy(np.array(block_ids, dtype=np.int64))] for layer in self.layers.values()]

    def write(self, block_ids: np.ndarray | Sequence[int], blocks: Sequence[torch.Tensor]) -> None:
        for layer, block in zip(self.layers.values(), blocks, strict=True):
            layer[torch.from_numpy(np.array(block_ids, dtype=np.int64))] = block

    def copy(self, block_ids: Sequence[int]) -> list[bytes]:
        return [part.numpy().tobytes() for part in self.read(block_ids)]


class _Engine:
    """Both halves of a connector, called as the engine calls them."""

    def __init__(self, config: KVTransferConfig, layout: KVCacheLayout, seed: int = 1) -> None:
        kind = connector_class(config)
        self.front, self.back = (make_connector(kind, config, role, layout) for role in KVConnectorRole)
        self.cache = _Cache(seed)
        self.back.register_kv_caches(self.cache.layers, self.cache)
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.errors: set[int] = set()
        self._finished: set[str] = set()

    def lookup(self, request: Request, num_computed_tokens: int = 0) -> tuple[int, bool]:
        """What it has of a request, asked until it knows."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = self.front.get_num_new_matched_tokens(ConnectorRequest(request), num_computed_tokens)
            if not (isinstance(found, tuple) and len(found) == 2):
                raise _Broken(f"get_num_new_matched_tokens returned {found!r}, not (tokens or None, bool)")
            num_tokens, is_async = found
            if num_tokens is not None:
                most = len(request.token_ids) - num_computed_tokens
                if not 0 <= num_tokens <= most:
                    raise _Broken(f"get_num_new_matched_tokens returned {num_tokens} of {most} tokens")
                return num_tokens // BLOCK_SIZE * BLOCK_SIZE, bool(is_async)
            self.step()
            time.sleep(POLL_S)
        raise _Broken(f"get_num_new_matched_tokens did not know anything for {PATIENCE_S:g} s")

    def load(self, request: Request, block_ids: list[int], num_tokens: int) -> None:
        """Give blocks to what it offered; the next step begins the load."""
        self.front.update_state_after_alloc(ConnectorRequest(request), block_ids, num_tokens)

    def finish(self, request: Request, block_ids: list[int]) -> bool:
        """End a request; whether its blocks have to stay."""
        is_delayed, _ = self.front.request_finished(ConnectorRequest(request), block_ids)
        self._finished.add(request.unique_id)
        return is_delayed

    def step(self, *, fails: bool = False) -> None:
        """One step without rows; one that fails never reaches the worker."""
        meta = self.front.build_connector_meta(ConnectorStep(_NO_ROWS, _no_request, _no_blocks))
        if fails:
            return
        if meta is not None:
            self.back.bind_connector_metadata(meta)
            self.back.start_load_kv()
            for name, layer in self.cache.layers.items() if self.back.has_layer_hooks else ():
                self.back.wait_for_layer_load(name)
                self.back.save_kv_layer(name, layer, None)
            self.back.wait_for_save()
        finished, self._finished = frozenset(self._finished), set()
        sent, received = self.back.get_finished(finished)
        errors = self.back.get_block_ids_with_load_errors()
        if not self.back.get_failed_saves() <= sent:
            raise _Broken("get_failed_saves names a request that get_finished did not name as sent")
        report = KVConnectorOutput(
            finished_sending=frozenset(sent), finished_recving=frozenset(received), invalid_block_ids=frozenset(errors),
            worker_meta=self.back.build_connector_worker_meta(), stats=self.back.get_kv_connector_stats(),
        )  # fmt: skip
        if meta is not None:
            self.back.clear_connector_metadata()
        self.front.update_connector_output(report)
        self.sent |= sent
        self.received |= received
        self.errors |= errors

    def wait(self, is_done: Callable[[], bool], what: str) -> None:
        """Steps until a transfer is reported."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_done():
            if time.monotonic() > deadline:
                raise _Broken(f"{what} was not reported by get_finished within {PATIENCE_S:g} s")
            self.step()
            time.sleep(POLL_S)

    def save(self, request: Request, block_ids: list[int]) -> None:
        """A request ends, and its blocks are saved and reported."""
        if self.finish(request, block_ids):
            self.wait(lambda: request.unique_id in self.sent, "the save of a request")
        else:
            self.step()

    def fetch(self, request: Request, block_ids: list[int], num_tokens: int, *, is_async: bool) -> bool:
        """Load what was offered; whether all of it came."""
        self.load(request, block_ids, num_tokens)
        self.step()
        if is_async:
            self.wait(lambda: request.unique_id in self.received, "the load of a request that waits")
        is_whole = self.errors.isdisjoint(block_ids)
        self.errors.clear()
        return is_whole

    def close(self) -> None:
        """As the end of an engine, which may come twice."""
        for _ in range(2):
            self.back.shutdown()
            self.front.shutdown()


_NO_ROWS = SchedulerOutput(
    step=0, freed_rows=np.empty(0, np.int32), new_reqs=(), new_blocks=(), rows=np.empty(0, np.int32),
    num_scheduled_tokens=np.empty(0, np.int32), num_computed_tokens=np.empty(0, np.int32),
    is_prefill=np.empty(0, bool), is_sampling=np.empty(0, bool), total_num_scheduled_tokens=0,
)  # fmt: skip


def _no_request(row: int) -> Request:
    raise AssertionError("the step has no rows")


def _no_blocks(row: int) -> np.ndarray:
    raise AssertionError("the step has no rows")


def _layout(model: str = "conformance") -> KVCacheLayout:
    strides = (BLOCK_SHAPE[1] * BLOCK_SHAPE[2], BLOCK_SHAPE[2], 1)
    layers = tuple(
        LayerLayout(names=(f"layer.{i}",), shape=BLOCK_SHAPE, strides=strides, dtype="uint8") for i in range(NUM_LAYERS)
    )
    return KVCacheLayout(
        block_size=BLOCK_SIZE, order="random bytes", layers=layers, groups=(f"full attention x {NUM_LAYERS}",),
        model=hashlib.sha256(model.encode()).hexdigest(), build="conformance",
    )  # fmt: skip


def _request(handle: int, num_blocks: int, *, text: str, salt: str | None = None) -> Request:
    """A request of full blocks and one more token: those of `text`, whose names are those of `text` and `salt`."""
    digest = hashlib.sha256(f"{text}/{salt}".encode()).digest()
    tokens = np.random.default_rng(list(text.encode()))
    token_ids = tokens.integers(1 << 15, size=num_blocks * BLOCK_SIZE + 1, dtype=np.int32)
    message = EngineCoreRequest(
        handle=handle, request_id=f"check{handle}", prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=1), seed=0, cache_salt=salt,
    )  # fmt: skip
    request = Request.from_message(message)
    for _ in range(num_blocks):
        digest = hashlib.sha256(digest).digest()
        request.block_hashes.append(digest)
    return request


def _check_round_trip(engine: _Engine, text: str) -> None:
    """What was saved is found again, as often as it is asked for, and loaded byte by byte."""
    saved, expected = [3, 5, 4, 9], engine.cache.copy([3, 5, 4, 9])
    engine.save(_request(1, 4, text=text), saved)
    again = _request(2, 4, text=text)
    first, is_async = engine.lookup(again)
    if (first, is_async) != engine.lookup(again):
        raise _Broken("get_num_new_matched_tokens gave two answers to one question")
    if not first:
        raise _Broken("nothing that was saved is found again")
    target = [20, 21, 22, 23][: first // BLOCK_SIZE]
    if not engine.fetch(again, target, first, is_async=is_async):
        raise _Broken("blocks that were just saved could not be loaded")
    if engine.cache.copy(target) != [part[: len(part) * len(target) // 4] for part in expected]:
        raise _Broken("loaded blocks have other bytes than were saved")


def _check_prefix(engine: _Engine, text: str) -> None:
    """Blocks behind those of the prefix cache are loaded into their own places, and no other block is written."""
    engine.save(_request(1, 4, text=text), [1, 2, 3, 4])
    expected = engine.cache.copy([3, 4])
    request = _request(2, 4, text=text)
    num_tokens, is_async = engine.lookup(request, 2 * BLOCK_SIZE)
    if num_tokens != 2 * BLOCK_SIZE:
        raise _Broken(f"of 2 blocks behind 2 computed ones {num_tokens // BLOCK_SIZE} are found")
    others = engine.cache.copy(range(40))
    if not engine.fetch(request, [30, 31, 50, 51], num_tokens, is_async=is_async):
        raise _Broken("blocks behind a cached prefix could not be loaded")
    if engine.cache.copy([50, 51]) != expected or engine.cache.copy(range(40)) != others:
        raise _Broken("blocks behind a cached prefix were loaded to other places")


def _check_frees(engine: _Engine, text: str) -> None:
    """Blocks whose free is delayed are read before they are reported, and not after."""
    request = _request(1, 4, text=text)
    expected = engine.cache.copy([1, 2, 3, 4])
    engine.save(request, [1, 2, 3, 4])
    engine.cache.write([1, 2, 3, 4], engine.cache.read([11, 12, 13, 14]))  # they have another owner
    for _ in range(20):
        engine.step()
    if request.unique_id in engine.back.get_finished(frozenset())[0]:
        raise _Broken("a request was reported as sent twice")
    again = _request(2, 4, text=text)
    num_tokens, is_async = engine.lookup(again)
    target = [20, 21, 22, 23][: num_tokens // BLOCK_SIZE]
    is_whole = not num_tokens or engine.fetch(again, target, num_tokens, is_async=is_async)
    if is_whole and engine.cache.copy(target) != [part[: len(part) * len(target) // 4] for part in expected]:
        raise _Broken("blocks were read after they had been reported as sent")


def _check_aborts(engine: _Engine, text: str) -> None:
    """A request that ends while it is loaded is reported all the same, and its blocks are not written later."""
    engine.save(_request(1, 4, text=text), [1, 2, 3, 4])
    request = _request(2, 4, text=text)
    num_tokens, is_async = engine.lookup(request)
    target = [20, 21, 22, 23][: num_tokens // BLOCK_SIZE]
    engine.load(request, target, num_tokens)
    if engine.finish(request, []):
        raise _Broken("request_finished delays the free of a request without blocks")
    engine.step()
    if is_async:
        engine.wait(lambda: request.unique_id in engine.received, "the load of a request that was aborted")
    engine.cache.write(target, engine.cache.read(range(40, 40 + len(target))))  # they have another owner
    expected = engine.cache.copy(target)
    for _ in range(20):
        engine.step()
    if engine.cache.copy(target) != expected:
        raise _Broken("blocks were written after their load had been reported")


def _check_lost_steps(engine: _Engine, text: str) -> None:
    """A step whose metadata never arrives costs what it carried, and nothing later."""
    engine.finish(_request(1, 4, text=text), [1, 2, 3, 4])
    engine.step(fails=True)
    engine.step()
    _check_round_trip(engine, f"{text}, after a step that failed")


def _check_salts(engine: _Engine, text: str) -> None:
    """Blocks of one salt are not found with another."""
    engine.save(_request(1, 2, text=text, salt="a"), [1, 2])
    if engine.lookup(_request(2, 2, text=text, salt="b"))[0]:
        raise _Broken("a block is found under another name (cache_salt)")


def _check_reset(engine: _Engine, text: str) -> None:
    """What was forgotten is not found, or cannot be loaded, or is what was saved; it is never something else."""
    expected = engine.cache.copy([1, 2])
    engine.save(_request(1, 2, text=text), [1, 2])
    request = _request(2, 2, text=text)
    num_tokens, is_async = engine.lookup(request)
    engine.front.reset_cache()
    engine.back.reset_cache()
    target = [20, 21][: num_tokens // BLOCK_SIZE]
    is_whole = bool(target) and engine.fetch(request, target, num_tokens, is_async=is_async)
    if is_whole and engine.cache.copy(target) != [part[: len(part) * len(target) // 2] for part in expected]:
        raise _Broken("blocks that were forgotten between lookup and load came back as other bytes")


CHECKS: dict[str, Callable[..., None]] = {
    "saved blocks come back": _check_round_trip,
    "blocks behind a cached prefix": _check_prefix,
    "deferred frees": _check_frees,
    "aborted loads": _check_aborts,
    "steps that fail": _check_lost_steps,
    "salts": _check_salts,
    "blocks that are lost": _check_reset,
}


def check_connector(config: KVTransferConfig) -> dict[str, str]:
    """What a connector does that its contract forbids.

    It is given blocks of random bytes, under names that are new with every call.

    Returns:
        Check -> what is wrong; empty = nothing was found.

    Raises:
        ConfigError: it cannot be made with these settings.
    """
    problems: dict[str, str] = {}
    run = f"{time.time_ns()}"
    for name, check in CHECKS.items():
        problem = _problem_of(functools.partial(check, text=f"{run} {name}"), config, _layout())
        if problem is not None:
            problems[name] = problem
    problem = _problem_of(functools.partial(_check_round_trip, text=f"{run} layout"), config, _layout())
    problem = problem or _layout_problem(config, f"{run} layout")
    if problem is not None:
        problems["another layout"] = problem
    return problems


def _layout_problem(config: KVTransferConfig, text: str) -> str | None:
    """Why blocks of one layout are taken for those of another; None = they are not."""
    for other in (_layout("another model"), dataclasses.replace(_layout(), order="values first")):
        try:
            engine = _Engine(config, other, seed=2)
        except ConfigError:
            continue  # refused by name
        try:
            if engine.lookup(_request(3, 4, text=text))[0]:
                return "blocks of another layout are offered"
        except _Broken as broken:
            return str(broken)
        finally:
            engine.close()
    return None


def _problem_of(check: Callable[[_Engine], None], config: KVTransferConfig, layout: KVCacheLayout) -> str | None:
    engine = _Engine(config, layout)
    try:
        check(engine)
        engine.close()
    except _Broken as broken:
        return str(broken)
    except Exception as error:  # a foreign class may raise anything
        return f"it raised {type(error).__name__}: {error}"
    return None


def describe(connector: type[KVConnector], problems: dict[str, str]) -> list[str]:
    """A line for each check."""
    names = [*CHECKS, "another layout"]
    lines = [f"{'FAILED' if name in problems else 'ok':6}  {name}" for name in names]
    return [f"{connector.__name__} of {connector.__module__}", *lines, *(f"{k}: {v}" for k, v in problems.items())]
