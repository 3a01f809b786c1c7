"""vLLM's `v1.spec_decode`: what its metrics add up; proposers are made in `quire.spec_decode`."""
