"""One engine replica with its KV events and its leases.

`engine/` holds the engines behind one Protocol; `service` is the shell that speaks to frontends, routers and the
operator; what is between them (leases, owners, sessions, KV event sequences, output buffers) is pure.
"""
