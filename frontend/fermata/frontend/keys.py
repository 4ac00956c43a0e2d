"""API keys: who calls, and which tenant they are of."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from xxhash import xxh3_64_hexdigest


class Caller(msgspec.Struct, frozen=True, gc=False):
    tenant: str
    """Its KV and its sessions are its own. Empty where no keys are configured: all share one namespace."""
    scope: str
    """Holder of the key, never the key itself: whose anonymous turns may belong together."""


class ApiKeys:
    def __init__(self, tenants: Mapping[str, str]) -> None:
        """Key -> tenant; empty accepts everyone."""
        self._tenants = dict(tenants)

    def caller(self, headers: Mapping[str, str]) -> Caller | None:
        """None for a key that is not known."""
        key = _key(headers)
        tenant = ""
        if self._tenants:
            known = self._tenants.get(key)
            if known is None:
                return None
            tenant = known
        return Caller(tenant, xxh3_64_hexdigest(key.encode()) if key else "")


def _key(headers: Mapping[str, str]) -> str:
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    return headers.get("x-api-key", "").strip()
