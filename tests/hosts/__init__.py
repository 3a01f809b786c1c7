"""Programs of others in front of this engine: run by make targets of their own, as they are fetched first."""
