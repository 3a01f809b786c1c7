"""vLLM's `v1.core`: the type of events' hashes is here; the rest names the feature that Quire lacks."""
