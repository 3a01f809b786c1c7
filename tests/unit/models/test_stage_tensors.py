"""A pipeline stage reads the tensors of its own layers, whatever a family calls them."""

from __future__ import annotations

import re

import pytest
import torch

from quire.attention.backends.torch_reference import TorchReferenceBackend
from quire.config.model import LoadConfig
from quire.core.kv_spec import KVCacheConfig, KVCacheGroupSpec
from quire.distributed.communicator import SingleCommunicator
from quire.distributed.parallel_context import ParallelContext
from quire.distributed.pipeline import PipelineStage
from quire.models.decoder import DecoderForCausalLM
from quire.models.loader import load_model
from tests.unit.models.test_loader import load, make_arch

FAMILIES = ("LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM", "OPTForCausalLM")
FIELDS = {
    "num_hidden_layers": 12, "num_local_experts": 12, "num_experts_per_tok": 2, "ffn_dim": 48,
    "word_embed_proj_dim": 32, "n_layer": 12, "n_head": 4, "n_embd": 32, "n_positions": 64,
}  # fmt: skip


def of_stage(architecture: str, number: int, layers: range) -> DecoderForCausalLM:
    stage = PipelineStage(communicator=SingleCommunicator(), number=number, num_stages=3, layers=layers)
    return load_model(
        make_arch(architecture, **FIELDS), "", LoadConfig(load_format="dummy"), torch.float32, torch.device("cpu"),
        ParallelContext(0, 1, stage), TorchReferenceBackend(), 64, 0,
    )  # fmt: skip


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_tensor_is_read_by_its_stage_and_passed_over_by_the_others(architecture: str):
    whole = load(make_arch(architecture, **FIELDS))
    borders = (range(1), range(1, 10), range(10, 12))
    stages = [of_stage(architecture, number, layers) for number, layers in enumerate(borders)]
    names = whole.checkpoint_targets().keys()
    assert names == set().union(*(stage.checkpoint_targets() for stage in stages))
    norms = set.intersection(*(set(stage.checkpoint_targets()) for stage in stages))
    assert sum(len(stage.checkpoint_targets()) for stage in stages) == len(names) + 2 * len(norms)
    for stage in stages:
        own = stage.checkpoint_targets().keys()
        passed = {name for name in names if any(re.search(pattern, name) for pattern in stage.ignored_tensors())}
        assert names - own <= passed and passed & own <= norms
    # What belongs to no layer is not passed over by the first stage, which would miss it in a wrong checkpoint.
    assert not any(re.search(pattern, "model.surplus.weight") for pattern in stages[0].ignored_tensors())


def test_a_stage_allocates_its_layers_under_the_numbers_of_all():
    specs = load(make_arch(num_hidden_layers=4)).kv_cache_specs(16)
    names, spec = tuple(specs), next(iter(specs.values()))
    groups = (KVCacheGroupSpec(layer_names=names[:2], spec=spec), KVCacheGroupSpec(layer_names=names[2:], spec=spec))
    whole = KVCacheConfig(num_blocks=10, groups=groups)
    part = whole.of_layers(names[:1])
    assert [group.layer_names for group in part.groups] == [names[:1], ()]
    assert part.num_blocks == 10 and 2 * part.total_bytes == whole.total_bytes
