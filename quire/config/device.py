"""The device, the parallel layout, and the attention backend."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.base import check_settings, setting
from quire.plugins import ATTENTION_BACKEND, EXECUTOR

OWN_EXECUTORS = ("auto", "uni", "mp", "ray", "external_launcher")
MAX_REPLICAS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """What runs the model."""

    device: str = setting("auto", "auto = CUDA when present, else CPU.", choices=("auto", "cpu", "cuda"))
    num_threads: int | None = setting(
        None,
        "CPU compute threads of each rank; default: one per usable core, at most OMP_NUM_THREADS, over the ranks.",
        minimum=1,
        maximum=4096,
    )
    attention_backend: str = setting(
        "auto",
        "Attention implementation.",
        choices=("auto", "native_cpu", "torch_reference"),
        plugins=ATTENTION_BACKEND,
    )
    kernel_tier: str = setting(
        "auto",
        "Instruction set of the native CPU kernels; auto = the best supported. All give the same "
        "results; float16 does not use them.",
        choices=("auto", "amx", "avx512_bf16", "avx512", "avx2", "portable"),
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the model is divided over processes."""

    tensor_parallel_size: int = setting(
        1,
        "Number of processes that compute each layer together; answers have the same bytes with any.",
        minimum=1,
        maximum=64,
        short="-tp",
    )
    pipeline_parallel_size: int = setting(
        1, "Number of pipeline stages, each with a part of the layers and tensor_parallel_size processes; answers have "
        "the same bytes with any.", minimum=1, maximum=64, short="-pp",
    )  # fmt: skip
    pipeline_layer_partition: str | None = setting(
        None, "Layers of each pipeline stage, such as 20,12; default: evenly by number, the embedding and the output "
        "projection being the first stage's."
    )  # fmt: skip
    data_parallel_size: int = setting(
        1, "Number of engine replicas behind one front end: each has the whole model (with enable_expert_parallel but "
        "for experts), a KV cache and an engine core process of its own, and an equal share of cores and memory.",
        minimum=1, maximum=MAX_REPLICAS, short="-dp",
    )  # fmt: skip
    numa_ranks: str = setting(
        "auto",
        "auto = a large model on a machine with two memory nodes has two ranks, one on each, in place of one process, "
        "where nothing is said of ranks, replicas, threads and the executor; off = as many as tensor_parallel_size.",
        choices=("auto", "off"),
    )
    enable_expert_parallel: bool = setting(
        False,
        "Mixtures of experts: ranks have whole experts, in place of a part of each; with data_parallel_size the ranks "
        "of all replicas, which compute in lock-step. Answers have the same bytes.",
    )
    expert_placement_strategy: str = setting(
        "linear", "Which rank has which experts: linear = consecutive ones, round_robin = "
        "in turns, else a JSON file with the rank of each expert, such as [0, 0, 1, 1].",
        needs=("enable_expert_parallel",),
    )  # fmt: skip
    distributed_executor_backend: str = setting(
        "auto",
        "Executor: how workers are run; uni = in one process, mp = a process for each rank, ray = on the machines of a "
        "Ray cluster, external_launcher = in the processes that torchrun or another launcher has started, each of "
        "which creates an LLM.",
        aliases=("executor",),
        choices=OWN_EXECUTORS,
        plugins=EXECUTOR,
    )

    @property
    def is_launched(self) -> bool:
        """The ranks are processes of a launcher, each with the user's script."""
        return self.distributed_executor_backend == "external_launcher"

    @property
    def replicas_share_experts(self) -> bool:
        """Replicas compute in lock-step, each with a part of the experts."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def world_size_across_dp(self) -> int:
        """Processes that compute the model, those of all replicas together."""
        return self.num_ranks * self.data_parallel_size

    def __post_init__(self) -> None:
        check_settings(self)
