"""What every part of Fermata shares: ids, clock, errors, block hashes, lease digests, the ring,
the specs.

Imports nothing else of ours. Everything here is pure except `cli`, which dispatches the `fermata`
command.
"""
