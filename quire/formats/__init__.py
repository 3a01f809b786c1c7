"""Files that weights come in, and the formats of the numbers in them: numpy at most, no torch.

Called by `config` (what a file says of its model), `tokenization`, `models` and the commands that look at files.
"""
