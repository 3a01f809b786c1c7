"""Paged KV cache, control plane: which request owns which block, which blocks hold which prefix. No torch.

Read `manager` first, then `coordinator` and `block_pool`. Modules by topic:

    what the scheduler calls  manager, cached_prefix, block_demand
    groups of layers          coordinator, single_type, block_counts, row_prefixes
    blocks                    block_pool, free_list, block_copies, swap_pool
    prefixes                  prefix_index, prefix_tree, siblings, salted_siblings, block_hash, checkpoints,
                              stored_prefix (what is kept outside)
    explanations and events   miss_explainer, eviction_history, event_recorder, live_state
    at startup                planning, grouping, pool_sizes
"""
