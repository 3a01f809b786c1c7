"""What `quire plan` does beside simulating: measure this machine, read flags, report."""
