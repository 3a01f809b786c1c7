"""Drafts in the control plane, without torch: proposers from text, chains, and how many drafts each step verifies.

`registry` makes them from the configuration; `scheduler.drafts` calls them. The proposer that hands over
what a model on the worker has drafted is in `executor.drafting`.
"""
