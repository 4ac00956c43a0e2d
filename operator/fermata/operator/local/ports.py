"""TCP ports: whether one can be had, and ports for the parts that no person has to know.

Those are taken below the kernel's ephemeral range. A port inside it may become the local end of anyone's outgoing
connection while its owner is being restarted, and then the owner could not come back.
"""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

LOWEST = 20_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def is_free(port: int, *, host: str = "127.0.0.1") -> bool:
    """Raises OSError when `host` is no address of this machine, or the port needs rights we lack."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the servers do: a port that only has connections winding down can be had.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)  # two binds may share a port until one of them listens
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


class PortBook:
    """Ports by name, chosen once and kept while this process lives."""

    def __init__(self, *, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._ports: dict[str, int] = {}
        self._highest = _below_ephemeral()

    def port(self, name: str) -> int:
        if name not in self._ports:
            self._ports[name] = self._choose()
        return self._ports[name]

    def forget(self, name: str) -> None:
        self._ports.pop(name, None)

    def _choose(self) -> int:
        for _ in range(1000):
            port = self._random.randint(LOWEST, self._highest)
            if port not in self._ports.values() and is_free(port):
                return port
        raise OSError(errno.EADDRINUSE, f"no free port between {LOWEST} and {self._highest}")


def _below_ephemeral() -> int:
    try:
        low = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        low = 32_768
    return low - 1 if low > LOWEST + 1000 else 65_535
