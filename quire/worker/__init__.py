"""The data plane: holds the model and the tensors of the batch, and runs the steps it is sent. No policy.

Read `model_runner` first. Modules by topic:

    a step       model_runner, prepare_inputs, input_batch, attention_groups, sampling_step,
                 prompt_logprobs, draft_verification, layer_hooks
    rows         request_states, block_tables
    memory       memory_planner, kv_cache_tensors, block_transfers
    other memory kv_tier, offloading, kv_layout, connector_worker
    other ranks  group_lead, group_follower, group_steps, group_messages, group_caches,
                 group_drafts, group_profile, group_calls, group_bytes, step_channel, late_rows, lock_step
    drafts       drafting, draft_acceptance, block_verification, draft_trees, tree_verification
    the worker   worker, setup, device, warmup, allocator, weight_bytes
"""
