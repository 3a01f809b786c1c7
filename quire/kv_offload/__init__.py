"""Blocks of the KV cache outside of it: on a disk, in host memory, by names that depend on content alone.

Used by `scheduler.offloading` and `worker.offloading`, the two halves of a tier (ADR 0055). What is here sees keys and
bytes: no requests, no layers. `BlockStore` is the interface; `OffloadStore` is one.
"""
