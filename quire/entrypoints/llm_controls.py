"""EngineControls: what `LLM` can do beside generating. Calls of the worker and figures, and names of what is not there.

A base of `LLM`, apart from it so that each can be read at once. No state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from quire.engine.sleep_levels import check_sleep, check_tags, drop_cached_pages, weight_files
from quire.errors import UnsupportedError, ValidationError
from quire.tokenization.hf_tokenizer import HFTokenizer

if TYPE_CHECKING:
    from quire.config.model import ModelConfig
    from quire.engine.llm_engine import LLMEngine
    from quire.metrics.records import Metric

POOLING = "Quire does not support pooling models (embeddings, classification, scores, rewards) yet"
SLEEP = "the KV cache is given back together with the weights: use sleep()"
TRANSFERS = "weights are replaced from a directory: use AsyncLLM.update_weights, or a server's /update_weights"


def _absent(name: str, why: str) -> Callable[..., NoReturn]:
    """A method that says what it would need."""

    def refuse(self: object, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(f"LLM.{name}: {why}", field=name)

    refuse.__name__ = name
    refuse.__doc__ = f"Not supported: {why}."
    return refuse


class EngineControls:
    """Of an `LLM`: its tokenizer, figures, worker; and methods that users of vLLM know and Quire does not have."""

    llm_engine: LLMEngine

    @property
    def model_config(self) -> ModelConfig:
        """Settings of the model, `max_model_len` among them."""
        return self.llm_engine.model_config

    def get_tokenizer(self) -> HFTokenizer:
        """The model's tokenizer, with the methods of Hugging Face's.

        Raises:
            ValidationError: the engine runs with skip_tokenizer_init.
        """
        if self.llm_engine.tokenizer is None:
            raise ValidationError(
                "no tokenizer: the engine runs with skip_tokenizer_init",
                hint="create it without skip_tokenizer_init",
                field="skip_tokenizer_init",
            )
        return HFTokenizer(self.llm_engine.tokenizer, self.llm_engine.chat_template)

    def get_metrics(self) -> list[Metric]:
        """What the engine has counted, under the names that a server shows at /metrics.

        Raises:
            ValidationError: the engine was made with disable_log_stats=True, the default.
        """
        return self.llm_engine.get_metrics()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Processes that compute the model, those of all replicas together unless `include_dp` is False."""
        parallel = self.llm_engine.config.parallel
        return parallel.world_size_across_dp if include_dp else parallel.num_ranks

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method, or a function, on every rank of every replica.

        With one rank in this process any method and any function will do, and its result comes as it is. With ranks in
        other processes a function crosses by its import name (no code is sent): it must be defined at the top level
        of a module. With an external launcher the rank of this script is called, alone.

        Args:
            method: name of a method of `quire.worker.worker.Worker` (with several processes one of
                `quire.core.worker_call.METHODS`), or a function of the worker, which may be named "module:function".
            timeout: seconds to wait for engine cores in other processes; a function in this thread runs to its end.
            args, kwargs: further arguments; plain values where they go to other processes.

        Returns:
            One result for each rank, in the order of replicas and ranks; plain values if there are several processes.

        Raises:
            ValidationError: there is no such method, or an argument or a result cannot be sent to another process.
            UnsupportedError: the function cannot be imported by its name.
            QuireError: of the first rank on which it failed, which is named.
            EngineDeadError: a rank has ended.
            TimeoutError: engine cores have not answered in time.
        """
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """`func(model)` for the model of each rank, or its part of it; as `collective_rpc`, and raises the same."""
        return self.llm_engine.collective_rpc(func, of_model=True)

    def start_profile(self, prefix: str | None = None) -> None:
        """Record the steps from the next one on, with the time of each kernel.

        Args:
            prefix: without effect: files are named by time and process.

        Raises:
            ValidationError: the engine has no directory for profiles, or a profile is being taken.
        """
        if self.llm_engine.config.observability.profiler is None:
            raise ValidationError("profiles have no directory", hint="create it with profile='DIR'", field="profile")
        if not self.llm_engine.profile(True):
            raise ValidationError("a profile is being taken", hint="end it with stop_profile()", field="profile")

    def stop_profile(self) -> None:
        """Write the profile; nothing where none is taken. `quire profile summary FILE` shows it."""
        self.llm_engine.profile(False)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give back the memory of weights and KV cache until `wake_up`.

        Args:
            level: 1 or 2: weights are read from their files again, in either case; at 1 these may still be in the
                operating system's memory.
            mode: unfinished requests are ended ("abort"); "wait" and "keep" need that there are none.

        Raises:
            UnsupportedError: the engine was made without enable_sleep_mode.
            ValidationError: there is no such level or mode, or requests are unfinished.
        """
        check_sleep(level, mode)
        if mode != "abort" and self.llm_engine.has_unfinished_requests():
            raise ValidationError("requests are unfinished", hint="finish them, or use mode='abort'", field="mode")
        if level == 0:
            return  # no step runs between calls
        self.llm_engine.sleep()
        if level == 2:
            drop_cached_pages(weight_files(self.llm_engine.config))

    def wake_up(self, tags: Collection[str] | None = None) -> bool:
        """Get back what `sleep` gave back. Weights and KV cache come together: either tag brings both.

        Returns:
            Whether the engine is awake: always, when this returns.
        """
        check_tags(tags)
        self.llm_engine.wake_up()
        return True

    def reset_mm_cache(self) -> None:
        """Do nothing: there are no images, so no cache of them."""

    encode = _absent("encode", POOLING)
    embed = _absent("embed", POOLING)
    classify = _absent("classify", POOLING)
    score = _absent("score", POOLING)
    reward = _absent("reward", POOLING)
    release_kv_cache_memory = _absent("release_kv_cache_memory", SLEEP)
    init_weight_transfer_engine = _absent("init_weight_transfer_engine", TRANSFERS)
    shutdown_weight_transfer_engine = _absent("shutdown_weight_transfer_engine", TRANSFERS)
    start_weight_update = _absent("start_weight_update", TRANSFERS)
    start_draft_weight_update = _absent("start_draft_weight_update", TRANSFERS)
    update_weights = _absent("update_weights", TRANSFERS)
    finish_weight_update = _absent("finish_weight_update", TRANSFERS)
    get_weight_version = _absent("get_weight_version", TRANSFERS)
    update_weight_version = _absent("update_weight_version", TRANSFERS)
