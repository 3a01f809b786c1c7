"""One file for each library that makes grammars: `BACKEND`, whose `capabilities` say what it honours.

The libraries themselves are imported only when a request needs one.
"""
