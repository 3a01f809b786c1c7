"""The engine: its core, the ways to reach it, and the front end that turns requests into steps and steps into text.

Read `core` and `front_end` first, then `llm_engine` (offline) or `async_llm` (serving). Modules by topic:

    engine core        core, step_recovery, in_flight, fault_bisector, grammar_gate, core_factory, step_measurements
    its process        core_proc, core_launcher, spare_process, core_link, heartbeat, hang_detector, supervisor,
                       live_request, core_client, process_watch, crash_reports, replica_traces
    weights and sleep  weight_controls, weight_update, sleep_levels
    several cores      data_parallel
    torchrun's ranks   launched
    several front ends  front_ends
    requests in        input_processor, parallel_sampling, beam_search, seeds, generation_defaults
    outputs            output_processor, request_state, detokenizer, stop_strings, logprobs, output_stream
    front ends         front_end, llm_engine, async_llm, protocol, snapshots
    built by           config_lookup, factory, front_factory, mp_factory, parts, named_plugins, vllm_environment,
                       shipped_drafters, memory_estimate, drafting_need
    figures and events  stat_logger, stat_loggers, step_logs, offline_metrics, speculation_reports, kv_event_publisher,
                       step_watch, step_meter
    behind the cache   kv_offload_factory, tier_factory
"""
