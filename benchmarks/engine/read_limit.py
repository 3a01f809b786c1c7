"""How fast one stream could decode if a step did nothing but read the weights once. Imported by `bench_cpu.py`."""

from __future__ import annotations

import json
import math
import statistics
import time
from pathlib import Path

import torch

from benchmarks.kernels.ceilings import Ceilings
from quire.errors import NativeLibraryError
from quire.formats.gguf_file import GGUFFile
from quire.kernels.native.runtime import NativeRuntime

READ_BYTES = 1 << 28
ROUNDS = 7
NUM_EXPERTS_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")


def read_bandwidth(num_threads: int) -> tuple[float, str]:
    """Bytes a second that so many threads read from memory, and what read them: the native library, or torch."""
    try:
        runtime = NativeRuntime(num_threads=num_threads)
    except NativeLibraryError:
        return _torch_read_bandwidth(num_threads), "torch"
    return Ceilings(runtime).measure("read", ROUNDS), "native kernel"


def weight_bytes(checkpoint: Path, quantization: str | None) -> int:
    """Bytes of weights that one token's step reads: every matrix once, in bfloat16 or as `quantization` stores it.

    Of a GGUF file they count as the file stores them. The token table counts when it is the output layer too; otherwise
    a step reads but a row of it. Of a layer's experts count as many as a token has. Routers are not quantized.
    """
    if checkpoint.suffix == ".gguf":
        return _gguf_bytes(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    is_tied = config.get("tie_word_embeddings", False)
    num_experts = next((config[name] for name in NUM_EXPERTS_NAMES if name in config), 0)
    share = config["num_experts_per_tok"] / num_experts if num_experts else 1.0
    total = 0.0
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            is_table = name.endswith("embed_tokens.weight")
            if name != "__metadata__" and (is_tied or not is_table):
                is_int8 = quantization == "int8" or is_table or name == "lm_head.weight"
                is_router = name.endswith((".gate.weight", ".router.weight"))
                num_bytes = _stored_bytes(entry["shape"], None if is_router else quantization, is_int8)
                total += num_bytes * share if ".experts." in name else num_bytes
    return round(total)


def _gguf_bytes(path: Path) -> int:
    """As the file stores them; of stacked experts, as many as a token has."""
    file = GGUFFile(path)
    architecture = file.metadata["general.architecture"]
    num_experts = int(file.metadata.get(f"{architecture}.expert_count", 0))
    share = int(file.metadata[f"{architecture}.expert_used_count"]) / num_experts if num_experts else 1.0
    total = 0.0
    for name, tensor in file.tensors.items():
        if name != "token_embd.weight" or "output.weight" not in file.tensors:
            total += tensor.num_bytes * (share if "_exps." in name else 1.0)
    return round(total)


def _stored_bytes(shape: list[int], quantization: str | None, is_int8: bool) -> float:
    count = math.prod(shape)
    if quantization is None or len(shape) < 2:
        return 2.0 * count
    if is_int8:
        return count + 4.0 * shape[0]
    group_size = next(size for size in (128, 64, 32, 1) if shape[1] % size == 0)
    return count * (0.5 + 2.0 / group_size)


def _torch_read_bandwidth(num_threads: int) -> float:
    """A sum over memory that no cache holds."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    data = torch.ones(READ_BYTES // 4)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    torch.set_num_threads(before)
    return READ_BYTES / statistics.median(times)
