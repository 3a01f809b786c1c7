"""Makes the model that drafts, if one is configured: reads its files, checks that it fits the target, loads it.

Called by the worker when it starts: `find_drafter` before any weight is read, `load_drafter` after the target's are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from quire.config.engine import QuireConfig
from quire.config.model_arch import ModelArch
from quire.config.token_tree import Tree
from quire.core.draft_trees import MOST_TREES
from quire.core.kv_spec import KVCacheConfig, KVCacheSpec
from quire.distributed.parallel_context import ParallelContext
from quire.errors import ConfigError
from quire.layers.options import LayerOptions
from quire.models.aux_states import AuxStates
from quire.models.decoder import DecoderForCausalLM
from quire.models.heads.feature_head import FeatureHead
from quire.models.heads.files import read_head_config
from quire.models.heads.loading import HeadBuild, load_eagle, load_medusa, load_mtp, read_aux_layers
from quire.models.heads.medusa import MedusaHeads
from quire.models.hub import resolve_model_path
from quire.models.interfaces import CausalLM
from quire.models.loader import attention_params_of, load_model
from quire.models.model_dir import read_model_dir
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.device.draft_chains import ChainModel, DraftChains
from quire.worker.device.graphs import NoGraphs
from quire.worker.device.ops import DeviceOps
from quire.worker.drafting.chain import LEAST_CHANCE
from quire.worker.drafting.choice import DraftChoice, LikeliestTokens
from quire.worker.drafting.feature_model import FeatureGraphs, FeatureModel
from quire.worker.drafting.feature_passes import FeaturePasses
from quire.worker.drafting.feature_trees import FeatureTrees, scratch_of
from quire.worker.drafting.features import FeatureDrafts
from quire.worker.drafting.head_graphs import HeadGraphs
from quire.worker.drafting.inputs import DraftModel
from quire.worker.drafting.language_model import DraftLanguageModel
from quire.worker.drafting.medusa import MedusaDrafts, MedusaPass
from quire.worker.drafting.medusa_trees import MedusaTrees
from quire.worker.drafting.pages import DraftPages
from quire.worker.drafting.passes import DraftPasses, LanguageChain
from quire.worker.group_drafts import GroupDrafts
from quire.worker.group_steps import GroupStep
from quire.worker.kv_cache_tensors import CachePool
from quire.worker.setup import WorkerSetup
from quire.worker.warmup import capture_steps, warm_up

PREFIX = "draft."
"""Of the names of a drafting model's layers among all layers with a cache."""

MAX_FILL_TOKENS = 1024
"""Most missing tokens that are computed beside one step: as long as a step of the target may take."""


CAPTURE_S = 1.0
"""Of a start, at most, in which chains of drafts are captured, and the chain that this ends in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSettings:
    """What is configured.

    Attributes:
        method: "draft_model", "eagle", "eagle3", "medusa" or "mtp".
        model, revision: directory, file or hub id; None = the target's own checkpoint.
        max_model_len: longest sequence that is drafted for; None = the model's own.
        num_tokens: most drafts of a row at once.
        tree: paths that heads draft; empty = a chain.
    """

    method: str
    num_tokens: int
    model: str | None = None
    revision: str | None = None
    max_model_len: int | None = None
    tree: Tree = ()


def drafter_settings(config: QuireConfig) -> DrafterSettings | None:
    """The drafting model that the configuration names; None = there is none.

    Raises:
        ConfigError: it is to be quantized.
    """
    found = config.speculative
    if found is None or found.model_method is None:
        return None
    if found.quantization is not None:
        raise _error("the drafting model is stored as the target is", "leave out quantization")
    return DrafterSettings(
        method=found.model_method, num_tokens=found.num_tokens, model=found.model, revision=found.revision,
        max_model_len=found.max_model_len, tree=found.tree,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DrafterFiles:
    """A drafting model before its weights are read.

    Attributes:
        method: one of `config.speculative.MODEL_METHODS`.
        path: directory or file; of heads that ship with the target, the target's.
        arch: of a language model; None = heads.
        max_model_len: its longest sequence, in tokens.
        num_tokens: most drafts of a row at once.
        tree: paths that heads draft.
    """

    method: str
    path: Path
    arch: ModelArch | None
    max_model_len: int
    num_tokens: int
    tree: Tree = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCache:
    """What a drafting model is given of the allocated KV cache.

    Attributes:
        by_layer: every layer's cache, by its name among all.
        scratch_ids: [num_scratch_blocks] integers; blocks that no request has, for trees of drafts of one step.
    """

    config: KVCacheConfig
    by_layer: Mapping[str, torch.Tensor]
    pools: Sequence[CachePool]
    block_tables: BlockTables
    scratch_ids: np.ndarray

    def attention(self, layer_names: Sequence[str]) -> AttentionGroups:
        """What computes steps of these layers alone."""
        return AttentionGroups(self.config, layer_names, [self.by_layer[name] for name in layer_names], self.pools)


class Drafter(Protocol):
    """A loaded model that drafts once there is a KV cache.

    Attributes:
        aux: where the target is to leave states of some layers; None = nowhere.
    """

    aux: AuxStates | None

    def kv_cache_specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        """Name among all layers with a cache -> what it needs; names begin with `PREFIX`."""
        ...

    def stored_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that holds weights."""
        ...

    def start(self, cache: DrafterCache, choice: DraftChoice, group: GroupDrafts | None = None) -> DraftModel:
        """What drafts, warmed up; its tokens are chosen by `choice`, its passes computed by all ranks of `group`."""
        ...


def find_drafter(setup: WorkerSetup) -> DrafterFiles | None:
    """The files of the configured drafting model; None = no method needs one.

    Raises:
        ConfigError: it cannot draft for the target.
        ModelError: it is no model directory, or of an unknown architecture.
    """
    config = drafter_settings(setup.config)
    if config is None:
        return None
    method, longest = config.method, setup.limits.max_model_len
    if config.model is None:  # the configuration requires it where it is needed
        return DrafterFiles(method, Path(setup.config.model_path), None, longest, config.num_tokens)
    path = Path(resolve_model_path(config.model, config.revision, setup.config.load.download_dir))
    if method != "draft_model":
        return DrafterFiles(method, path, None, longest, config.num_tokens, config.tree)
    arch = read_model_dir(path).arch()
    _check_draft_model(arch, setup)
    longest = min(arch.max_position_embeddings, longest)
    return DrafterFiles(method, path, arch, min(config.max_model_len or longest, longest), config.num_tokens)


def _check_draft_model(arch: ModelArch, setup: WorkerSetup) -> None:
    problem = ""
    if arch.vocab_size != setup.arch.vocab_size:
        problem = f"has a vocabulary of {arch.vocab_size} tokens, the target one of {setup.arch.vocab_size}"
    elif arch.has_states:
        problem = "has recurrent layers, which cannot take back a draft"
    elif arch.config_json:
        problem = f"is computed by a class of transformers ({arch.architecture})"
    if problem:
        raise _error(f"the draft model {problem}", "use a smaller model of the target's own series")


def _error(message: str, hint: str) -> ConfigError:
    return ConfigError(f"speculative_config: {message}", hint=hint, field="speculative_config")


def make_aux_states(files: DrafterFiles | None, drafter: Drafter | None, num_layers: int) -> AuxStates | None:
    """Where the target leaves states for the drafting model, which may be another stage's; None = nowhere."""
    if drafter is not None or files is None or files.method != "eagle3":
        return None if drafter is None else drafter.aux
    return AuxStates(read_aux_layers(read_head_config(files.path), num_layers))


def load_drafter(files: DrafterFiles | None, setup: WorkerSetup, ops: DeviceOps, target: CausalLM) -> Drafter | None:
    """The drafting model with its weights; None where there is none. Of several stages the first has it.

    Raises:
        ConfigError: the attention backend cannot serve it.
        ModelError: as `load_model`, or heads that are malformed.
    """
    if files is None:
        return None
    ops = ops.of_drafts()
    if files.arch is not None:
        return LanguageModelDrafter(_load_language_model(files, files.arch, setup, ops), files, setup, ops)
    if not isinstance(target, DecoderForCausalLM) or setup.arch.gguf_architecture:
        raise _error(f"method {files.method} needs a target that Quire computes itself", "use method draft_model")
    options = LayerOptions(setup.dtype, ops.device, ops.layers)
    build = HeadBuild(
        target=target, arch=setup.arch, model_path=Path(setup.config.model_path), options=options,
        backend=ops.attention, max_model_len=setup.limits.max_model_len,
    )  # fmt: skip
    if files.method == "medusa":
        return MedusaDrafter(load_medusa(files.path, build), target, ops, files.tree)
    if files.method == "mtp":
        head = load_mtp(build)
    else:
        head = load_eagle(files.path, build, is_eagle3=files.method == "eagle3")
    return FeatureDrafter(head, files, setup, ops)


def _load_language_model(files: DrafterFiles, arch: ModelArch, setup: WorkerSetup, ops: DeviceOps) -> CausalLM:
    for params in attention_params_of(arch):
        reasons = ops.attention.unsupported_reasons(params, setup.dtype, ops.device)
        if reasons:
            raise _error(
                f"the attention backend cannot serve the draft model: {'; '.join(reasons)}", "use another draft model"
            )
    return load_model(
        arch,
        str(files.path),
        setup.config.load,
        setup.dtype,
        ops.device,
        ParallelContext(setup.rank, setup.stage_size),
        ops.attention,
        files.max_model_len,
        setup.config.model.seed,
        ops.layers,
        packing_cache=ops.packing_cache,
    )


class LanguageModelDrafter:
    """A draft model: implements `Drafter`."""

    aux: AuxStates | None = None

    def __init__(self, model: CausalLM, files: DrafterFiles, setup: WorkerSetup, ops: DeviceOps) -> None:
        self._model = model
        self._files = files
        self._setup = setup
        self._ops = ops

    def kv_cache_specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        """As `Drafter`. No block is freed behind a window: what is missing there may yet be filled."""
        return _prefixed(self._model.kv_cache_specs(block_size))

    def stored_tensors(self) -> dict[str, torch.Tensor]:
        """As `Drafter`."""
        return self._model.stored_tensors()

    def start(self, cache: DrafterCache, choice: DraftChoice, group: GroupDrafts | None = None) -> DraftModel:
        """As `Drafter`."""
        setup, ops, longest = self._setup, self._ops, self._files.max_model_len
        attention = cache.attention(list(self.kv_cache_specs(setup.block_size)))
        tables = cache.block_tables if group is None else group.tables
        graphs = ops.make_graphs(self._model, attention, tables)
        warm_up(self._model, attention, cache.block_tables, min(setup.block_size, longest), ops.device)
        passes: DraftPasses | GroupDrafts = DraftPasses(self._model, attention, cache.block_tables, graphs, ops.device)
        if group is not None:
            step = GroupStep(self._model, graphs, attention, group.tables, ops.device)
            group.start(lambda hidden, num_places: self._model.compute_logits(hidden), step)
            passes = group
        elif not any(cache.block_tables.has_state):
            capture_steps(graphs, ops.device)
        limits = setup.limits
        most_fill = max(min(MAX_FILL_TOKENS, limits.max_num_batched_tokens), limits.max_num_seqs)
        pages = _pages(cache, attention, self._files)
        at_once = None
        if group is None and self._files.arch is not None:
            chain = LanguageChain(self._model, self._files.arch.hidden_size, setup.dtype)
            at_once = _drafts_at_once(chain, attention, cache, choice, ops, self._files.num_tokens)
        chance = _least_chance(setup)
        return DraftLanguageModel(passes, pages, choice, ops.device, longest, most_fill, chance, at_once)


class FeatureDrafter:
    """An EAGLE head, or one that ships with the target: implements `Drafter`."""

    def __init__(self, head: FeatureHead, files: DrafterFiles, setup: WorkerSetup, ops: DeviceOps) -> None:
        self._head = head
        self._files = files
        self._setup = setup
        self._ops = ops
        self.aux = AuxStates(head.aux_layers) if head.aux_layers else None

    def kv_cache_specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        """As `Drafter`."""
        return _prefixed(self._head.kv_cache_specs(block_size))

    def stored_tensors(self) -> dict[str, torch.Tensor]:
        """As `Drafter`."""
        return self._head.stored_tensors()

    def start(self, cache: DrafterCache, choice: DraftChoice, group: GroupDrafts | None = None) -> DraftModel:
        """As `Drafter`."""
        setup, ops = self._setup, self._ops
        attention = cache.attention(list(self.kv_cache_specs(setup.block_size)))
        pages, longest = _pages(cache, attention, self._files), setup.limits.max_model_len
        graphs, tables = None, cache.block_tables if group is None else group.tables
        at_once = None
        if self._head.is_native:
            graphs = HeadGraphs(self._head, ops.make_graphs, attention, tables, ops.device)
        if group is not None:
            model = FeatureModel(self._head)
            of_model = NoGraphs() if graphs is None else FeatureGraphs(model, graphs)
            step = GroupStep(model, of_model, attention, group.tables, ops.device)
            group.start(model.compute_logits, step, model.give)
            graphs = None
        elif graphs is not None:
            graphs.capture()
            if not self._files.tree:
                at_once = _drafts_at_once(self._head, attention, cache, choice, ops, self._files.num_tokens)
        passes = FeaturePasses(self._head, attention, cache.block_tables, ops.device, graphs, group)
        trees, chance = self._make_trees(passes, cache), _least_chance(setup)
        return FeatureDrafts(self._head, passes, pages, choice, longest, self.aux, chance, at_once, trees)

    def _make_trees(self, passes: FeaturePasses, cache: DrafterCache) -> FeatureTrees | None:
        setup, tree = self._setup, self._files.tree
        if not tree:
            return None
        scratch = scratch_of(cache.scratch_ids, tree, min(MOST_TREES, setup.limits.max_num_seqs), setup.block_size)
        return FeatureTrees(self._head, tree, passes, self._ops.sampling, scratch, _least_chance(setup))


class MedusaDrafter:
    """Medusa heads: implements `Drafter`."""

    aux: AuxStates | None = None

    def __init__(self, heads: MedusaHeads, target: CausalLM, ops: DeviceOps, tree: Tree) -> None:
        self._heads = heads
        self._target = target
        self._ops = ops
        self._tree = tree

    def kv_cache_specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        """As `Drafter`: they keep nothing."""
        return {}

    def stored_tensors(self) -> dict[str, torch.Tensor]:
        """As `Drafter`."""
        packed = dict(self._heads.named_buffers())
        return {name: tensor.detach() for name, tensor in {**dict(self._heads.named_parameters()), **packed}.items()}

    def start(self, cache: DrafterCache, choice: DraftChoice, group: GroupDrafts | None = None) -> DraftModel:
        """As `Drafter`."""
        compute_logits, heads, ops, at_once = self._target.compute_logits, self._heads, self._ops, None
        if group is not None:  # other ranks have no logits that a captured step could be compared by
            group.start(lambda hidden, num: heads.logits(heads.states(hidden)[:, :num], compute_logits))
        if self._tree:
            return MedusaTrees(heads, compute_logits, ops.sampling, self._tree, group)
        if group is None and heads.arch.shares_projection and heads.arch.num_blocks == 1:
            model = MedusaPass(heads, compute_logits)
            at_once = _drafts_at_once(model, cache.attention([]), cache, choice, ops, num_passes=1)
        return MedusaDrafts(heads, compute_logits, choice, at_once, group)


def _drafts_at_once(
    model: ChainModel,
    attention: AttentionGroups,
    cache: DrafterCache,
    choice: DraftChoice,
    ops: DeviceOps,
    num_passes: int,
) -> DraftChains | None:
    """Captured chains of a model that drafts its likeliest tokens; None = each pass is a call."""
    if ops.make_chains is None or not isinstance(choice, LikeliestTokens):
        return None
    chains = ops.make_chains(model, attention, cache.block_tables, num_passes)
    chains.capture(CAPTURE_S)
    return chains


def _least_chance(setup: WorkerSetup) -> float:
    """Of chains of drafts: where all are verified that are proposed, as many are proposed as were asked for."""
    speculative = setup.config.speculative
    return LEAST_CHANCE if speculative is not None and speculative.enable_adaptive_verification else 0.0


def _prefixed(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Specs under their names among all layers; whole sequences are kept."""
    return {PREFIX + name: spec.unwindowed() for name, spec in specs.items()}


def _pages(cache: DrafterCache, attention: AttentionGroups, files: DrafterFiles) -> DraftPages:
    return DraftPages(cache.config, sorted(attention.groups), cache.block_tables, files.num_tokens)
