"""The service behind the three APIs: prompts in, parsed outputs and streams out, in one internal form.

Read `service` first, then `running`. Modules by topic:

    a request     service, reading, protocol, prompts, shared_prefixes, running, state
    its output    named_parsers, parsing, forcing, answer_events, chat_message, answer, counts, logprobs, cache_view
    responses     sse, answered
"""
