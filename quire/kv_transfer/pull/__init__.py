"""Prefill in one engine, decode in another: the decode engine reads the blocks of the prefill engine (pull).

`connector` decides and accounts, `server` answers for the prefill engine, `link` reads for the decode engine,
`messages` is what they say to each other, `transport` how the bytes travel. docs/adr/0091-prefill-and-decode-apart.md.
"""
