"""Model families: how each reads `config.json` into a `ModelArch`, and how its checkpoints name and store tensors.

One file per family, data without torch; `registry` has the table of architectures.
"""
