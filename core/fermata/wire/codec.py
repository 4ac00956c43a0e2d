"""A message and its raw frame to ZeroMQ frames and back.

Frame 0 is one version byte, then the MessagePack array `[tag, fields...]` of the struct. Messages
listed in `FRAME_ITEM_BYTES` are followed by one frame of raw little-endian integers, read in
place. What is not understood raises a WireError that says why; the socket layer counts it and
answers the caller.

WireError
  UnknownVersion   another major version of us
  Malformed        not MessagePack, not a known tag, a field of the wrong type, a ragged frame
  Oversized        a header or frame above its bound
  WrongRole        a message its sender may not send

Unsendable is the other way round: a message of ours that would be refused there is not sent, and its maker is
told at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple, Union

import msgspec
from typing_extensions import Buffer

from fermata.wire.messages import ANY, FRAME_ITEM_BYTES, Batch, Fault, Message

VERSION = 1
MAX_HEADER_BYTES = 4 << 20
MAX_FRAME_BYTES = 64 << 20
MAX_BATCH = 4096
EMPTY = memoryview(b"")

FaultCode = Literal["malformed", "unknown_version", "oversized", "wrong_role"]


class WireError(Exception):
    code: ClassVar[FaultCode] = "malformed"


class UnknownVersion(WireError):
    code = "unknown_version"


class Malformed(WireError):
    pass


class Oversized(WireError):
    code = "oversized"


class WrongRole(WireError):
    code = "wrong_role"


class Unsendable(Exception):
    """A value MessagePack has no form for (an integer beyond 64 bits, half a character), or more than the other
    side takes."""


class Packet(NamedTuple):
    """`frame` is empty for messages that carry none. Cast it: `frame.cast("I")` tokens,
    `frame.cast("Q")` hashes."""

    message: Message
    frame: memoryview = EMPTY


_VERSION_BYTE = bytes([VERSION])
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    Union[ANY]  # noqa: UP007  # built from the closed set at import
)


def encode(message: Message, frame: Buffer = b"") -> list[Buffer]:
    """Raises Unsendable."""
    kind = type(message)
    try:
        head = _VERSION_BYTE + _encoder.encode(message)
    except (OverflowError, ValueError, TypeError, RecursionError) as error:
        raise Unsendable(f"{kind.__name__}: {error}") from error
    if len(head) > MAX_HEADER_BYTES:
        raise Unsendable(
            f"{kind.__name__}: header of {len(head)} bytes, at most {MAX_HEADER_BYTES}"
        )
    if kind not in FRAME_ITEM_BYTES:
        return [head]
    size = memoryview(frame).nbytes
    if size > MAX_FRAME_BYTES:
        raise Unsendable(f"{kind.__name__}: frame of {size} bytes, at most {MAX_FRAME_BYTES}")
    return [head, frame]


def encode_batch(packets: Sequence[Sequence[Buffer]]) -> list[Buffer]:
    """One multipart message of several already encoded ones; alone, one stays as it is."""
    if len(packets) == 1:
        return list(packets[0])
    frames: list[Buffer] = encode(Batch(sizes=[len(p) for p in packets]))
    for packet in packets:
        frames.extend(packet)
    return frames


def decode(frames: Sequence[Buffer]) -> Iterator[Packet]:
    """All packets of one multipart message. Raises WireError at the first that is wrong; what came
    before it stands."""
    if not frames:
        raise Malformed("no frame")
    first = _header(frames[0])
    if not isinstance(first, Batch):
        yield _packet(first, frames)
        return
    if len(first.sizes) > MAX_BATCH or sum(first.sizes) != len(frames) - 1:
        raise Malformed(f"batch of {len(first.sizes)} does not match its {len(frames) - 1} frames")
    at = 1
    for size in first.sizes:
        if size < 1:
            raise Malformed("empty message in a batch")
        part = frames[at : at + size]
        message = _header(part[0])
        if isinstance(message, Batch):
            raise Malformed("batch in a batch")
        yield _packet(message, part)
        at += size


def fault(error: WireError) -> Fault:
    return Fault(code=error.code, message=str(error)[:500])


def _header(raw: Buffer) -> Message:
    view = memoryview(raw)
    if len(view) > MAX_HEADER_BYTES:
        raise Oversized(f"header of {len(view)} bytes, at most {MAX_HEADER_BYTES}")
    if not len(view):
        raise Malformed("empty header")
    if view[0] != VERSION:
        raise UnknownVersion(f"version {view[0]}, this side speaks {VERSION}")
    try:
        return _decoder.decode(view[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(str(error)) from error


def _packet(message: Message, frames: Sequence[Buffer]) -> Packet:
    item = FRAME_ITEM_BYTES.get(type(message), 0)
    if len(frames) != (2 if item else 1):
        raise Malformed(f"{type(message).__name__} with {len(frames)} frames")
    if not item:
        return Packet(message)
    frame = memoryview(frames[1])
    if len(frame) > MAX_FRAME_BYTES:
        raise Oversized(f"frame of {len(frame)} bytes, at most {MAX_FRAME_BYTES}")
    if len(frame) % item:
        raise Malformed(
            f"{type(message).__name__} frame of {len(frame)} bytes is no multiple of {item}"
        )
    return Packet(message, frame)
