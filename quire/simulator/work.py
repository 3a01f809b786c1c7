"""StepWork: operations and bytes of a step, from the shape of the model. Pure; called once a step where that is on.

Counts what the algorithm needs: each weight that a step uses is read once, keys and values once for each row that
attends to them. Source: Kaplan et al. 2020, appendix B; experts as in `roofline`.
"""

from __future__ import annotations

from quire.config import QuireConfig
from quire.config.model_arch import ModelArch
from quire.core.memory_budget import bytes_per_weight
from quire.core.step_perf import DECODE, MIXED, PREFILL, StepPerf
from quire.simulator.costs import StepShape
from quire.simulator.mixers import mixer_costs

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


class StepWork:
    """Of a resolved configuration, for each rank.

    Args:
        limits: operations and bytes a second that a rank's device does at most; 0 = not known.
    """

    def __init__(self, config: QuireConfig, limits: tuple[float, float] = (0.0, 0.0)) -> None:
        assert config.arch is not None, "resolve() sets the architecture"
        self._limits = limits
        self._arch: ModelArch = config.arch
        self._num_ranks = config.parallel.num_ranks
        item_bytes = BYTES_OF.get(config.model.dtype, 4)
        kv_item_bytes = BYTES_OF.get(config.cache.kv_cache_dtype, item_bytes)
        self._weight_bytes, self._table_bytes = bytes_per_weight(self._arch, item_bytes, config.model.quantization)
        self._mixers = mixer_costs(self._arch, kv_item_bytes, 1)
        self._head = self._arch.vocab_size * self._arch.table_size

    def of(self, shape: StepShape, seconds: float) -> StepPerf:
        """A step that took `seconds`."""
        arch, num_tokens = self._arch, shape.num_tokens
        num_decoding = num_tokens - shape.num_prompt_tokens
        active = arch.num_active_layer_weights
        flops = 2.0 * (num_tokens * active + shape.num_sampling * self._head)
        weights = min(arch.num_layer_weights, num_tokens * active)  # experts of no token are not read
        read = weights * self._weight_bytes + (self._head * self._table_bytes if shape.num_sampling else 0)
        write = 0.0
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
        ranks = self._num_ranks
        return StepPerf(kind, seconds, flops / ranks, read / ranks, write / ranks, *self._limits)
