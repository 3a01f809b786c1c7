"""`load_model`: construction, dummy weights, names, tied embeddings, KV specs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.attention.backends.torch_reference import TorchReferenceBackend
from quire.config.families.registry import FAMILIES, parse_config
from quire.config.model import LoadConfig
from quire.config.model_arch import ModelArch
from quire.core.kv_spec import FullAttentionSpec, SlidingWindowSpec
from quire.distributed.parallel_context import ParallelContext
from quire.errors import ConfigError, ModelError, UnsupportedError
from quire.layers.weight_target import TensorTarget
from quire.models.decoder import DecoderForCausalLM
from quire.models.loader import load_model
from quire.models.registry import model_class


def make_arch(architecture: str = "LlamaForCausalLM", **fields: Any) -> ModelArch:
    raw = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    return parse_config({"architectures": [architecture], **raw, **fields})


def load(
    arch: ModelArch, *, seed: int = 0, dtype: torch.dtype = torch.float32, tp: int = 1, **kwargs: Any
) -> DecoderForCausalLM:
    backend = kwargs.pop("backend", TorchReferenceBackend())
    parallel = ParallelContext(0, tp)
    return load_model(
        arch, "", LoadConfig(load_format="dummy"), dtype, torch.device("cpu"), parallel, backend, 64, seed
    )


def tensors_of(model: DecoderForCausalLM) -> dict[str, torch.Tensor]:
    targets = model.checkpoint_targets()
    assert all(isinstance(target, TensorTarget) for target in targets.values())
    return {name: target.tensor for name, target in targets.items()}


def test_every_known_architecture_has_a_class():
    for name in FAMILIES:
        assert issubclass(model_class(name), DecoderForCausalLM)
    with pytest.raises(ModelError, match="not implemented\nhint: Quire has .*Qwen3ForCausalLM"):
        model_class("Qwen3ForCasualLM")


@pytest.mark.parametrize("architecture", [f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")])
def test_dummy_weights_depend_on_seed_and_name_alone(architecture: str):
    small = tensors_of(load(make_arch(architecture)))
    deep = tensors_of(load(make_arch(architecture, num_hidden_layers=3)))
    other = tensors_of(load(make_arch(architecture), seed=1))
    assert all(torch.equal(tensor, deep[name]) for name, tensor in small.items())
    matrices = [name for name, tensor in small.items() if tensor.dim() == 2]
    assert not any(torch.equal(small[name], other[name]) for name in matrices)
    assert not torch.equal(
        small["model.layers.0.self_attn.q_proj.weight"], small["model.layers.1.self_attn.q_proj.weight"]
    )
    assert bool((small["model.norm.weight"] == 1).all())


def test_dummy_factors_are_those_that_change_nothing():
    fields = {
        "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 16, "sliding_window": 16,
    }  # fmt: skip
    model = load(make_arch("Gemma4ForCausalLM", **fields))
    factors = {name: target for name, target in model.checkpoint_targets().items() if "norm" in name or "scal" in name}
    assert {name.rpartition("layers.0.")[2] for name in factors} >= {
        "layer_scalar", "router.scale", "router.per_expert_scale", "post_feedforward_layernorm_1.weight",
    }  # fmt: skip
    for name, target in factors.items():
        assert bool((target.stored() == 1).all()), name


def test_checkpoint_targets_cover_every_parameter_once():
    model = load(make_arch("Qwen2ForCausalLM"))
    tensors = tensors_of(model)
    assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in model.parameters())
    for tensor in tensors.values():
        tensor.fill_(3.0)
    assert all(bool((parameter == 3.0).all()) for parameter in model.parameters())


def test_tied_embeddings_share_storage_and_are_one_checkpoint_tensor():
    tied, apart = load(make_arch(tie_word_embeddings=True)), load(make_arch())
    assert tied.lm_head is tied.model.embed_tokens
    assert "lm_head.weight" not in tied.checkpoint_targets() and "lm_head.weight" in apart.checkpoint_targets()


def test_kv_cache_specs_are_in_layer_order_with_each_layers_window():
    arch = make_arch("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=9, max_window_layers=1)
    specs = load(arch, dtype=torch.bfloat16).kv_cache_specs(16)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype_bytes=2)
    assert list(specs) == ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
    windowed = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype_bytes=2, sliding_window=9)
    assert list(specs.values()) == [spec, windowed]


def test_a_backend_is_chosen_when_none_is_given():
    assert load(make_arch(), backend=None).kv_cache_specs(16)
    with pytest.raises(ConfigError, match="no attention backend"):
        load(make_arch(), backend=None, dtype=torch.float64)


def test_more_than_one_rank_is_refused():
    with pytest.raises(UnsupportedError, match="tensor_parallel_size=2"):
        load(make_arch(), tp=2)


def test_parameters_need_no_gradient_and_have_the_asked_dtype():
    model = load(make_arch(), dtype=torch.float16)
    assert all(not p.requires_grad and p.dtype == torch.float16 for p in model.parameters())
    assert not model.training
