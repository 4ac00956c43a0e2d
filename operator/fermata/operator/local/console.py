"""What `fermata up` tells the person who started it. Plain lines, flushed; nobody listening is no error."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from fermata.core.spec import Manifests
from fermata.operator.local.supervisor import Death


class Console:
    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out

    def say(self, text: str = "") -> None:
        with suppress(OSError, ValueError):  # the terminal is gone, the deployment is not
            print(text, file=self._out, flush=True)

    def progress(self, name: str, what: str) -> None:
        self.say(f"  {name:<12} {what}")

    def quote(self, name: str, lines: Iterable[str]) -> None:
        """Lines of a process's own log."""
        for line in lines:
            self.say(f"    {name} | {line}")


def headline(manifests: Manifests, manifest: Path) -> str:
    policy = manifests.policy
    return (
        f"fermata up: {manifests.deployment.metadata.name} from {manifest},"
        f" policy {policy.metadata.name} ({policy.spec.scheduler.type})"
    )


def banner(
    manifests: Manifests,
    *,
    url: str,
    manifest: Path,
    logs: Path,
    port: int,
    watching: bool,
    took_s: float,
) -> str:
    """The URL, a request ready to paste, and what to do next."""
    edits = "apply at once" if watching else "apply on SIGHUP, or start with --watch"
    return "\n".join(
        [
            "",
            f"Ready in {took_s:.1f} s: {url}/v1 serves {manifests.deployment.spec.model.name}. Try:",
            "",
            curl(manifests, url=url),
            "",
            f"  status  fermata status --port {port}",
            f"  logs    {logs}",
            f"  edits   of {manifest} {edits}",
            "  stop    Ctrl-C",
            "",
        ]
    )


def curl(manifests: Manifests, *, url: str) -> str:
    spec = manifests.deployment.spec
    body = {
        "model": spec.model.name,
        "stream": True,
        "messages": [{"role": "user", "content": "Hold that note, please."}],
    }
    key = next(iter(spec.frontend.api_keys), None)
    headers = ["content-type: application/json", *([f"authorization: Bearer {key}"] if key else [])]
    lines = [f"  curl -N {url}/v1/chat/completions"]
    lines += [f"    -H {shlex.quote(header)}" for header in headers]
    lines += [f"    -d {shlex.quote(json.dumps(body))}"]
    return " \\\n".join(lines)


def death_line(death: Death) -> str:
    return (
        f"{describe_exit(death.code)} after {death.ran_s:.1f} s,"
        f" starts again in {death.again_in_s:.1f} s"
    )


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
