"""Contents of repositories, made of a seed: what matters of them are names, sizes and hashes."""

from __future__ import annotations

import random


def content(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


SAFETENSORS = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}', "tokenizer.json": content(3000, 1),
    "generation_config.json": b"{}", "model.safetensors": content(300_000, 2), "README.md": b"# A model",
    "modeling_own.py": b"raise SystemExit", "pytorch_model.bin": content(1000, 3), "onnx/model.json": b"{}",
    "consolidated.safetensors": content(1000, 4),
}  # fmt: skip
WANTED = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
GGUF = {
    "README.md": b"# Quantized", "tiny-Q4_K_M.gguf": content(40_000, 5), "tiny-Q8_0.gguf": content(70_000, 6),
    "mmproj-tiny-f16.gguf": content(900, 7), "BF16/tiny-BF16-00001-of-00002.gguf": content(50_000, 8),
    "BF16/tiny-BF16-00002-of-00002.gguf": content(20_000, 9),
}  # fmt: skip
