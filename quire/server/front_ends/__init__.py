"""Several front-end processes on one port (`--api-server-count`).

owner           the process that owns the engine cores and the address, and starts the front ends
front_process   a front end, to the owner: started, watched, ended
controls        in the owner: weights, sleep and pauses, which front ends ask for
engine          in a front end: its `AsyncLLM`
accepting       connections are handed to front ends
process         the program of a front end
server          its HTTP server, on connections that the owner accepted
ledger          counts that all front ends share, in memory
shared_limits   the limits of tenants and server, counted in the ledger
peers           what one front end asks of the others: metrics, requests, responses
shelf           stored responses, which the owner keeps
"""
