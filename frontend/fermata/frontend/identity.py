"""Whose turn it is: the session, its parent, and the key that picks the router.

Ids are opaque, and change nothing by themselves. `ROWS` says in order of precedence where each client puts its own, in
headers or in the body; the first row whose session is present wins. A row is data, so another client is another row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fermata.core.ids import MAX_CLIENT_ID_BYTES, RequestId, RoutingKey, SessionId

FINAL_HEADER = "x-dynamo-session-final"
_TRUE = frozenset({"1", "true", "yes", "on", "t"})


@dataclass(frozen=True, slots=True)
class IdentityRow:
    """Header names, lower case; of several the first present counts. `tree` names the whole agent tree,
    where a client does. `body` are dotted paths into the body, looked at where no header of the row is present."""

    client: str
    session: tuple[str, ...] = ()
    parent: tuple[str, ...] = ()
    tree: tuple[str, ...] = ()
    body: tuple[str, ...] = ()


ROWS: tuple[IdentityRow, ...] = (
    IdentityRow(
        client="dynamo", session=("x-dynamo-session-id",), parent=("x-dynamo-parent-session-id",)
    ),
    # Last before a session is inferred: a program id names what it is about, not who speaks.
    IdentityRow(client="program_id", body=("nvext.agent_hints.program_id", "program_id")),
)
_NOTHING: Mapping[str, str] = {}


class Identity(msgspec.Struct, frozen=True, gc=False):
    """As the client said it. Empty session: anonymous."""

    session: str = ""
    parent: str = ""
    tree: str = ""
    final: bool = False
    client: str = ""


ANONYMOUS = Identity()
_ANONYMOUS_END = Identity(final=True)


class ScopedIdentity(msgspec.Struct, frozen=True, gc=False):
    """As the rest of Fermata sees it: two tenants never share a session by using the same words."""

    session: SessionId
    parent: SessionId
    key: RoutingKey
    inferred: bool = False


def identify(
    headers: Mapping[str, str],
    said: Mapping[str, str] = _NOTHING,
    *,
    rows: Sequence[IdentityRow] = ROWS,
) -> Identity:
    """`headers` by lower-case name, `said` by dotted path in the body."""
    for row in rows:
        session = _first(headers, row.session) or _first(said, row.body)
        if session:
            parent = _first(headers, row.parent)
            return Identity(
                session=session,
                parent="" if parent == session else parent,
                tree=_first(headers, row.tree),
                final=is_final(headers),
                client=row.client,
            )
    return _ANONYMOUS_END if is_final(headers) else ANONYMOUS


def is_final(headers: Mapping[str, str]) -> bool:
    return headers.get(FINAL_HEADER, "").strip().lower() in _TRUE


def scoped(identity: Identity, *, tenant: str) -> ScopedIdentity:
    """For an identity that has a session."""
    session, parent = _scope(identity.session, tenant), _scope(identity.parent, tenant)
    key = _scope(identity.tree, tenant) or parent or session
    return ScopedIdentity(SessionId(session), SessionId(parent), RoutingKey(key))


def inferred(lineage: SessionId) -> ScopedIdentity:
    """An anonymous turn that was recognised by its prompt."""
    return ScopedIdentity(lineage, SessionId(""), RoutingKey(lineage), inferred=True)


def unknown(request: RequestId) -> ScopedIdentity:
    """An anonymous turn that was not: any router will do."""
    return ScopedIdentity(SessionId(""), SessionId(""), RoutingKey(request))


def capped(text: str) -> str:
    """Trimmed, and cut to the bound at a character's border."""
    text = text.strip()
    if len(text) * 4 <= MAX_CLIENT_ID_BYTES:
        return text
    return text.encode()[:MAX_CLIENT_ID_BYTES].decode(errors="ignore")


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    for name in names:
        value = headers.get(name)
        if value is not None and (value := capped(value)):
            return value
    return ""


def _scope(name: str, tenant: str) -> str:
    return f"{tenant}/{name}" if tenant and name else name
