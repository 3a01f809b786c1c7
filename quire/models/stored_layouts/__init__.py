"""How checkpoints spread a quantized matrix over several tensors. Used by `models.quantized_checkpoint`."""
