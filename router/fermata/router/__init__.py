"""The router: a pure policy core (`core.Router`) and the I/O around it (`service`, `cli`).

Calls go in with the time, messages come out; only `service`, `metrics` and `cli` do I/O, read a clock or log.
"""
