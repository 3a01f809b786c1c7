"""Kernels of the C++ library (`csrc/`), behind typed wrappers that check every tensor before its address crosses."""
