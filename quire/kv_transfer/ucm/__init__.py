"""UCM's connector in a process of its own: `connector` is Quire's side, `link` the pipe, `side` the program behind it.

Nothing here is imported unless `UCMConnector` is named; names of vLLM exist in that process alone.
"""
