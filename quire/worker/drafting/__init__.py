"""Models that draft, on the worker's side: what they compute, and which of their keys and values are computed.

`draft_step` calls them after sampling, with `inputs`. `language_model` is a second, smaller model, `features` and
`medusa` are heads; `passes` and `chain` are what they have in common, `head_graphs` captures a
head's small passes, `pages` says how far each row's part of the cache is filled, and `loading` makes all of it from the
configuration.
"""
