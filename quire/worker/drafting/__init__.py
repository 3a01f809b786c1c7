"""Models that draft, on the worker's side: what they compute, and which of their keys and values are computed.

`draft_step` calls them after sampling, with `inputs`. `language_model` is a second, smaller model, `features` and
`medusa` are heads, `feature_trees` and `medusa_trees` their trees; `passes`, `chain` and `tree_drafts` are what they
have in common, `feature_passes` runs a head, `head_graphs` captures its small passes, `pages` says how far each row's
part of the cache is filled, and `loading` makes all of it from the configuration.
"""
