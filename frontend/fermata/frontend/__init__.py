"""The frontend: what turns a client's request into a turn, and tokens back into the client's protocol.

`prompt` is the pure half (template, tokens, hashes, detokeniser, stop strings); `http` speaks the dialects; `service`
is the shell with the links.
"""
