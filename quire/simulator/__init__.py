"""The simulator: the real scheduler and block manager under a virtual clock, with a model of what steps cost."""
