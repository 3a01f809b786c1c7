"""Heads that guess tokens from a target's hidden states: `medusa`, `eagle` (EAGLE-1 and -3), `mtp`.

They are loaded beside a target, whose token table and output projection they share; `worker.drafting` runs them.
"""
