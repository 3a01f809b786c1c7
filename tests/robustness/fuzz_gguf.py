"""Random damage to GGUF files: every one is refused by an error of the tree, or what it says is true of the file.

`make fuzz-gguf` runs 100,000 cases; a small version is in the suite. A case is a right file, of several architectures,
with some of its bytes changed, removed, doubled or overwritten by numbers that break programs. It is read as a file, as
a vocabulary, as the shape of a model. The last line is the number of cases that did anything else: crashes.
"""

from __future__ import annotations

import argparse
import random
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import QuireError
from quire.formats.gguf_header import GGUFStrings, read_header
from quire.models.gguf.registry import ARCHITECTURES, read_arch, read_config, read_generation
from tests.unit.formats.gguf_bytes import ARRAY, FLOAT32, STRING, UINT32, Parts, array, pair, string, tensor, text, u32

NASTY = (0, 1, 2, 7, 8, 9, 31, 32, 255, 256, 1 << 15, 1 << 16, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 32, 1 << 40,
         1 << 62, 1 << 63, (1 << 63) - 1, (1 << 64) - 32, (1 << 64) - 1)  # fmt: skip


def model_file(architecture: str) -> bytes:
    """A file with the keys of a small model, and the tensors by which families tell what they have."""

    def key(name: str, value: int) -> bytes:
        return pair(f"{architecture}.{name}", UINT32, u32(value))

    def number(name: str, value: float) -> bytes:
        return pair(f"{architecture}.{name}", FLOAT32, struct.pack("<f", value))

    pairs = (
        text("general.architecture", architecture), text("general.type", "model"), key("block_count", 2),
        key("context_length", 512), key("embedding_length", 32), key("feed_forward_length", 64),
        key("attention.head_count", 2), key("attention.head_count_kv", 1), key("attention.key_length", 16),
        key("attention.value_length", 16), key("rope.dimension_count", 16), number("rope.freq_base", 10000.0),
        number("attention.layer_norm_rms_epsilon", 1e-5), number("logit_scale", 0.5), key("expert_count", 4),
        key("expert_used_count", 2), key("attention.sliding_window", 128), key("ssm.inner_size", 64),
        key("ssm.state_size", 16), key("ssm.conv_kernel", 4), key("ssm.time_step_rank", 4), key("ssm.group_count", 1),
        text(f"{architecture}.rope.scaling.type", "yarn"), number("rope.scaling.factor", 4.0),
        key("rope.scaling.original_context_length", 128), number("general.sampling.temp", 0.7),
        pair("tokenizer.ggml.tokens", ARRAY, array(STRING, [string("a"), string("b"), string("c")])),
        pair("tokenizer.ggml.eos_token_id", UINT32, u32(2)),
    )  # fmt: skip
    entries = (
        tensor("token_embd.weight", [32, 8]), tensor("blk.0.attn_q.bias", [32], offset=1024),
        tensor("blk.0.ffn_gate_inp.weight", [32, 4], offset=1152),
        tensor("blk.1.ffn_up_exps.weight", [32, 16, 4], offset=1664),
        tensor("rope_freqs.weight", [8], offset=1664 + 8192),
    )  # fmt: skip
    return Parts(pairs=pairs, tensors=entries, data=bytes(1664 + 8192 + 32)).file()


SEEDS = [Parts().file(), *(model_file(architecture) for architecture in ARCHITECTURES)]


def damaged(rng: random.Random, data: bytes) -> bytes:
    """The file with one to four things wrong, most of them in its header."""
    broken = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place = rng.randrange(min(len(broken), 2500) or 1)
        kind = rng.randrange(6)
        if kind == 0:
            broken[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            broken[place : place + 8] = struct.pack("<Q", rng.choice(NASTY))
        elif kind == 2:
            broken[place : place + 4] = struct.pack("<I", rng.choice(NASTY) & 0xFFFFFFFF)
        elif kind == 3:
            del broken[place : place + rng.choice((1, 4, 8, 60))]
        elif kind == 4:
            broken[place:place] = broken[place : place + rng.choice((1, 4, 8, 60))]
        else:
            del broken[rng.randrange(len(broken) + 1) :]
    return bytes(broken)


class MemoryFile:
    """What `GGUFFile` is, of bytes: a file for each case would be slower."""

    def __init__(self, data: bytes) -> None:
        self.path = Path("case.gguf")
        self.header = read_header(data, "case.gguf")
        self.metadata, self.tensors = self.header.metadata, self.header.tensors
        self._data = data

    def data(self, name: str) -> memoryview:
        """The bytes of a tensor."""
        place = self.tensors[name]
        return memoryview(self._data)[place.offset : place.offset + place.num_bytes]


def check(data: bytes) -> bool:
    """Whether the file was read; False = refused.

    Raises:
        Exception: anything but an error of the tree, or an AssertionError where the reader was wrong.
    """
    try:
        file: Any = MemoryFile(data)
    except QuireError as error:
        assert error.hint and error.field, "an error names field and fix"
        return False
    for place in file.tensors.values():
        assert 0 < place.num_bytes <= len(data) and place.offset + place.num_bytes <= len(data), "within the file"
        assert place.num_bytes == place.format.row_bytes(place.shape[-1]) * int(np.prod(place.shape[:-1]))
    for value in file.metadata.values():
        if isinstance(value, GGUFStrings):
            try:
                assert all(isinstance(one, str) for one in value)
            except QuireError:
                continue
    try:
        config = read_config(file)
        read_generation(file)
        read_arch(file, config, "auto")
    except QuireError as error:
        assert error.hint and error.field, "an error names field and fix"
    return True


def run(num_cases: int, seed: int) -> int:
    """Number of crashes; each is printed with the number that repeats it."""
    crashes = refused = 0
    started = time.perf_counter()
    for case in range(num_cases):
        rng = random.Random(f"{seed}:{case}")
        data = damaged(rng, rng.choice(SEEDS))
        try:
            refused += not check(data)
        except Exception as error:  # what is looked for
            crashes += 1
            print(f"case {seed}:{case}: {type(error).__name__}: {error}", flush=True)
    print(f"{num_cases} cases in {time.perf_counter() - started:.0f} s: {refused} refused as files")
    return crashes


def undamaged() -> None:
    """Every seed is a right file, for files on disk too."""
    for data in SEEDS:
        assert check(data)


def main() -> int:
    """Run the cases; the last line is the number of crashes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    undamaged()
    crashes = run(args.cases, args.seed)
    print(crashes)
    return 1 if crashes else 0


if __name__ == "__main__":
    raise SystemExit(main())
