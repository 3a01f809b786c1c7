"""Random checkpoints with the shapes of real models, in Hugging Face format, for benchmarks.

The speed of an engine does not depend on what the weights say, so these stand in where the published files cannot be
had. Any engine that reads the format takes them: `config.json`, bfloat16 weights in `model.safetensors` (several files
for a large model), and a byte-level BPE tokenizer with a chat template. The same name and seed give the same weights
everywhere; the tokenizer is trained on the sources of the standard library that runs this.

    python benchmarks/checkpoints.py qwen-0.5b llama-1b qwen3.5-0.8b olmoe-1b-7b --out build/checkpoints

Needs torch, safetensors and tokenizers; memory for one file of a model (4 GB at most), disk for all of it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

WEIGHT_STD = 0.02
TOKENIZER_SIZE = 32000
CORPUS_BYTES = 12_000_000
MAX_FILE_BYTES = 2_000_000_000
ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM",
    "olmoe": "OlmoeForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
}  # fmt: skip
BOS, EOS = "<s>", "</s>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}<|{{ message['role'] }}|>{{ message['content'] }}" + EOS + "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one decoder, by the names of its config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projections of queries, keys and values have biases."""
        return self.model_type == "qwen2"

    def config(self) -> dict[str, object]:
        """What config.json says; the embedding is also the output layer."""
        biases = {} if self.has_qkv_bias else {"attention_bias": False, "mlp_bias": False}
        return {
            "architectures": [ARCHITECTURES[self.model_type]],
            **vars(self),
            **biases,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "attention_dropout": 0.0,
            "initializer_range": WEIGHT_STD,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": "bfloat16",
        }

    def tensor_sizes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and size of every tensor, in the order in which their values are drawn."""
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (self.hidden_size,)
            yield from self.mixer_sizes(layer, prefix)
            yield f"{prefix}.post_attention_layernorm.weight", (self.hidden_size,)
            yield from self.ffn_sizes(f"{prefix}.mlp")
        yield "model.norm.weight", (self.hidden_size,)

    def ffn_sizes(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Those of an MLP."""
        yield f"{prefix}.gate_proj.weight", (self.intermediate_size, self.hidden_size)
        yield f"{prefix}.up_proj.weight", (self.intermediate_size, self.hidden_size)
        yield f"{prefix}.down_proj.weight", (self.hidden_size, self.intermediate_size)

    def mixer_sizes(self, layer: int, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Those of a layer's attention."""
        q_size, kv_size = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (size, self.hidden_size)
            if self.has_qkv_bias:
                yield f"{prefix}.self_attn.{name}_proj.bias", (size,)
        yield f"{prefix}.self_attn.o_proj.weight", (self.hidden_size, q_size)


@dataclass(frozen=True, kw_only=True)
class HybridShape(Shape):
    """Qwen3.5: Gated DeltaNet, and attention with an output gate in every fourth layer."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int

    def config(self) -> dict[str, object]:
        """As `Shape`."""
        rope = {"rope_type": "default", "rope_theta": self.rope_theta, "partial_rotary_factor": 0.25}
        sections = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
        return {**super().config(), "full_attention_interval": 4, "rope_parameters": {**rope, **sections}}

    def mixer_sizes(self, layer: int, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Those of attention or of Gated DeltaNet."""
        hidden = self.hidden_size
        if layer % 4 == 3:
            q_size, kv_size = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
            for name, size in (("q", 2 * q_size), ("k", kv_size), ("v", kv_size)):
                yield f"{prefix}.self_attn.{name}_proj.weight", (size, hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (hidden, q_size)
            yield f"{prefix}.self_attn.q_norm.weight", (self.head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (self.head_dim,)
            return
        values = self.linear_num_value_heads * self.linear_value_head_dim
        channels = 2 * self.linear_num_key_heads * self.linear_key_head_dim + values
        yield f"{prefix}.linear_attn.in_proj_qkv.weight", (channels, hidden)
        yield f"{prefix}.linear_attn.in_proj_z.weight", (values, hidden)
        for name in ("a", "b"):
            yield f"{prefix}.linear_attn.in_proj_{name}.weight", (self.linear_num_value_heads, hidden)
        yield f"{prefix}.linear_attn.conv1d.weight", (channels, 1, self.linear_conv_kernel_dim)
        yield f"{prefix}.linear_attn.A_log", (self.linear_num_value_heads,)
        yield f"{prefix}.linear_attn.dt_bias", (self.linear_num_value_heads,)
        yield f"{prefix}.linear_attn.norm.weight", (self.linear_value_head_dim,)
        yield f"{prefix}.linear_attn.out_proj.weight", (hidden, values)


@dataclass(frozen=True, kw_only=True)
class WindowShape(Shape):
    """Gemma 3: windows on five of six layers, norms on heads, and before and after attention and MLP."""

    sliding_window: int

    def config(self) -> dict[str, object]:
        """As `Shape`."""
        own = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window_pattern": 6, "rope_local_base_freq": 1e4}
        return {**super().config(), **own, "query_pre_attn_scalar": self.head_dim}

    def mixer_sizes(self, layer: int, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Those of a layer's attention, and of the norms around the MLP."""
        yield from super().mixer_sizes(layer, prefix)
        for name in ("q", "k"):
            yield f"{prefix}.self_attn.{name}_norm.weight", (self.head_dim,)
        for name in ("pre", "post"):
            yield f"{prefix}.{name}_feedforward_layernorm.weight", (self.hidden_size,)


@dataclass(frozen=True, kw_only=True)
class MixtureShape(Shape):
    """OLMoE: MLPs are mixtures of experts, and all query heads and all key heads have a norm."""

    num_experts: int
    num_experts_per_tok: int

    def config(self) -> dict[str, object]:
        """As `Shape`; the output layer is a matrix of its own."""
        return {**super().config(), "tie_word_embeddings": False, "norm_topk_prob": False, "clip_qkv": None}

    def tensor_sizes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """As `Shape`."""
        yield from super().tensor_sizes()
        yield "lm_head.weight", (self.vocab_size, self.hidden_size)

    def mixer_sizes(self, layer: int, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Those of a layer's attention."""
        yield from super().mixer_sizes(layer, prefix)
        yield f"{prefix}.self_attn.q_norm.weight", (self.num_attention_heads * self.head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (self.num_key_value_heads * self.head_dim,)

    def ffn_sizes(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Those of a router and of experts."""
        yield f"{prefix}.gate.weight", (self.num_experts, self.hidden_size)
        for expert in range(self.num_experts):
            yield from super().ffn_sizes(f"{prefix}.experts.{expert}")


SHAPES: dict[str, Shape] = {
    "qwen-0.5b": Shape(
        model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, head_dim=64, max_position_embeddings=8192, rope_theta=1e6,
    ),
    "llama-1b": Shape(
        model_type="llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, max_position_embeddings=8192, rope_theta=5e5,
    ),
    "qwen3.5-0.8b": HybridShape(
        model_type="qwen3_5_text", vocab_size=248320, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24,
        num_attention_heads=8, num_key_value_heads=2, head_dim=256, max_position_embeddings=8192, rope_theta=1e7,
        linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    ),
    "olmoe-1b-7b": MixtureShape(
        model_type="olmoe", vocab_size=50304, hidden_size=2048, intermediate_size=1024, num_hidden_layers=16,
        num_attention_heads=16, num_key_value_heads=16, head_dim=128, max_position_embeddings=4096, rope_theta=1e4,
        num_experts=64, num_experts_per_tok=8,
    ),
    "olmoe-small": MixtureShape(
        model_type="olmoe", vocab_size=50304, hidden_size=1024, intermediate_size=512, num_hidden_layers=12,
        num_attention_heads=16, num_key_value_heads=16, head_dim=64, max_position_embeddings=4096, rope_theta=1e4,
        num_experts=64, num_experts_per_tok=8,
    ),
    "gemma3-1b": WindowShape(
        model_type="gemma3_text", vocab_size=262144, hidden_size=1152, intermediate_size=6912, num_hidden_layers=26,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256, max_position_embeddings=8192, rope_theta=1e6,
        sliding_window=512,
    ),
    "llama-tiny": Shape(
        model_type="llama", vocab_size=32000, hidden_size=256, intermediate_size=704, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=4096, rope_theta=1e4,
    ),
    "llama-wide-cache": Shape(
        model_type="llama", vocab_size=32000, hidden_size=256, intermediate_size=704, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=16, head_dim=128, max_position_embeddings=8192, rope_theta=1e4,
    ),
}  # fmt: skip


def random_weights(sizes: Iterable[tuple[str, tuple[int, ...]]], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Tensors in bfloat16: norms are 1, the rest is normal with mean 0."""
    weights = {}
    for name, size in sizes:
        if "norm" in name:
            weights[name] = torch.ones(size, dtype=torch.bfloat16)
        else:
            weights[name] = torch.empty(size).normal_(0.0, WEIGHT_STD, generator=generator).to(torch.bfloat16)
    return weights


def files_of(shape: Shape) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The tensors of each file, in order."""
    files: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    num_bytes = 0
    for name, size in shape.tensor_sizes():
        own_bytes = 2 * math.prod(size)
        if num_bytes + own_bytes > MAX_FILE_BYTES and files[-1]:
            files.append([])
            num_bytes = 0
        files[-1].append((name, size))
        num_bytes += own_bytes
    return files


def write_weights(shape: Shape, directory: Path, seed: int) -> int:
    """Write the weights, with an index where they are several files; returns the number of parameters."""
    generator = torch.Generator().manual_seed(seed)
    files, places, count = files_of(shape), {}, 0
    for number, sizes in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        weights = random_weights(sizes, generator)
        partial = directory / f"{name}.partial"
        save_file(weights, partial, metadata={"format": "pt"})
        partial.rename(directory / name)
        places.update(dict.fromkeys(weights, name))
        count += sum(tensor.numel() for tensor in weights.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": 2 * count}, "weight_map": places}
        write_json(directory / "model.safetensors.index.json", index)
    return count


def corpus() -> Iterator[str]:
    """ASCII sources of the standard library in a fixed order, about `CORPUS_BYTES` of them."""
    left = CORPUS_BYTES
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        data = path.read_bytes()
        if data.isascii() and left > 0:
            left -= len(data)
            yield data.decode("ascii")


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer: ids 0 and 1 begin and end a text, the next ones name the roles of a chat."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=[BOS, EOS, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_checkpoint(name: str, directory: Path, tokenizer: Tokenizer, seed: int = 0) -> int:
    """Write one model into `directory`; returns the number of its parameters."""
    shape = SHAPES[name]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": EOS,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.max_position_embeddings,
        },
    )
    write_json(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    write_json(directory / "config.json", shape.config())
    return write_weights(shape, directory, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=SHAPES, metavar="NAME", help=", ".join(SHAPES))
    parser.add_argument("--out", type=Path, default=Path("build/checkpoints"), help="each gets a folder of its name")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = train_tokenizer()
    for name in args.names:
        start = time.perf_counter()
        num_parameters = write_checkpoint(name, args.out / name, tokenizer, args.seed)
        seconds = time.perf_counter() - start
        print(f"{args.out / name}: {num_parameters / 1e6:.0f} million parameters, {seconds:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
