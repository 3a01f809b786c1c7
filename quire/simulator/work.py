"""StepWork: operations and bytes of a step, from the shape of the model. Pure; called once a step where that is on.

Counts what the algorithm needs: each weight that a step uses is read once, keys and values once for each row that
attends to them. Source: Kaplan et al. 2020, appendix B; experts as in `roofline`.
"""

from __future__ import annotations

from quire.config import QuireConfig
from quire.config.model_arch import ModelArch
from quire.core.memory_budget import bytes_per_weight
from quire.core.step_perf import DECODE, MIXED, PREFILL, StepPerf, WeightBytes
from quire.simulator.costs import StepShape
from quire.simulator.mixers import mixer_costs

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


class StepWork:
    """Of a resolved configuration, for each rank.

    Args:
        limits: operations and bytes a second that a rank's device does at most; 0 = not known.
        weights: that the first rank has loaded, whatever their formats; None = as the settings let one expect.
    """

    def __init__(
        self, config: QuireConfig, limits: tuple[float, float] = (0.0, 0.0), weights: WeightBytes | None = None
    ) -> None:
        assert config.arch is not None, "resolve() sets the architecture"
        self._limits = limits
        arch = config.arch
        self._num_ranks = config.parallel.num_ranks
        item_bytes = BYTES_OF.get(config.model.dtype, 4)
        kv_item_bytes = BYTES_OF.get(config.cache.kv_cache_dtype, item_bytes)
        self._mixers = mixer_costs(arch, kv_item_bytes, 1)
        self._head = arch.vocab_size * arch.table_size
        self._num_narrowed = _num_narrowed(arch)
        self._num_weights, self._num_active = arch.num_layer_weights, float(arch.num_active_layer_weights)
        if weights is None:
            of_layers, of_tables = bytes_per_weight(arch, item_bytes, config.model.quantization)
            self._layer_bytes = self._num_weights * of_layers / self._num_ranks
            self._head_bytes = self._head * of_tables / self._num_ranks
        else:
            self._layer_bytes, self._head_bytes = float(weights.layer_bytes), float(weights.head_bytes)
        if weights is not None and arch.config_json:  # of a class of transformers: its layers are a guess
            self._num_active *= weights.num_weights / self._num_weights
            self._num_weights = weights.num_weights

    def of(self, shape: StepShape, seconds: float) -> StepPerf:
        """A step that took `seconds`."""
        num_tokens, active, ranks = shape.num_tokens, self._num_active, self._num_ranks
        num_decoding = num_tokens - shape.num_prompt_tokens
        left_out = self._num_narrowed * (num_tokens - shape.num_sampling)
        flops = 2.0 * (num_tokens * active - left_out + shape.num_sampling * self._head)
        share_read = min(1.0, num_tokens * active / self._num_weights)  # experts of no token are not
        weights = share_read * self._layer_bytes + (self._head_bytes if shape.num_sampling else 0.0)
        read = write = 0.0
        for count, cost in self._mixers:
            context, pairs = float(shape.decode_context), shape.prompt_pairs
            seen = float(shape.prompt_context + shape.num_prompt_tokens)
            if cost.seen:
                context = min(context, num_decoding * cost.seen)
                pairs, seen = min(pairs, shape.num_prompt_tokens * cost.seen), min(seen, shape.num_rows * cost.seen)
            flops += count * (context * cost.decode_flops + pairs * cost.prompt_flops + num_tokens * cost.token_flops)
            states = shape.num_rows * cost.state_bytes
            read += count * ((context + seen) * cost.key_bytes + states)
            write += count * (num_tokens * cost.key_bytes + states)
        kind = DECODE if not shape.num_prompt_tokens else MIXED if num_decoding else PREFILL
        return StepPerf(kind, seconds, flops / ranks, weights + read / ranks, write / ranks, *self._limits)


def _num_narrowed(arch: ModelArch) -> int:
    """Weights of the last layer that are for sampled tokens alone: its feed-forward networks, where they follow its
    mixers (`models.decoder`).
    """
    last = arch.layers[-1]
    if arch.config_json or last.is_parallel or not last.leaves_stream:
        return 0
    of_mixers = sum(mixer.num_weights(arch.hidden_size) for _, mixer in last.mixers())
    return last.num_active_weights(arch.hidden_size) - of_mixers
