"""The whole configuration: one frozen value made of the parts. Pass the part that is needed, not the whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.config.base import check_settings, setting
from quire.config.cache import CacheConfig
from quire.config.device import DeviceConfig, ParallelConfig
from quire.config.kv_events import KVEventsConfig, parse_kv_events_config
from quire.config.kv_transfer import KVTransferConfig, KVTransferSettings
from quire.config.model import LoadConfig, ModelConfig
from quire.config.model_arch import ModelArch
from quire.config.profiler import ProfilerConfig, parse_profiler_config
from quire.config.scheduler import SchedulerConfig
from quire.config.speculative import SpeculativeConfig
from quire.config.speculative_forms import SpeculationSettings, parse_speculation
from quire.config.structured_outputs import StructuredOutputsConfig

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig:
    """Logging, recording and events."""

    log_level: str | None = setting(
        None, "Minimum log level; default: QUIRE_LOG_LEVEL, else info (warning for commands other than serve).",
        choices=LOG_LEVELS, aliases=("uvicorn_log_level",),
    )  # fmt: skip
    log_format: str | None = setting(
        None, "json = one JSON object per line, with the fields of each request; default: QUIRE_LOG_FORMAT, else text.",
        choices=LOG_FORMATS,
    )  # fmt: skip
    disable_log_stats: bool = setting(True, "Do not log statistics every few seconds.")
    stat_loggers: tuple[str, ...] = setting(
        (),
        "Stat logger plugins, called with the statistics of every step in addition to the log and /metrics; "
        "for servers and LLM.",
    )
    profile: str | None = setting(
        None,
        "Directory for profiles of steps with the time of each native kernel, for ui.perfetto.dev, taken between POST "
        "/start_profile and /stop_profile (an operator's key), or LLM.start_profile() and stop_profile().",
    )
    profiler_config: str | None = setting(
        None,
        "JSON object: as profile, with vLLM's keys: profiler (torch = operations of torch, too), torch_profiler_dir, "
        "torch_profiler_record_shapes, torch_profiler_with_stack, delay_iterations, max_iterations.",
        is_json=True,
    )
    enable_mfu_metrics: bool = setting(
        False,
        "Count operations and bytes of every step (vllm:estimated_*, quire:step_*), and compare them with what this "
        "machine does at most, which is measured once (MFU, MBU).",
    )
    flight_recorder: str | None = setting(
        None,
        "Directory for a recording of the scheduler's inputs, a ring of files that `quire replay` reads: "
        "requests as token ids (no text), sampled tokens, times. Only the owner can read the files.",
    )
    flight_recorder_max_bytes: int = setting(
        256 << 20,
        "Total size of the flight recorder's files in bytes; the oldest are deleted.",
        minimum=1 << 20,
        is_size=True,
        needs=("flight_recorder",),
    )

    per_request_spec_decode_metrics: str = setting(
        "none", "What responses say of a request's drafts, in metrics.speculative_decoding: summary = counts and how "
        "many were accepted; detailed = of each step, too.", choices=("none", "summary", "detailed"),
    )  # fmt: skip
    kv_events_config: str | None = setting(
        None, "JSON object: KV-cache event publisher (blocks stored in and removed from the prefix cache). Keys as "
        "in vLLM: enable_kv_cache_events, publisher, endpoint, replay_endpoint, buffer_steps, hwm, "
        "max_queue_size, topic.",
        is_json=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)
        parse_kv_events_config(self.kv_events_config)
        parse_profiler_config(self.profile, self.profiler_config)

    @property
    def profiler(self) -> ProfilerConfig | None:
        """How steps are profiled once that is started; None = they cannot be."""
        return parse_profiler_config(self.profile, self.profiler_config)

    @property
    def kv_events(self) -> KVEventsConfig:
        """What `kv_events_config` says."""
        return parse_kv_events_config(self.kv_events_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionConfig:
    """Recovery from crashes and hangs of the engine core."""

    hang_timeout_s: float = setting(
        10.0,
        "Kill and restart an engine core that has made no progress for this many seconds although it has "
        "work: it uses no CPU, or far more CPU than its step should need.",
        minimum=0.2,
        maximum=3600.0,
    )
    crash_reports: str = setting(
        "auto",
        "Directory for reports of engine cores that died, of which the newest 5 are kept: settings, versions, last log "
        "lines, stacks, requests in flight without text and tokens; auto = reports in the cache directory, none = off.",
    )
    max_restarts: int = setting(
        5,
        "Give up after this many consecutive restarts of the engine core that last less than 60 s and advance no "
        "request.",
        minimum=0,
        maximum=1000,
    )
    enable_sleep_mode: bool = setting(
        False, "Let /sleep and LLM.sleep() give back the memory of weights and KV cache, and /wake_up get it back."
    )
    sleeping_requests: str = setting(
        "queue",
        "What becomes of requests while the engine sleeps: queue = they wait until it wakes up; wake = they wake it "
        "up; reject = they are refused (503).",
        choices=("queue", "wake", "reject"),
    )

    @property
    def rank_timeout_s(self) -> float:
        """For which a rank waits for another: a missing one is named before the core's process counts as hung."""
        return 0.75 * self.hang_timeout_s

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuireConfig:
    """Everything an engine is built from. `arch` is None until `resolve` has read the model's config.json.

    `reasons`: (name of a setting, why a rule chose its value), once it is resolved. `has_longest_length`: its
    `max_model_len` is an estimate of the longest that fits the memory (`max_model_len=-1`).
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    transfer: KVTransferSettings = field(default_factory=KVTransferSettings)
    arch: ModelArch | None = None
    model_path: str = ""
    reasons: tuple[tuple[str, str], ...] = ()
    has_longest_length: bool = False

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """How tokens are guessed ahead; None = nothing was said of it."""
        return parse_speculation(self.speculation)[0]

    @property
    def num_draft_tokens(self) -> int:
        """Most draft tokens of a request in a step; 0 = nothing is drafted."""
        speculative = self.speculative
        return 0 if speculative is None else speculative.num_tokens

    @property
    def max_step_drafts(self) -> int | None:
        """Most draft tokens of a step, if that is configured."""
        speculative = self.speculative
        return None if speculative is None else speculative.max_step_draft_tokens

    @property
    def kv_transfer(self) -> KVTransferConfig | None:
        """The KV connector; None = there is none."""
        return self.transfer.connector

    @property
    def has_kv_tier(self) -> bool:
        """Whether blocks are kept behind the KV cache, by a connector or a store of ours."""
        return self.kv_transfer is not None or self.cache.offload_field is not None

    @property
    def model_config(self) -> ModelConfig:
        """`model`, by vLLM's name; so are the ones below."""
        return self.model

    @property
    def cache_config(self) -> CacheConfig:
        """`cache`."""
        return self.cache

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """`scheduler`."""
        return self.scheduler

    @property
    def parallel_config(self) -> ParallelConfig:
        """`parallel`."""
        return self.parallel

    @property
    def speculative_config(self) -> SpeculativeConfig | None:
        """`speculative`."""
        return self.speculative

    @property
    def kv_transfer_config(self) -> KVTransferConfig | None:
        """`kv_transfer`."""
        return self.kv_transfer

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request, prompt and output; of a resolved configuration."""
        assert self.model.max_model_len is not None, "resolve() sets max_model_len"
        return self.model.max_model_len
