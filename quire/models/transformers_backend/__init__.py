"""Models of the `transformers` library on Quire's engine, for classes that Quire has no family for.

A class computes everything but attention by its own code; attention goes through its registry to Quire's backend, so
such a model has the paged KV cache, continuous batching and all that follows. Imported for such models alone.

    classes          the class of a config.json, or why it cannot be served; no weight is read
    attention        the functions in the registry: one that computes, one that notes what is asked
    probe            what a class asks for, from one forward pass without values
    modules          Quire's own in the place of torch's: `linear`, `experts`
    names            what checkpoints call the tensors
    even_rows        functions of torch whose bits would depend on the batch
    head             the output projection without the decoder
    model            the model, as the worker calls it
    self_check       whether tokens of several requests can be in one step
"""
