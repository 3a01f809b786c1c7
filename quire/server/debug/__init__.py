"""What operators look at: the state of engines, recent requests, settings, and sizing by simulation.

state       what `/debug/state` says, as structs
feed        collects it, at most twice a second, while someone looks
series      rates and quantiles between looks
planning    `quire plan` in a process of its own
routes      the paths below /debug
"""
