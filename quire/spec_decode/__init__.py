"""Drafts in the control plane: how many of them each step verifies; no torch. Called by the scheduler's drafts."""
