"""Several models behind one server: which are in memory, and which requests wait for one. No torch."""
