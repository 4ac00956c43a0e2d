"""`fermata up` and `fermata status`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from fermata.operator.local.console import Console
from fermata.operator.local.run_folder import default_folder, read_endpoints
from fermata.operator.local.runner import Options, Runner
from fermata.operator.local.status import look_around, table

_UP = """\
Runs a whole deployment on this machine: routers, workers and frontends as processes on loopback, from the same
manifests a cluster takes. Waits until each is really ready, starts again what dies, and stops all of it on Ctrl-C.

FILE holds one AgentDeployment and the RouterPolicy it names (YAML documents). With --watch an edit of the file applies
while everything runs: a policy is pushed to the routers, replicas are added or drained, a changed worker group is
started anew beside the old one, which drains. A bad edit is told in one line and changes nothing. SIGHUP reads the
file again, too.
"""
_UP_END = """\
examples:
  fermata up -f examples/01-quickstart.yaml
  fermata up -f examples/01-quickstart.yaml --port 9000 --watch

exit codes: 0 stopped as asked; 1 something never became ready (its last words are shown); 2 nothing was started, for
the manifest, a flag or the port is wrong; 130 killed by a second Ctrl-C.
"""
_STATUS = """\
Asks every process of a running `fermata up` for its numbers and prints them as a table.
"""
_STATUS_END = """\
columns: owners are frontends with a live incarnation; leases are turns in flight; index blocks are (block, slot) pairs
of the prefix index; cached share is the share of prompt tokens whose tokenisation was remembered.

exit codes: 0 all answered; 1 some did not; 2 no `fermata up` runs there.
"""


def up(argv: list[str]) -> int:
    flags = _up_parser().parse_args(argv)
    logging.basicConfig(
        level=logging.WARNING,
        stream=sys.stderr,
        format="level=%(levelname)s logger=%(name)s %(message)s",
    )
    options = Options(
        manifest=flags.file,
        folder=flags.run_dir or default_folder(flags.port),
        host=flags.host,
        port=flags.port,
        watch=flags.watch,
        ready_timeout_s=flags.ready_timeout,
        drain_s=flags.drain_timeout,
    )
    return asyncio.run(Runner(options, Console()).run())


def status(argv: list[str]) -> int:
    flags = _status_parser().parse_args(argv)
    endpoints = read_endpoints(flags.run_dir or default_folder(flags.port))
    looks = asyncio.run(look_around(endpoints))
    print(f"{endpoints.deployment} from {endpoints.manifest} on {endpoints.url}\n\n{table(looks)}")
    silent = any(look.state == "no answer" for kind in looks.values() for look in kind)
    return 1 if silent else 0


def _up_parser() -> argparse.ArgumentParser:
    parser = _parser("up", _UP, _UP_END)
    add = parser.add_argument
    add("-f", "--file", type=Path, required=True, help="manifest to run")
    add(
        "--port",
        type=_port,
        default=8000,
        help="of the first frontend; replica i gets port + i (8000)",
    )
    add("--host", default="127.0.0.1", help="address the frontends listen on (127.0.0.1)")
    add("--watch", action="store_true", help="apply edits of the manifest while it runs")
    add("--run-dir", type=Path, help="folder for logs and endpoints (.fermata/run-PORT)")
    add(
        "--ready-timeout",
        type=_seconds,
        default=120.0,
        metavar="S",
        help="until all is ready (120)",
    )
    add(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="for a leaving worker's turns (30)",
    )
    return parser


def _status_parser() -> argparse.ArgumentParser:
    parser = _parser("status", _STATUS, _STATUS_END)
    parser.add_argument("--port", type=_port, default=8000, help="port of the fermata up (8000)")
    parser.add_argument("--run-dir", type=Path, help="its run folder, when it was given one")
    return parser


def _parser(command: str, about: str, end: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"fermata {command}",
        description=about,
        epilog=end,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _port(text: str) -> int:
    port = int(text)
    if not 1 <= port <= 65_535:
        raise argparse.ArgumentTypeError(f"{port} is no port; use 1 to 65535")
    return port


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is out of range; use above 0 and at most 86400")
    return seconds
