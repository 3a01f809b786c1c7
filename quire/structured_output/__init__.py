"""Structured output: grammars, the libraries that compile them, and the masks that constrain sampling.

Read `manager` and `choose` first, then one of `backends`. Modules by topic:

    choice of a library   choose, registry, capabilities, schema, interface, backends
    compilation           compile, spec, vocabulary, token_trie, foreign, one_spelling
    running requests      manager, answer, answer_steps, mask_filler, restrictions, eos_tracking, crew
    reasoning             reasoning_gate, reasoning_state
    expensive grammars    followers, follow_worker, follow_messages
    checks in a server    form_checker, check_worker, check_messages
    structural tags       structural_tags, tag_lark
"""
