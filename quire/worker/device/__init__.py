"""What differs from device to device, behind one value.

`ops` is that value, `registry` makes it from the platform; `native_cpu` and `torch_ops` are its constructors. Parts:
`graphs` (captured steps; `recorded_steps` are those of a CPU) and `memory` (what is free, the KV cache and its swaps).
Layers, attention and sampling are in packages of their own.
"""
