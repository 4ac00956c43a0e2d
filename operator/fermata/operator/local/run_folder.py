"""The folder of one `fermata up`: what its processes read, what they log, and where they can be reached.

.fermata/run-8000/
  deployment.json   the AgentDeployment as its processes read it
  policy.json       the RouterPolicy a router boots with
  endpoints.json    where everything listens; read by `fermata status`
  keys/ROLE.json    CURVE keyrings, with security.curve; made anew at each start
  logs/NAME.log     what each process says
  lock              held while the runner lives
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from fermata.core.errors import ConfigError
from fermata.core.spec import AgentDeployment, RouterPolicySpec
from fermata.wire.keyring import Keyring
from fermata.wire.messages import Role


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `endpoints.json`."""

    pid: int
    deployment: str
    manifest: str
    url: str
    routers: dict[str, str]
    workers: dict[str, str]
    frontends: dict[str, str]
    metrics: dict[str, str] = {}
    """Of routers and workers; a frontend's are under its own URL."""
    keyring: str = ""
    """File of the operator's CURVE keyring, for whoever asks as operator; empty: nothing is encrypted."""


def default_folder(port: int) -> Path:
    return Path(".fermata") / f"run-{port}"


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.deployment = path / "deployment.json"
        self.policy = path / "policy.json"
        self.endpoints = path / "endpoints.json"
        self.keys = path / "keys"
        self._lock: IO[str] | None = None

    def open(self) -> None:
        """Takes the folder, or raises ConfigError: two runners would overwrite each other's files."""
        try:
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("a")
        except OSError as error:
            raise ConfigError(
                f"can not be written: {error.strerror}", where=str(self.path), fix="pass --run-dir"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise ConfigError(
                "another fermata up uses this folder",
                where=str(self.path),
                fix="stop it, or pass another --port or --run-dir",
            ) from None
        self._lock = lock
        for old in (self.path / "logs").glob("*.log*"):
            old.unlink()

    def close(self) -> None:
        if self._lock is not None:
            self.endpoints.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def write_deployment(self, deployment: AgentDeployment) -> None:
        _replace(self.deployment, msgspec.json.format(msgspec.json.encode(deployment)))

    def write_policy(self, policy: RouterPolicySpec) -> None:
        _replace(self.policy, msgspec.json.format(msgspec.json.encode(policy)))

    def write_keys(self, keyrings: Mapping[Role, Keyring]) -> None:
        """Readable by this user only, from the first byte on."""
        self.keys.mkdir(mode=0o700, exist_ok=True)
        for role, keyring in keyrings.items():
            path = self.keys / f"{role.value}.json"
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(keyring))

    def forget_keys(self) -> None:
        shutil.rmtree(self.keys, ignore_errors=True)

    def write_endpoints(self, endpoints: Endpoints) -> None:
        _replace(self.endpoints, msgspec.json.format(msgspec.json.encode(endpoints)))


def read_endpoints(folder: Path) -> Endpoints:
    """Raises ConfigError when no `fermata up` runs there."""
    path = folder / "endpoints.json"
    try:
        endpoints = msgspec.json.decode(path.read_bytes(), type=Endpoints)
    except FileNotFoundError:
        raise ConfigError(
            "no fermata up runs here",
            where=str(folder),
            fix="start one, or pass its --port or --run-dir",
        ) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(
            str(error), where=str(path), fix="remove it and start fermata up again"
        ) from None
    if not _is_alive(endpoints.pid):
        raise ConfigError(
            f"its fermata up (process {endpoints.pid}) is gone",
            where=str(folder),
            fix="start it again",
        )
    return endpoints


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _replace(path: Path, data: bytes) -> None:
    """Readers see the old file or the new one, never half of it."""
    scratch = path.with_name(f"{path.name}.new")
    scratch.write_bytes(data + b"\n")
    scratch.replace(path)
