"""The parts of a decoder's layers: mixers and feed-forward networks, each built from its data in `config.model_arch`.

`table` says which class builds which.
"""
