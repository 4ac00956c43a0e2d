"""Any message round-trips, another library reads what we write, and no bytes whatever do harm."""

from __future__ import annotations

from array import array

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fermata.wire.codec import (
    VERSION,
    Packet,
    WireError,
    decode,
    encode,
    encode_batch,
)
from fermata.wire.messages import ANY, FRAME_ITEM_BYTES, Batch, Message

KINDS = [kind for kind in ANY if kind is not Batch]


def plain(value: object) -> object:
    """What a reader without our types sees: tuples are lists to it."""
    match msgspec.to_builtins(value, builtin_types=(bytes,)):
        case list() | tuple() as items:
            return [plain(item) for item in items]
        case dict() as pairs:
            return {key: plain(item) for key, item in pairs.items()}
        case other:
            return other


U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
JSONISH = st.recursive(
    st.none() | st.booleans() | I64 | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def packets(*kinds: type[Message]) -> st.SearchStrategy[Packet]:
    @st.composite
    def packet(draw: st.DrawFn) -> Packet:
        kind = draw(st.sampled_from(kinds or KINDS))
        message = draw(messages(kind))
        item = FRAME_ITEM_BYTES.get(kind, 0)
        if item == 4:
            frame = array("I", draw(st.lists(st.integers(0, 2**32 - 1), max_size=20))).tobytes()
        elif item == 8:
            frame = array("Q", draw(st.lists(U64, max_size=20))).tobytes()
        else:
            frame = b""
        return Packet(message, memoryview(frame))

    return packet()


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    fields = {
        f.name: _value(msgspec.inspect.type_info(f.type)) for f in msgspec.structs.fields(kind)
    }
    return st.builds(kind, **fields)


def _value(kind: msgspec.inspect.Type) -> st.SearchStrategy[object]:
    i = msgspec.inspect
    match kind:
        case i.IntType():
            return I64
        case i.FloatType():
            return st.floats(allow_nan=False)
        case i.StrType():
            return st.text(max_size=12)
        case i.BytesType():
            return st.binary(max_size=12)
        case i.BoolType():
            return st.booleans()
        case i.NoneType():
            return st.none()
        case i.AnyType():
            return JSONISH
        case i.LiteralType():
            return st.sampled_from(kind.values)
        case i.ListType():
            return st.lists(_value(kind.item_type), max_size=3)
        case i.TupleType():
            return st.tuples(*(_value(t) for t in kind.item_types))
        case i.DictType():
            return st.dictionaries(_value(kind.key_type), _value(kind.value_type), max_size=3)
        case i.UnionType():
            return st.one_of([_value(t) for t in kind.types])
        case i.StructType():
            return st.builds(kind.cls, **{f.name: _value(f.type) for f in kind.fields})
        case i.CustomType() | i.Type():
            raise AssertionError(f"no strategy for {kind}")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_message_round_trips_and_the_msgpack_library_reads_it(
    kind: type[Message], data: st.DataObject
) -> None:
    packet = data.draw(packets(kind))
    frames = encode(packet.message, packet.frame)
    (back,) = decode(frames)
    assert back.message == packet.message
    assert back.frame.tobytes() == packet.frame.tobytes()
    head = bytes(frames[0])
    assert head[0] == VERSION
    foreign = msgpack.unpackb(head[1:], strict_map_key=False)
    assert foreign == plain(packet.message)


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(st.lists(packets(), min_size=1, max_size=6))
def test_a_batch_gives_its_packets_back_in_order(batch: list[Packet]) -> None:
    frames = encode_batch([encode(p.message, p.frame) for p in batch])
    assert [(p.message, p.frame.tobytes()) for p in decode(frames)] == [
        (p.message, p.frame.tobytes()) for p in batch
    ]


REFUSED: list[str] = []


@settings(
    max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(st.lists(st.binary(max_size=64), max_size=4))
def check_random_frames(frames: list[bytes]) -> None:
    try:
        list(decode(frames))
    except WireError as error:
        REFUSED.append(error.code)


@settings(
    max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(packets(), st.data())
def check_damaged_frames(packet: Packet, data: st.DataObject) -> None:
    frames = [bytearray(memoryview(f)) for f in encode(packet.message, packet.frame)]
    victim = frames[data.draw(st.integers(0, len(frames) - 1))]
    if data.draw(st.booleans()) and victim:
        del victim[data.draw(st.integers(0, len(victim) - 1)) :]
    elif victim:
        victim[data.draw(st.integers(0, len(victim) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        list(decode([bytes(f) for f in frames]))
    except WireError as error:
        REFUSED.append(error.code)


@pytest.mark.parametrize("check", [check_random_frames, check_damaged_frames])
def test_no_bytes_do_more_than_raise_a_wire_error(check: object) -> None:
    REFUSED.clear()
    check()  # type: ignore[operator]
    assert len(REFUSED) > 100
