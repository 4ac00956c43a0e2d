"""MessagePack over ZeroMQ between all parts: typed messages, one codec, one socket layer.

`messages/` holds the contract, one file per receiver. `codec` turns a message into frames and back
and refuses what it does not know. `socket` is the only module that imports zmq.
"""
