"""Where each process listens and how it is called: the contract between the runner and the services' flags."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from fermata.operator.local.ports import PortBook
from fermata.operator.plan import frontend_replica
from fermata.wire.messages import Ring, Role

FERMATA = (sys.executable, "-P", "-m", "fermata.core.cli")
"""`-P`: the folder the user stands in must not shadow a module of ours or of the standard library."""


@dataclass(frozen=True, slots=True)
class Layout:
    host: str
    port: int
    """Of frontend replica 0; replica i listens on port + i."""
    deployment: Path
    policy: Path
    ports: PortBook
    keys: Path | None = None
    """Folder of the CURVE keyrings; None: nothing is encrypted."""
    executable: tuple[str, ...] = FERMATA

    def endpoint(self, name: str) -> str:
        """Of a router or worker; kept over its restarts."""
        return f"tcp://127.0.0.1:{self.ports.port(name)}"

    def metrics(self, name: str) -> str:
        """Where a router or worker serves its metrics; a frontend does on its own port."""
        return f"http://127.0.0.1:{self.ports.port(f'{name}/metrics')}/metrics"

    def frontend_port(self, name: str) -> int:
        return self.port + frontend_replica(name)

    def url(self, name: str) -> str:
        host = f"[{self.reachable_host}]" if ":" in self.host else self.reachable_host
        return f"http://{host}:{self.frontend_port(name)}"

    @property
    def reachable_host(self) -> str:
        """An address that works from here when `host` means all of them."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)

    def router(self, name: str) -> list[str]:
        number = name.rpartition("-")[2]
        return [
            *(*self.executable, "router", "--id", name, "--number", number),
            *("--deployment", str(self.deployment), "--policy", str(self.policy)),
            *("--listen", self.endpoint(name)),
            *("--metrics-port", str(self.ports.port(f"{name}/metrics"))),
            *self._keys(Role.ROUTER),
        ]

    def worker(self, name: str, *, group: str, revision: str, ring: Ring) -> list[str]:
        return [
            *(*self.executable, "worker", "--id", name, "--group", group, "--revision", revision),
            *("--deployment", str(self.deployment), *_routers(ring)),
            *("--listen", self.endpoint(name)),
            *("--metrics-port", str(self.ports.port(f"{name}/metrics"))),
            *self._keys(Role.WORKER),
        ]

    def frontend(self, name: str, *, ring: Ring) -> list[str]:
        return [
            *(*self.executable, "frontend", "--id", name),
            *("--deployment", str(self.deployment), *_routers(ring)),
            *("--host", self.host, "--port", str(self.frontend_port(name)), "--reuse-port"),
            *self._keys(Role.FRONTEND),
        ]

    def _keys(self, role: Role) -> list[str]:
        return ["--keys", str(self.keys / f"{role.value}.json")] if self.keys else []


def _routers(ring: Ring) -> list[str]:
    members = ",".join(f"{name}={endpoint}" for name, endpoint in ring.members)
    return ["--routers", members, "--epoch", str(ring.epoch)]
