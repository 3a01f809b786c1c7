"""A class of transformers as a model of Quire's: implements `models.interfaces.CausalLM`.

Made by the loader, for architectures that Quire has no family for or when `model_impl` asks for it. Owns the class's
modules; while a step runs, its attention layers read the step's context from `StepInput`.
"""

from __future__ import annotations

import json
import re
from contextlib import nullcontext

import torch
from torch import nn

from quire.attention.backend import AttentionParams
from quire.attention.context import ForwardContext
from quire.core.kv_spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from quire.layers.weight_target import WeightTarget
from quire.logger import get_logger
from quire.models.interfaces import BuildContext
from quire.models.transformers_backend.attention import LAYER, PagedLayer, StepInput
from quire.models.transformers_backend.classes import FAILURES, find_class, first_line, refusal
from quire.models.transformers_backend.even_rows import EvenRows
from quire.models.transformers_backend.head import logits_of, take_decoder
from quire.models.transformers_backend.modules import BothTargets, replace_modules, targets
from quire.models.transformers_backend.names import checkpoint_names
from quire.models.transformers_backend.probe import run_probe
from quire.models.transformers_backend.self_check import OwnTokenLayer, compare_batches

logger = get_logger(__name__)


class TransformersForCausalLM(nn.Module):
    """A decoder and its output projection, by a class of transformers.

    Args:
        build: `arch.config_json` is the model's config.json.

    Raises:
        UnsupportedError: the class cannot be served; says why. No weight has been read by then.
    """

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        arch, options = build.arch, build.options
        found = find_class(arch.architecture, json.loads(arch.config_json))
        self._names = checkpoint_names(found.config.model_type)
        if self._names.unknown:
            raise refusal(arch.architecture, f"its checkpoints are converted ({'; '.join(self._names.unknown)})")
        probe = run_probe(found, options.dtype)
        model = found.build(options.dtype)
        head = model.get_output_embeddings()
        self.tied = dict(model.all_tied_weights_keys)
        self._is_shared = replace_modules(model, model.get_input_embeddings(), head, bool(self.tied), options)
        self._prefix = model.base_model_prefix
        self.decoder, self.model = take_decoder(model), model
        self._step = StepInput()
        self._layers, self._is_uneven = probe.layers, probe.is_uneven
        self.dtype = options.dtype
        self._is_exact = options.kernels.packing() is not None  # torch kernels depend on the batch anyway
        self._architecture, self._is_checked = arch.architecture, False
        for index, (name, params) in enumerate(probe.layers.items()):
            module = self.decoder.get_submodule(name)
            module.__dict__[LAYER] = PagedLayer(params, build.backend, index, f"{self._prefix}.{name}", self._step)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] of the step's tokens; writes their keys and values."""
        if not self._is_checked:
            self._check()
        self._step.context = context
        try:
            return self._decode(input_ids, positions)
        finally:
            self._step.context = None

    def _decode(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with EvenRows() if self._is_uneven else nullcontext():
            output = self.decoder(
                input_ids=input_ids.long()[None], position_ids=positions.long()[None], use_cache=False, return_dict=True
            )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _check(self) -> None:
        """See that tokens of several requests can be in one step; the weights have been read."""
        self._is_checked = True
        paged = {name: self.decoder.get_submodule(name).__dict__[LAYER] for name in self._layers}
        try:
            for name, layer in paged.items():
                own = OwnTokenLayer(layer.params, layer.backend, layer.index, layer.name, layer.step)
                self.decoder.get_submodule(name).__dict__[LAYER] = own
            is_close, is_equal = compare_batches(self._decode)
        except FAILURES as error:
            raise refusal(self._architecture, f"its code fails on a step ({first_line(error)})") from error
        finally:
            for name, layer in paged.items():
                self.decoder.get_submodule(name).__dict__[LAYER] = layer
        if not is_close:
            raise refusal(self._architecture, "a token's result depends on other requests' tokens in the same step")
        if not is_equal and self._is_exact:
            logger.warning("%s rounds a token's result by what else is in the step", self._architecture)

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[num_logits, hidden_size] -> [num_logits, vocab_size] float32."""
        return logits_of(self.model, hidden_rows).float()

    def kv_cache_specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        """Layer name -> what it needs from the KV cache, in layer order."""
        return {f"{self._prefix}.{name}": self._spec(params, block_size) for name, params in self._layers.items()}

    def _spec(self, params: AttentionParams, block_size: int) -> KVCacheSpec:
        shape = {
            "block_size": block_size, "num_kv_heads": params.num_kv_heads, "head_size": params.head_size,
            "dtype_bytes": self.dtype.itemsize,
        }  # fmt: skip
        window = params.sliding_window
        return FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)

    def checkpoint_targets(self) -> dict[str, WeightTarget]:
        """The checkpoint's name of each tensor -> where it goes."""
        decoder = targets(self.decoder, self._prefix, self._names)
        found = {**dict(targets(self.model, "", self._names)), **dict(decoder)}
        for name, source in self.tied.items():
            target, source = found.pop(self._names.saved(name), None), self._names.saved(source)
            if target is not None and not self._is_shared:
                found[source] = BothTargets(found[source], target)
        return found

    def ignored_tensors(self) -> tuple[str, ...]:
        """Patterns of names that checkpoints may have and the model does not need."""
        tied = (f"^{re.escape(self._names.saved(name))}$" for name in self.tied)
        return (*tied, *(self.model._keys_to_ignore_on_load_unexpected or ()))

    def stored_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that holds weights, as stored, under this program's own names."""
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {name: tensor.detach() for name, tensor in tensors.items()}
