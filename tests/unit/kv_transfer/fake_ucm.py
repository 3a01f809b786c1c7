"""A package `ucm` whose `UCMConnector` has UCM 0.8.1's calls and a directory as its store.

It imports the names of vLLM that UCM imports, and goes by vLLM's order of calls as UCM does: a lookup leaves a token, a
step's metadata loads what was found behind the local hit and dumps what the step computes, a dump ends in get_finished.
"""

SOURCE = r"""
import ctypes, hashlib, os, pickle
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, KVConnectorWorkerMetadata, SupportsHMA,
)
from vllm.distributed.parallel_state import get_world_group
from vllm.forward_context import ForwardContext
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus


class Meta(KVConnectorMetadata):
    def __init__(self, requests):
        self.requests = requests


class UCMConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        assert extra["use_layerwise"] is False and extra["enable_event_sync"] is False
        assert current_platform.device_type == "npu" and torch.npu.current_device() == 0
        store = extra["ucm_connectors"][0]["ucm_connector_config"]
        self.root, self.size = store["storage_backends"], vllm_config.cache_config.block_size
        if not os.path.isdir(self.root):
            raise RuntimeError(f"no directory {self.root}")
        self.name = vllm_config.model_config.model
        self.meta, self.dumping, self.errors = {}, set(), set()

    def hashes(self, request):
        parent, names = self.name.encode(), []
        for start in range(0, len(request.all_token_ids) - self.size + 1, self.size):
            keys, _ = generate_block_hash_extra_keys(request, start, start + self.size, 0)
            tokens = tuple(request.all_token_ids[start : start + self.size])
            parent = hashlib.md5(pickle.dumps((parent, tokens, keys))).digest()
            names.append(parent.hex())
        return names

    def path(self, name):
        return os.path.join(self.root, name)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        assert num_computed_tokens % self.size == 0 and request.status is RequestStatus.WAITING
        names, first = self.hashes(request), num_computed_tokens // self.size
        total = first
        while total < len(names) and os.path.exists(self.path(names[total])):
            total += 1
        tokens = min((total - first) * self.size, request.num_tokens - 1 - first * self.size)
        if first < len(names):
            self.meta[request.request_id] = [names, first, total, first * self.size + tokens]
        return (tokens if first < len(names) else 0), False

    def build_connector_meta(self, step):
        requests = {}
        for new in step.scheduled_new_reqs:
            if new.req_id in self.meta:
                names, first, total, processed = self.meta[new.req_id]
                ids, num = new.block_ids[0], step.num_scheduled_tokens[new.req_id]
                start, end = processed // self.size, (processed + num) // self.size
                loads = list(zip(names[first:total], ids[first:total]))
                requests[new.req_id] = loads, list(zip(names[start:end], ids[start:end]))
        for request_id in step.finished_req_ids:
            self.meta.pop(request_id, None)
        self.dumping.update(name for name, (_, dumps) in requests.items() if dumps)
        assert not step.preempted_req_ids and not step.scheduled_cached_reqs.req_ids
        return Meta(requests)

    def request_finished(self, request, block_ids):
        is_dumping = request.request_id in self.dumping
        self.dumping.discard(request.request_id)
        return is_dumping, None

    def update_connector_output(self, output):
        assert output.kv_connector_worker_meta is None

    def register_kv_caches(self, kv_caches):
        ((name, tensor),) = kv_caches.items()
        assert extract_layer_index(name) == 0 and isinstance(tensor, torch.Tensor) and tensor.dim() == 3
        self.base = tensor[0].data_ptr()
        self.bytes = tensor.shape[1] * tensor.shape[2] * tensor.element_size()
        assert self.bytes % 4096 == 0

    def start_load_kv(self, context):
        for loads, _ in self._get_connector_metadata().requests.values():
            for name, block in loads:
                try:
                    data = open(self.path(name), "rb").read()
                    ctypes.memmove(self.base + block * self.bytes, data, len(data))
                except OSError:
                    self.errors.add(block)

    def wait_for_save(self):
        for _, dumps in self._get_connector_metadata().requests.values():
            for name, block in dumps:
                assert block, "the null block"
                with open(self.path(name), "wb") as file:
                    file.write(ctypes.string_at(self.base + block * self.bytes, self.bytes))

    def get_finished(self, finished_req_ids):
        return finished_req_ids or None, None

    def get_block_ids_with_load_errors(self):
        errors, self.errors = self.errors, set()
        return errors

    def build_connector_worker_meta(self):
        return None
"""
