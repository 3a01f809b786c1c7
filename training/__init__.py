"""Recipe of the embedded model `leaf`: corpus, tokenizer, trainer, evaluation.

Everything the model knows comes from the scripts in this package; nothing is
downloaded. `python -m training.build` runs all steps; see README.md here.
"""
