"""Models in GGUF files: what the metadata of each architecture means, and how its tensors are named and stored.

    metadata      typed reading of a file's metadata
    rope          the rotary embedding and its scaling
    family        what all architectures have in common
    dense, gemma4, latent, mixtures, older, recurrent    the architectures
    registry      `general.architecture` -> its family

No torch: read where a model is looked at. Tensors are read by `models.gguf_checkpoint`.
"""
