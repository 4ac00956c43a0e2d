"""Engines: token ids in, token ids out.

`base` is the Protocol and its types. The simulated engine is a pure state machine in injected time (`simulated` and the
concepts it is made of); `paced` runs it against a clock. Real engines get one module each, imported when chosen.
"""
