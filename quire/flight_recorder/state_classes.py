"""The classes whose values a recorded state may hold, by the name that stands in the file.

Used by `snapshot`, which writes no other, and by `restoring`, which makes no other: a recording may come from anywhere,
so nothing in it names code. A class that becomes part of a scheduler's state gets a line here; a house test says so.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from quire.core.beam_search import BeamSpec
from quire.core.cache_info import CacheMiss, MissReason, PrefixCacheInfo
from quire.core.engine_messages import BeamAnswer, EngineCoreRequest, FinishedRequest, FinishReason
from quire.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from quire.core.kv_spec import KINDS, KVCacheConfig, KVCacheGroupSpec
from quire.core.kv_transfer import BlockTransfer
from quire.core.request import Request, RequestStatus
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler_output import ForcedTokens, RowFork
from quire.core.stats import EventKind, RequestEvent
from quire.kv_cache.block_copies import PendingCopies
from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.cached_prefix import CachedPrefix
from quire.kv_cache.checkpoints import Checkpoints
from quire.kv_cache.coordinator import KVCacheCoordinator
from quire.kv_cache.event_recorder import KVEventRecorder
from quire.kv_cache.eviction_history import EvictionHistory
from quire.kv_cache.free_list import FreeList
from quire.kv_cache.manager import KVCacheManager
from quire.kv_cache.miss_explainer import MissExplainer
from quire.kv_cache.prefix_index import PrefixIndex
from quire.kv_cache.prefix_tree import PrefixTree
from quire.kv_cache.row_prefixes import RowPrefixes
from quire.kv_cache.salted_siblings import SaltedSiblings
from quire.kv_cache.siblings import Siblings
from quire.kv_cache.single_type.chunked_local import ChunkedLocalManager
from quire.kv_cache.single_type.full_attention import FullAttentionManager
from quire.kv_cache.single_type.sliding_window import SlidingWindowManager
from quire.kv_cache.single_type.state import StateManager
from quire.kv_cache.swap_pool import SwappedBlocks, SwapPool
from quire.scheduler.admission import Admission, AdmissionRules, GateDecision
from quire.scheduler.beam_groups import BeamGroups, _Group
from quire.scheduler.beam_search import BeamSearch, Finished
from quire.scheduler.deadlines import QueueDeadlines
from quire.scheduler.drafts import Drafts
from quire.scheduler.fair_order import FairOrder, TenantQueues
from quire.scheduler.forks import ForkGroups
from quire.scheduler.in_flight import StepsInFlight
from quire.scheduler.kv_tiers import KVTiers, _InFlight
from quire.scheduler.limits import Limits
from quire.scheduler.outbox import Outbox
from quire.scheduler.policy import ByArrival, ByPriority, ExpectedOutputs, ShortestFirst
from quire.scheduler.request_group import RequestGroups
from quire.scheduler.request_queue import RequestQueue
from quire.scheduler.request_table import RequestTable, RowFlag
from quire.scheduler.running import RunningRows
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.scheduling_policy import RankOrder
from quire.scheduler.step_costs import StepCosts
from quire.scheduler.swap_costs import Measurements, SwapCosts
from quire.scheduler.swapping import Swapping
from quire.scheduler.tenant_turns import TenantTurns
from quire.scheduler.unfinished import UnfinishedRequests
from quire.scheduler.virtual_counters import VirtualCounters
from quire.scheduler.waiting import WaitReason

ENUMS: tuple[type[enum.Enum], ...] = (
    EventKind, FinishReason, MissReason, RequestStatus, RowFlag, GateDecision, WaitReason,
)  # fmt: skip
STRUCTS: tuple[type[msgspec.Struct], ...] = (
    AllBlocksCleared, BeamSpec, BlockRemoved, BlockStored, PrefixCacheInfo, SamplingParams,
)  # fmt: skip
OBJECTS: tuple[type, ...] = (
    Admission, AdmissionRules, BeamAnswer, BeamGroups, BeamSearch, BlockPool, ByArrival, ByPriority, CacheMiss,
    CachedPrefix, Checkpoints,
    ForcedTokens, ChunkedLocalManager, Drafts, EngineCoreRequest, ExpectedOutputs, FairOrder, Finished,
    FinishedRequest, ForkGroups, FreeList, FullAttentionManager, KVCacheConfig, KVCacheCoordinator, KVCacheGroupSpec,
    KVCacheManager, KVEventRecorder, KVTiers, Limits, Measurements, MissExplainer, Outbox, BlockTransfer,
    EvictionHistory,
    PendingCopies, PrefixIndex, PrefixTree, QueueDeadlines, RankOrder, Request, RequestEvent, RequestGroups,
    RequestQueue, RequestTable, RowFork, RowPrefixes, RunningRows, SaltedSiblings, Scheduler, ShortestFirst, Siblings,
    SlidingWindowManager, StateManager, StepCosts, StepsInFlight, SwapCosts, SwappedBlocks, Swapping, SwapPool,
    TenantQueues, TenantTurns, UnfinishedRequests, VirtualCounters, _Group, _InFlight, *KINDS,
)  # fmt: skip


def name_of(kind: type) -> str:
    """What stands in the file for a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


ENUM_BY_NAME: dict[str, type[enum.Enum]] = {name_of(kind): kind for kind in ENUMS}
STRUCT_BY_NAME: dict[str, type[msgspec.Struct]] = {name_of(kind): kind for kind in STRUCTS}
OBJECT_BY_NAME: dict[str, Any] = {name_of(kind): kind for kind in OBJECTS}


def slots_of(kind: type) -> list[str]:
    """The slots of a class and of those it inherits from."""
    return [name for one in kind.__mro__ for name in _own_slots(one)]


def _own_slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(one for one in slots if one not in ("__weakref__", "__dict__"))
