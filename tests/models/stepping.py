"""Runs a model step by step with a hand-made block table, as the worker would."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from quire.attention.backends.torch_reference import TorchReferenceBackend
from quire.attention.context import ForwardContext
from quire.attention.metadata import AttentionMetadata
from quire.models.decoder import DecoderForCausalLM


def make_metadata(
    query_lens: list[int],
    seq_lens: list[int],
    page_lists: list[list[int]],
    block_size: int,
    device: str | torch.device = "cpu",
) -> AttentionMetadata:
    """The metadata of a step in which request i computes its last query_lens[i] of seq_lens[i] tokens."""
    num_reqs = len(query_lens)
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    table = np.zeros((num_reqs, max([len(blocks) for blocks in page_lists], default=0)), dtype=np.int32)
    slots: list[int] = []
    for request, blocks in enumerate(page_lists):
        table[request, : len(blocks)] = blocks
        positions = range(seq_lens[request] - query_lens[request], seq_lens[request])
        slots += [blocks[position // block_size] * block_size + position % block_size for position in positions]
    return AttentionMetadata(
        num_reqs=num_reqs,
        num_tokens=int(starts[-1]),
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=torch.from_numpy(table).to(device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        query_start_loc_np=starts,
        seq_lens_np=np.array(seq_lens, dtype=np.int32),
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
    )


@dataclass
class Sequence:
    """A request under test: its tokens, the blocks given to it, the tokens computed so far."""

    token_ids: list[int]
    blocks: list[int]
    num_computed: int = 0


@dataclass
class Stepper:
    """A model, its cache, and the requests that run on it; blocks are given out in a shuffled order."""

    model: DecoderForCausalLM
    num_blocks: int = 200
    block_size: int = 16
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        specs = self.model.kv_cache_specs(self.block_size)
        weight = self.model.model.norm.weight
        self.kv_caches = tuple(
            torch.full(
                TorchReferenceBackend.kv_cache_shape(
                    self.num_blocks, self.block_size, spec.num_kv_heads, spec.head_size
                ),
                float("nan"),
                dtype=weight.dtype,
                device=weight.device,
            )
            for spec in specs.values()
        )
        self.free_pages = np.random.default_rng(0).permutation(np.arange(1, self.num_blocks)).tolist()

    def add(self, token_ids: list[int], max_tokens: int = 0) -> Sequence:
        """A new request with blocks for its prompt and `max_tokens` more."""
        num_blocks = -(-(len(token_ids) + max_tokens) // self.block_size)
        sequence = Sequence(list(token_ids), [self.free_pages.pop() for _ in range(num_blocks)])
        self.sequences.append(sequence)
        return sequence

    def step(self, work: list[tuple[Sequence, int]], wanted: list[int] | None = None) -> list[torch.Tensor]:
        """Compute the next n tokens of each sequence; logits [n, vocab_size] of each, of `wanted` tokens alone."""
        input_ids = [t for seq, n in work for t in seq.token_ids[seq.num_computed : seq.num_computed + n]]
        positions = [p for seq, n in work for p in range(seq.num_computed, seq.num_computed + n)]
        for sequence, num_tokens in work:
            sequence.num_computed += num_tokens
        query_lens = [n for _, n in work]
        seq_lens, page_lists = [seq.num_computed for seq, _ in work], [seq.blocks for seq, _ in work]
        device = self.kv_caches[0].device
        metadata = make_metadata(query_lens, seq_lens, page_lists, self.block_size, device)
        tokens = None if wanted is None else torch.tensor(wanted, dtype=torch.int64, device=device)
        context = ForwardContext((metadata,) * len(self.kv_caches), self.kv_caches, tokens)
        with torch.inference_mode():
            ids = torch.tensor(input_ids, dtype=torch.int32, device=device)
            hidden = self.model(ids, torch.tensor(positions, dtype=torch.int64, device=device), context)
            logits = self.model.compute_logits(hidden)
        return list(torch.split(logits, query_lens))
