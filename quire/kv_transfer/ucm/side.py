"""The program that hosts UCM's `UCMConnector`, unmodified, in a process and a Python of its own (0.8.1 needs 3.12).

Started by `link.SideProcess` as a file; imports nothing of Quire and no torch. It plays the engine: it makes both
halves of the connector over stand-ins of the names of vLLM and torch that they import, and drives them for one request
at a time. Memory is the staged blocks of Quire's process, which it maps. Requests and answers are lines of JSON.

The stand-ins are in this process alone. A Python that has vLLM is refused: nothing here takes the place of that.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import importlib.util
import json
import mmap
import os
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

ELEMENT_BYTES = 1


# --- names of vLLM and torch ---


class _Unused:
    """Stands for a class that is looked at and never made."""


class _Device:
    def __init__(self, name: str = "cpu") -> None:
        self.type = name


class _Tensor:
    """Blocks in mapped memory, as UCM looks at a tensor: [num_blocks, block_size, width] of bytes."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: object) -> None:
        self.shape, self.dtype, self.device, self._address = shape, dtype, _Device(), address

    def dim(self) -> int:
        return len(self.shape)

    def element_size(self) -> int:
        return ELEMENT_BYTES

    def data_ptr(self) -> int:
        return self._address

    def __getitem__(self, index: int) -> _Tensor:
        stride = ELEMENT_BYTES
        for size in self.shape[1:]:
            stride *= size
        return _Tensor(self._address + index * stride, self.shape[1:], self.dtype)


class _KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class _RequestStatus(enum.IntEnum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()


class _KVConnectorBase:
    """What UCM uses of vLLM's `KVConnectorBase_V1`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
        self._connector_metadata: Any = None

    @property
    def role(self) -> Any:
        return self._role

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> Any:
        return self._connector_metadata

    def shutdown(self) -> None:
        return None


def _layer_index(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())


def _extra_keys(request: Any, start: int, end: int, mm_index: int) -> tuple[tuple[Any, ...] | None, int]:
    """vLLM's: the salt belongs to the first block, and by the chain to all."""
    return ((request.cache_salt,) if start == 0 and request.cache_salt else None), mm_index


def _world_group() -> Any:
    return SimpleNamespace(
        rank=0, local_rank=0, rank_in_group=0, world_size=1, broadcast_object=lambda value, src=0: value
    )


VLLM: Mapping[str, Mapping[str, object]] = {
    "vllm": {"__version__": "0.33.0"},
    "vllm.config": {"VllmConfig": _Unused},
    "vllm.forward_context": {"ForwardContext": _Unused},
    "vllm.logger": {},
    "vllm.distributed": {},
    "vllm.distributed.parallel_state": {"get_world_group": _world_group},
    "vllm.distributed.kv_transfer": {},
    "vllm.distributed.kv_transfer.kv_connector": {},
    "vllm.distributed.kv_transfer.kv_connector.v1": {},
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": _KVConnectorBase, "KVConnectorMetadata": type("KVConnectorMetadata", (), {}),
        "KVConnectorWorkerMetadata": type("KVConnectorWorkerMetadata", (), {}), "KVConnectorRole": _KVConnectorRole,
        "SupportsHMA": type("SupportsHMA", (), {}),
    },
    "vllm.model_executor": {},
    "vllm.model_executor.models": {},
    "vllm.model_executor.models.utils": {"extract_layer_index": _layer_index},
    "vllm.platforms": {
        "current_platform": SimpleNamespace(is_cuda_alike=lambda: False, is_cuda=lambda: False, device_type="npu")
    },
    "vllm.v1": {},
    "vllm.v1.core": {},
    "vllm.v1.core.sched": {},
    "vllm.v1.core.sched.output": {"SchedulerOutput": _Unused},
    "vllm.v1.core.kv_cache_utils": {"generate_block_hash_extra_keys": _extra_keys},
    "vllm.v1.outputs": {"KVConnectorOutput": _Unused},
    "vllm.v1.request": {"RequestStatus": _RequestStatus, "Request": _Unused},
    "vllm.v1.kv_cache_interface": {
        name: type(name, (), {})
        for name in ("FullAttentionSpec", "KVCacheSpec", "MambaSpec", "MLAAttentionSpec", "UniformTypeKVCacheSpecs")
    },
}  # fmt: skip
"""Module -> its names. The connector refuses platforms that are neither CUDA's nor "npu", and does nothing with it."""


def _torch() -> dict[str, dict[str, object]]:
    uint8 = SimpleNamespace(itemsize=ELEMENT_BYTES)
    npu = {"current_device": lambda: 0, "device": _Device, "synchronize": lambda: None}
    names = {"Tensor": _Tensor, "dtype": SimpleNamespace, "device": _Device, "uint8": uint8, "Event": _Unused}
    return {"torch": names, "torch.npu": npu}


def install(modules: Mapping[str, Mapping[str, object]]) -> None:
    """Make these modules importable in this process."""
    for name, names in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(names, __path__=[])
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


# --- the engine's part ---


@dataclass
class _Request:
    """What UCM reads of a request."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None
    status: Any
    mm_features: tuple[Any, ...] = ()
    lora_request: Any = None
    prompt_embeds: Any = None
    kv_transfer_params: Any = None
    max_tokens: int = 1

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    prompt_token_ids = property(lambda self: self.all_token_ids)
    num_prompt_tokens = num_tokens


@dataclass
class _Step:
    """What UCM reads of a scheduled step."""

    scheduled_new_reqs: list[Any] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    scheduled_cached_reqs: Any = field(
        default_factory=lambda: SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    )


class Engine:
    """Both halves of UCM's connector, driven for one request at a time.

    Args:
        memory: the staged blocks; None = lookups alone.
        options: the first line: `model`, `block_size`, `width` (bytes per token), `num_slots`, `engine_id`, `config`.
    """

    def __init__(self, memory: mmap.mmap | None, options: Mapping[str, Any]) -> None:
        connector: Any = importlib.import_module("ucm.integration.vllm.ucm_connector").UCMConnector
        self._block_size = int(options["block_size"])
        self._number = 0
        config = _vllm_config(options, collects=memory is not None)
        cache = SimpleNamespace(num_blocks=options["num_slots"], kv_cache_groups=[], kv_cache_tensors=[])
        self._role = sys.modules["vllm.distributed.kv_transfer.kv_connector.v1.base"].KVConnectorRole
        self._waiting = sys.modules["vllm.v1.request"].RequestStatus.WAITING
        self._back: Any = None
        if memory is not None:  # first: the scheduler's half reads what it publishes
            import ctypes

            self._back = connector(config, self._role.WORKER, cache)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            shape = (int(options["num_slots"]), self._block_size, int(options["width"]))
            self._back.register_kv_caches({"model.layers.0": _Tensor(address, shape, config.model_config.dtype)})
        self._front = connector(config, self._role.SCHEDULER, cache)

    def _request(self, tokens: list[int], salt: str | None) -> _Request:
        self._number += 1
        return _Request(f"side-{os.getpid()}-{self._number}", tokens, salt, self._waiting)

    def lookup(self, tokens: list[int], salt: str | None) -> dict[str, Any]:
        """How many tokens from the first on it has, in whole blocks."""
        request = self._request([*tokens, 0], salt)  # one more: of a whole prompt UCM leaves a token
        num_tokens, _ = self._front.get_num_new_matched_tokens(request, 0)
        self._forget(request)
        return {"tokens": num_tokens // self._block_size * self._block_size}

    def load(self, tokens: list[int], salt: str | None, first: int, slots: list[int]) -> dict[str, Any]:
        """Put the blocks behind the `first` tokens into slots; the answer names slots that are not filled."""
        request = self._request([*tokens, 0], salt)
        num_tokens, _ = self._front.get_num_new_matched_tokens(request, first)
        num_found = num_tokens // self._block_size
        self._step(request, [*([0] * (first // self._block_size)), *slots], 0)
        lost = set(slots[num_found:]) | set(self._back.get_block_ids_with_load_errors())
        self._report()
        self._forget(request)
        return {"lost": sorted(lost)}

    def save(self, tokens: list[int], salt: str | None, first: int, slots: list[int]) -> dict[str, Any]:
        """Keep the blocks in slots, those behind the `first` tokens; the answer says whether all are kept."""
        request = self._request([*tokens, 0], salt)
        num_tokens, _ = self._front.get_num_new_matched_tokens(request, first)
        start = first + num_tokens // self._block_size * self._block_size
        if start < len(tokens):
            self._front.get_num_new_matched_tokens(request, start)  # as if these were in the cache: none is loaded
            self._step(request, [*([0] * (first // self._block_size)), *slots], len(tokens) - start)
            self._front.request_finished(request, slots)
            self._back.get_finished({request.request_id})
            self._report()
        self._forget(request)
        return {"is_kept": self.lookup(tokens, salt)["tokens"] >= len(tokens)}

    def _step(self, request: _Request, block_ids: list[int], num_tokens: int) -> None:
        new = SimpleNamespace(req_id=request.request_id, block_ids=(block_ids,))
        step = _Step(scheduled_new_reqs=[new], num_scheduled_tokens={request.request_id: num_tokens})
        self._back.bind_connector_metadata(self._front.build_connector_meta(step))
        self._back.start_load_kv(None)
        self._back.wait_for_save()

    def _report(self) -> None:
        meta = self._back.build_connector_worker_meta()
        self._front.update_connector_output(SimpleNamespace(kv_connector_worker_meta=meta))
        self._back.clear_connector_metadata()

    def _forget(self, request: _Request) -> None:
        self._front.build_connector_meta(_Step(finished_req_ids={request.request_id}))


def _vllm_config(options: Mapping[str, Any], *, collects: bool) -> Any:
    """What UCM reads of vLLM's configuration; of several processes the first rank removes what is too much."""
    dtype = sys.modules["torch"].uint8
    text = SimpleNamespace(num_hidden_layers=1, model_type="quire")
    model = SimpleNamespace(
        model=options["model"], served_model_name=options["model"], dtype=dtype, is_deepseek_mla=False, use_mla=False,
        hf_config=text, hf_text_config=text, max_model_len=1 << 20, get_num_layers=lambda parallel: 1,
        get_num_kv_heads=lambda parallel: 1, get_head_size=lambda: int(options["width"]),
    )  # fmt: skip
    parallel = SimpleNamespace(
        rank=0, world_size=1, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_rank=0 if collects else 1,
        data_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1,
    )  # fmt: skip
    transfer = SimpleNamespace(
        engine_id=options["engine_id"], kv_connector_extra_config=dict(options["config"]), kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )  # fmt: skip
    return SimpleNamespace(
        model_config=model, parallel_config=parallel, kv_transfer_config=transfer, speculative_config=None,
        cache_config=SimpleNamespace(block_size=int(options["block_size"]), cache_dtype="auto"), additional_config={},
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True, max_num_batched_tokens=1 << 20),
        device_config=SimpleNamespace(device="cpu"), compilation_config=SimpleNamespace(), lora_config=None,
    )  # fmt: skip


def serve(requests: Any, answer: Callable[[dict[str, Any]], None], memory_fd: int) -> None:
    """Answer lines until there are no more; the first has the options."""
    options = json.loads(requests.readline())
    try:
        if importlib.util.find_spec("vllm") is not None:
            raise RuntimeError("this Python has vLLM; give side_python one that has UCM and no vLLM")
        install(VLLM)
        install(_torch())
        memory = None if memory_fd < 0 else mmap.mmap(memory_fd, 0)
        engine = Engine(memory, options)
    except Exception as error:  # whatever UCM raises is said where the engine was started
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    answer({})
    calls: dict[str, Callable[..., dict[str, Any]]] = {
        "lookup": engine.lookup,
        "load": engine.load,
        "save": engine.save,
    }
    for line in requests:
        message = json.loads(line)
        try:
            answer(calls[message.pop("call")](**message))
        except Exception as error:  # as above
            answer({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    """Run by `link.SideProcess`, with the descriptors of two pipes and of the memory."""
    parser = argparse.ArgumentParser()
    for name in ("requests", "answers", "memory"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--logs", required=True)
    args = parser.parse_args()
    os.environ.setdefault("UCM_LOG_PATH", args.logs)
    with os.fdopen(args.requests, "r") as requests, os.fdopen(args.answers, "w") as answers:

        def answer(message: dict[str, Any]) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        serve(requests, answer, args.memory)
        sys.stdout.flush()
        os._exit(0)  # UCM's threads may be waiting for its disk


if __name__ == "__main__":
    main()
