"""Makes the speculation heads of `leaf`: a draft model, an EAGLE head and Medusa heads. See training/README.md."""
