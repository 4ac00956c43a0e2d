"""What a client says about its turn: `nvext.agent_hints`, `nvext.cache_control`, and their header forms.

Advice only, so nothing here is ever refused: a field of the wrong type or out of range is taken as unsaid, an unknown
one is ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import cast

from fermata.frontend.identity import capped
from fermata.wire.messages import Hints

MAX_CACHE_TTL_S = 86_400.0
_DEFAULT_CACHE_TTL_S = 300.0
_I32 = (1 << 31) - 1
_U32 = (1 << 32) - 1
_PRIORITY = "x-dynamo-request-priority"
_STRICT_PRIORITY = "x-dynamo-request-strict-priority"
_TENANT = "x-tenant-id"
_TTL = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*$")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_NONE: Mapping[str, object] = {}


def parse_hints(nvext: object, headers: Mapping[str, str]) -> Hints:
    """Headers win over the body, as they are what a gateway can set."""
    if nvext is None and _PRIORITY not in headers and _STRICT_PRIORITY not in headers:
        return _UNSAID
    extension = _object(nvext)
    said = _object(extension.get("agent_hints"))
    priority = headers.get(_PRIORITY, said.get("priority"))
    strict = headers.get(_STRICT_PRIORITY, said.get("strict_priority"))
    return Hints(
        priority=_integer(priority, -_I32 - 1, _I32),
        strict_priority=_integer(strict, 0, _U32),
        osl=_integer(said.get("osl"), 0, _U32),
        latency_sensitivity=_number(said.get("latency_sensitivity"), 0.0, 1e6),
        speculative_prefill=said.get("speculative_prefill") is True,
        program_id=_text(said.get("program_id")),
        context_type=_text(said.get("context_type")),
        cache_ttl_s=_cache_ttl_s(extension.get("cache_control")),
    )


def said_program_ids(nvext: object, top_level: object) -> Mapping[str, str]:
    """Where a body may name its program, by dotted path: `identity.ROWS` says which counts."""
    if nvext is None and top_level is None:
        return {}
    hinted = _object(_object(nvext).get("agent_hints")).get("program_id")
    return {"nvext.agent_hints.program_id": _text(hinted), "program_id": _text(top_level)}


def cache_salt(nvext: object, top_level: object, headers: Mapping[str, str]) -> str:
    """The client's own part of the namespace: header over nvext over the body's top level."""
    if nvext is None and top_level is None and _TENANT not in headers:
        return ""
    for value in (headers.get(_TENANT), _object(nvext).get("cache_salt"), top_level):
        if salt := _text(value):
            return salt
    return ""


def namespace_of(tenant: str, salt: str) -> str:
    """A client narrows its tenant's namespace and can never name another's: tenants hold no NUL."""
    return f"{tenant}\0{salt}" if tenant and salt else tenant or salt


_UNSAID = Hints()


def _object(value: object) -> Mapping[str, object]:
    # JSON objects have string keys, whatever their values are.
    return cast("Mapping[str, object]", value) if isinstance(value, dict) else _NONE


def _number(value: object, low: float, high: float) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    if isinstance(value, float) and not math.isfinite(value):
        return 0.0
    # Clamped before it is made a float: JSON has integers that no float can hold.
    return float(min(max(value, low), high))


def _integer(value: object, low: int, high: int) -> int:
    return int(_number(value, low, high))


def _text(value: object) -> str:
    return capped(value) if isinstance(value, str) else ""


def _cache_ttl_s(control: object) -> float:
    said = _object(control)
    if not said:
        return 0.0
    ttl = said.get("ttl")
    if ttl is None:
        return _DEFAULT_CACHE_TTL_S
    if isinstance(ttl, str):
        match = _TTL.match(ttl)
        return min(float(match[1]) * _UNITS[match[2]], MAX_CACHE_TTL_S) if match else 0.0
    return _number(ttl, 0.0, MAX_CACHE_TTL_S)
