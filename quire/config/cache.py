"""The KV cache: block size, how much memory, prefix caching."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.base import check_settings, setting

FP8_KV_CACHE_DTYPES = ("fp8_e4m3", "fp8_e5m2")
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32", "fp8", *FP8_KV_CACHE_DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Size and behaviour of the paged KV cache."""

    block_size: int | None = setting(
        None, "Tokens per KV-cache block; default: chosen by the attention backend.", minimum=1, maximum=4096
    )
    memory_utilization: float = setting(
        0.9, "Fraction of the free memory that weights, workspace and KV cache may use together.",
        flag="gpu_memory_utilization", aliases=("device_memory_utilization",), minimum=0.01, maximum=1.0,
    )  # fmt: skip
    kv_cache_memory_bytes: int | None = setting(
        None, "Bytes for the KV cache; overrides the computed budget.", minimum=1, is_size=True
    )
    num_blocks: int | None = setting(
        None, "Number of KV-cache blocks, including the null block; overrides every memory budget.",
        flag="num_gpu_blocks_override", minimum=2, maximum=2**31 - 1,
    )  # fmt: skip
    kv_cache_dtype: str = setting(
        "auto", "Type of cached keys and values; auto = the model's. fp8 (= fp8_e4m3) and fp8_e5m2 take half the "
        "memory of bfloat16 and round every number to eight bits; they need dtype bfloat16 and the native CPU kernels.",
        choices=KV_CACHE_DTYPES,
    )  # fmt: skip
    enable_prefix_caching: bool = setting(True, "Share full KV-cache blocks between requests with a common prefix.")
    prefix_caching_hash_algo: str = setting("sha256", "Hash function of block contents.", choices=("sha256",))
    disable_hybrid_kv_cache_manager: bool = setting(
        False, "Keep every block of a request until it finishes; sliding windows are masked only. By default "
            "blocks that have left a window are freed, and layers with different windows have separate "
            "blocks.",
    )  # fmt: skip
    prefix_cache_retention_interval: int = setting(
        0, "Tokens between the recurrent states that are kept of a long prompt, for models with recurrent layers "
        "(Mamba, Gated DeltaNet, ...): prompts that begin alike continue from the last one. Rounded down to whole "
        "blocks. 0 = only where they are kept anyway: at the end of a prompt, of an answer, and of what prompts share.",
        minimum=0, needs=("enable_prefix_caching",),
    )  # fmt: skip
    num_state_checkpoints: int | None = setting(
        None, "Recurrent states kept for later requests, in addition to two for each running one; the least recently "
        "used go first. Default: max_num_seqs. States take at most half of the KV cache's memory.", minimum=0,
        needs=("enable_prefix_caching",),
    )  # fmt: skip
    sparse_attention_blocks: int | None = setting(
        None, "Each token attends to so many blocks of keys and values: those whose keys may have the highest scores, "
        "the first one and the newest. Answers differ from those of whole attention. Default: to all.", minimum=3,
    )  # fmt: skip
    watermark: float = setting(
        0.0, "Fraction of blocks kept free when a waiting request is admitted.", minimum=0.0, below=1.0
    )

    swap_space: float = setting(
        0.0, "GiB of host memory for blocks of preempted requests, which then resume without recomputing their "
        "tokens; 0 = none. On a CPU it is taken from the same memory as the KV cache.", minimum=0.0, maximum=2.0**20,
    )  # fmt: skip

    kv_offloading_size: float = setting(
        0.0, "GiB of host memory for KV-cache blocks of ended requests, for when the cache has no room for them; 0 = "
        "none. On a CPU it is taken from the same memory as the KV cache.", minimum=0.0, maximum=2.0**20,
    )  # fmt: skip
    kv_offloading_backend: str = setting("native", "What keeps the blocks of kv_offloading_size.", choices=("native",))
    kv_offloading_policy: str = setting(
        "lru", "Which blocks go when host memory or kv_disk is full: lru = least recently used; lfu = least frequently "
        "used; arc = adaptive, so that prompts that come once do not push out shared ones.",
        choices=("lru", "lfu", "arc"), needs=("kv_offloading_size", "kv_disk"),
    )  # fmt: skip
    kv_disk: str | None = setting(
        None, "Directory that keeps the KV-cache blocks of ended requests across restarts, for all servers of the same "
        "model that name it; they are loaded where that is faster than computing. Must belong to this user.",
    )  # fmt: skip
    kv_disk_size: int = setting(
        20 << 30, "Most bytes in the kv_disk directory; what was not used for longest goes.", minimum=1 << 20,
        is_size=True, needs=("kv_disk",),
    )  # fmt: skip

    kv_disk_key_file: str | None = setting(
        None, "File with a key, 64 hexadecimal digits, with which the blocks in kv_disk are encrypted (AES-256-GCM; "
        "needs the extra `encryption`). Blocks of another key are not found. Only this user may read the file.",
        needs=("kv_disk",),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def offload_field(self) -> str | None:
        """The setting that asks for a tier behind the cache; None = there is none."""
        if self.kv_disk is not None:
            return "kv_disk"
        return "kv_offloading_size" if self.kv_offloading_size else None
