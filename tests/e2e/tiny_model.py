"""A tiny Llama directory written by hand (no transformers), and the pieces to spoil it with.

Every directory also holds Python files and a pickle that would create the file `marker` if they were ever run.
"""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 16, 32, 1, 2, 1
HEAD_SIZE = HIDDEN // HEADS
MAX_LEN = 128
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HOSTILE_FILES = (
    "modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "setup.py", "conftest.py", "__init__.py",
    "sitecustomize.py",
)  # fmt: skip

Tensors = dict[str, np.ndarray]


class Evil:
    """Creates the marker when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


def vocabulary() -> list[str]:
    """One token per byte in byte-level form, then three special tokens."""
    from tokenizers import pre_tokenizers

    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "<unk>"]


VOCAB_SIZE = 256 + 3


def config_json() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 256, "eos_token_id": 257,
        "torch_dtype": "float32", "tie_word_embeddings": False,
    }  # fmt: skip


def tokenizer_json() -> dict[str, Any]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    return content


def tensors() -> Tensors:
    rng = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB_SIZE, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_SIZE),
            f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def layout(arrays: Tensors) -> tuple[dict[str, Any], bytes]:
    """The header object and the data section of a safetensors file."""
    header: dict[str, Any] = {}
    data = b""
    for name, array in arrays.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    return header, data


def pack(header: Any, data: bytes) -> bytes:
    """The bytes of a safetensors file."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def write_tiny_model(directory: Path, marker: Path) -> Path:
    """A directory that loads; `marker` is what its hostile files would create."""
    directory.mkdir(parents=True)
    write_json(directory / "config.json", config_json())
    write_json(directory / "generation_config.json", {"eos_token_id": 257})
    write_json(directory / "tokenizer.json", tokenizer_json())
    write_json(
        directory / "tokenizer_config.json",
        {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE,
         "auto_map": {"AutoTokenizer": "tokenization_evil.EvilTokenizer"}},
    )  # fmt: skip
    (directory / "model.safetensors").write_bytes(pack(*layout(tensors())))
    for name in HOSTILE_FILES:
        (directory / name).write_text(f"open({str(marker)!r}, 'w').close()\n")
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(marker)))
    return directory
