"""Which requests run in each step, in which blocks, and when a request ends. Control plane: no torch.

Read `scheduler` first, then `step_plan`, `admission` and `request_table`. Modules by topic:

    a step            scheduler, step, step_plan, budget, step_costs, running, update, stop, in_flight, outbox, drafts,
                      draft_looks
    requests          request_table, request_queue, unfinished, validation, deadlines, limits
    admission         admission, candidate, waiting
    order of service  scheduling_policy, policy, fair_order, virtual_counters, tenant_turns
    preemption        preemption, swapping, swap_costs
    other memory      kv_tier, kv_tiers, tier_stack, offloading, connector_tier
    several engines   placement, placed_prefixes
    request groups    request_group, forks, beam_groups, beam_search
    from outside      interface, setup, live_state
"""
