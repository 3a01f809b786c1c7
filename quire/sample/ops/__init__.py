"""The tensor operations of sampling, one file per implementation.

`interface` is what the sampler calls, `torch_ops` runs on any device and defines the results (its filters are
`topk_topp`), `native` is the C++ library on a CPU. Which one an engine uses is in its `DeviceOps`.
"""
