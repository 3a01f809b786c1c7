"""The flight recorder: what went into the control plane, kept on disk, and how it is run again without a model."""
