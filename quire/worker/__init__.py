"""The data plane: holds the model and the tensors of the batch, runs what it is told. Knows no policy."""
