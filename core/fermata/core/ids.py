"""Names of things. Strings that come from clients are opaque bytes to us: capped, never parsed,
never metric labels.

A lease id is one unsigned 64-bit integer, so that lists of leases travel as raw frames and a
digest over them is cheap: router number (10 bits), router incarnation (22 bits), serial number (32
bits).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import NewType

SessionId = NewType("SessionId", str)
RequestId = NewType("RequestId", str)
RoutingKey = NewType("RoutingKey", str)
RouterId = NewType("RouterId", str)
WorkerId = NewType("WorkerId", str)
OwnerId = NewType("OwnerId", str)
LeaseId = NewType("LeaseId", int)
BlockHash = NewType("BlockHash", int)
SequenceHash = NewType("SequenceHash", int)

MAX_CLIENT_ID_BYTES = 256

_SERIAL_BITS = 32
_INCARNATION_BITS = 22
_ROUTER_BITS = 10


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """One data-parallel rank of one worker: the unit of placement, of KV capacity and of the
    index."""

    worker: WorkerId
    rank: int = 0


def make_lease_id(*, router: int, incarnation: int, serial: int) -> LeaseId:
    """`incarnation` is cut to its low 22 bits; two boots of one router must differ in those."""
    assert 0 <= router < 1 << _ROUTER_BITS, router
    assert 0 < serial < 1 << _SERIAL_BITS, serial
    low = incarnation & ((1 << _INCARNATION_BITS) - 1)
    return LeaseId(router << (_INCARNATION_BITS + _SERIAL_BITS) | low << _SERIAL_BITS | serial)


def lease_router(lease: LeaseId) -> int:
    return lease >> (_INCARNATION_BITS + _SERIAL_BITS)


def lease_incarnation(lease: LeaseId) -> int:
    return lease >> _SERIAL_BITS & ((1 << _INCARNATION_BITS) - 1)


def lease_serial(lease: LeaseId) -> int:
    return lease & ((1 << _SERIAL_BITS) - 1)


def new_request_id() -> RequestId:
    return RequestId(uuid.uuid4().hex)
