"""Several front-end processes of one engine: what crosses between them and the process that owns the engine cores.

messages    what is sent
link        the way of messages between the processes
split       one step of a core as the parts of the front ends
hub         in the owner: requests of front ends to the cores, steps back
remote      in a front end: what `AsyncLLM` uses in place of a supervisor
"""
