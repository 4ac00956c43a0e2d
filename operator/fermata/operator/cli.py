"""`fermata up`, and what looks at a running one: `fermata status`, `programs` and `explain`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from fermata.core.ids import RequestId
from fermata.operator.explain import explanation, request_of
from fermata.operator.local.asking import Routers
from fermata.operator.local.console import Console
from fermata.operator.local.run_folder import Endpoints, default_folder, read_endpoints
from fermata.operator.local.runner import Options, Runner
from fermata.operator.local.status import look_around, table
from fermata.operator.local.watching import EVERY_S, watch
from fermata.operator.programs import summary
from fermata.operator.programs import table as program_table

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

exit codes: 0 all answered; 1 some did not; 2 no `fermata up` runs there. With --watch: 0 on Ctrl-C.
"""
_PROGRAMS = """\
Lists the programs that the routers of a running `fermata up` know: sessions of agents, with a turn in flight
(reasoning) or between turns (acting), with their KV kept on a slot (active) or not (paused).
"""
_PROGRAMS_END = """\
examples:
  fermata programs
  fermata programs --port 9000 --watch

columns: context is in tokens; turns are those in flight; idle is the time since the last turn; waits is how long the
first waiting turn has waited, reason what for: pressure (its program is paused), admission (it is new and there is no
room yet), queue (all slots are busy), policy, no_worker, booting. Those that wait come first. Times are of the
deployment's clock (clock.speedup).

exit codes: 0 listed; 1 some router did not answer; 2 no `fermata up` runs there. With --watch: 0 on Ctrl-C.
"""
_EXPLAIN = """\
Says why a turn went where it did, or what it waits for: each decision of a router about it, the slots that could take
it with their cost (the lowest wins) and what they had cached, its holds with their reasons, and the policy's revision.
"""
_EXPLAIN_END = """\
REQUEST is the id of an answer (chatcmpl-...) or its x-request-id header. Without one: the last decisions of all.
Routers remember about a thousand grants and four thousand holds.

examples:
  fermata explain chatcmpl-0b1d2b1c8d5e4a7f9c3e2d1a0f9e8d7c
  fermata explain --last 5

exit codes: 0 explained; 1 no router remembers it; 2 no `fermata up` runs there.
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
    head = f"{endpoints.deployment} from {endpoints.manifest} on {endpoints.url}"

    async def draw() -> tuple[str, bool]:
        looks = await look_around(endpoints)
        silent = any(look.state == "no answer" for kind in looks.values() for look in kind)
        return f"{head}\n\n{table(looks)}", not silent

    return _until_interrupted(_draw(draw, flags), flags)


def programs(argv: list[str]) -> int:
    flags = _programs_parser().parse_args(argv)
    endpoints = read_endpoints(flags.run_dir or default_folder(flags.port))
    return _until_interrupted(_programs(endpoints, flags), flags)


async def _programs(endpoints: Endpoints, flags: argparse.Namespace) -> int:
    with Routers(endpoints) as routers:

        async def draw() -> tuple[str, bool]:
            found = await routers.programs()
            rows = [row for of in found.values() for row in of]
            silent = sorted(set(endpoints.routers) - set(found))
            text = (
                f"{summary(rows, routers=len(found))}\n\n{program_table(rows, limit=flags.limit)}"
            )
            if silent:
                text += f"\n\nno answer from {', '.join(silent)}"
            return text, not silent

        return await _draw(draw, flags)


def explain(argv: list[str]) -> int:
    flags = _explain_parser().parse_args(argv)
    endpoints = read_endpoints(flags.run_dir or default_folder(flags.port))
    return asyncio.run(_explain(endpoints, RequestId(request_of(flags.request)), flags.last))


async def _explain(endpoints: Endpoints, request: RequestId, last: int) -> int:
    with Routers(endpoints) as routers:
        answers = await routers.explain(request, limit=100 if request else last)
    decisions = [decision for answer in answers.values() for decision in answer.decisions]
    if decisions:
        print(explanation(decisions))
        return 0
    what = f"request {request}" if request else "any decision"
    silent = len(endpoints.routers) - len(answers)
    print(f"no router remembers {what}" + (f"; {silent} did not answer" if silent else ""))
    return 1


Draw = Callable[[], Awaitable[tuple[str, bool]]]
"""What to show, and whether all answered."""


def _until_interrupted(look: Coroutine[Any, Any, int], flags: argparse.Namespace) -> int:
    """Ctrl-C is how a watch ends."""
    try:
        return asyncio.run(look)
    except KeyboardInterrupt:
        if flags.watch:
            return 0
        raise


async def _draw(draw: Draw, flags: argparse.Namespace) -> int:
    if not flags.watch:
        shown, is_whole = await draw()
        print(shown)
        return 0 if is_whole else 1

    async def text() -> str:
        return (await draw())[0]

    await watch(text, out=sys.stdout, every_s=flags.every)
    return 0


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
    _add_where(parser)
    _add_watch(parser)
    return parser


def _programs_parser() -> argparse.ArgumentParser:
    parser = _parser("programs", _PROGRAMS, _PROGRAMS_END)
    parser.add_argument("--limit", type=_count, default=40, metavar="N", help="rows to show (40)")
    _add_where(parser)
    _add_watch(parser)
    return parser


def _explain_parser() -> argparse.ArgumentParser:
    parser = _parser("explain", _EXPLAIN, _EXPLAIN_END)
    parser.add_argument("request", nargs="?", default="", metavar="REQUEST", help="which turn")
    parser.add_argument(
        "--last", type=_count, default=10, metavar="N", help="decisions, without a REQUEST (10)"
    )
    _add_where(parser)
    return parser


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=_port, default=8000, help="port of the fermata up (8000)")
    parser.add_argument("--run-dir", type=Path, help="its run folder, when it was given one")


def _add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--watch", action="store_true", help="look again and again, until Ctrl-C")
    parser.add_argument(
        "--every", type=_seconds, default=EVERY_S, metavar="S", help="between two looks (2)"
    )


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


def _count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= 100_000:
        raise argparse.ArgumentTypeError(f"{text} is out of range; use 1 to 100000")
    return count


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is out of range; use above 0 and at most 86400")
    return seconds
