"""CURVE keys of one process: who it is, whom it connects to, whom it lets in.

One server and one client key pair per *role*, so that the key a peer proved says which messages it may send. While
keys rotate, the current and the previous client key of a role are both let in. A keyring is one JSON file, mode 0600,
made by the operator (a Secret) or by `fermata up` (its run folder).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from fermata.core.errors import ConfigError
from fermata.wire.messages import Role


class KeyPair(msgspec.Struct, frozen=True):
    """Z85 text, 40 characters each."""

    public: str
    secret: str


class Keyring(msgspec.Struct, frozen=True):
    role: Role
    client: KeyPair
    servers: dict[Role, str]
    """Public server key of each role that listens."""
    clients: dict[Role, list[str]]
    """Public client keys let in, by role: the current one, then the previous."""
    server: KeyPair | None = None
    """Of a role that listens."""

    def role_of(self, public: str) -> Role | None:
        return next((role for role, keys in self.clients.items() if public in keys), None)


def load_keyring(path: Path) -> Keyring:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Keyring)
    except OSError as error:
        raise ConfigError(
            str(error), where=str(path), fix="name a readable keyring file"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(str(error), where=str(path), fix="let the operator write it") from error


def make_keyrings(
    pairs: dict[tuple[Role, str], KeyPair], *, previous: dict[Role, str] | None = None
) -> dict[Role, Keyring]:
    """One keyring a role from its `(role, "server" | "client")` pairs; `previous` client keys stay let in."""
    listening = (Role.ROUTER, Role.WORKER)
    servers = {role: pairs[role, "server"].public for role in listening}
    clients = {
        role: [pairs[role, "client"].public]
        + ([previous[role]] if previous and role in previous else [])
        for role in Role
    }
    return {
        role: Keyring(
            role=role,
            client=pairs[role, "client"],
            servers=servers,
            clients=clients,
            server=pairs[role, "server"] if role in listening else None,
        )
        for role in Role
    }
