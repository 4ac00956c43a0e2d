"""The `fermata` command: finds the chosen subcommand by entry point and imports only that one.

A router starts without FastAPI, `fermata --help` without anything of ours. Each command is a `main(argv) -> int`
in the entry-point group `fermata.commands`, so a component adds its own without this module knowing it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points, version
from typing import cast

from fermata.core.errors import ConfigError

GROUP = "fermata.commands"

SUMMARIES: dict[str, str] = {
    "up": "run a whole deployment on this machine, from its manifest",
    "status": "show what a running `fermata up` is doing",
    "programs": "list the programs a running `fermata up` schedules",
    "explain": "say why a turn went where it did, or what it waits for",
    "policy": "make a RouterPolicy from Dynamo's",
    "frontend": "serve the OpenAI API of a deployment (one process)",
    "router": "place turns on workers (one process)",
    "worker": "run one engine replica (one process)",
}
"""One line each, kept here because asking the command itself would import it. Order is the order of the help."""

EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130

_HELP = """\
fermata serves whole agent programs: sessions of many turns, whose KV cache it keeps in view.

Two manifests are the whole interface. An AgentDeployment says what runs (model, frontends, routers, workers), a
RouterPolicy how turns are scheduled. The same files run on this machine and in a cluster.

usage: fermata COMMAND [OPTIONS]        fermata COMMAND --help tells all about one command

commands:
{commands}

examples:
  fermata up -f examples/01-quickstart.yaml            serve on http://127.0.0.1:8000, no GPU needed
  fermata up -f fleet.yaml --port 9000 --watch         apply edits of the file while it runs
  fermata status --port 9000                           leases, cache and load of each process
  fermata programs --watch                             who runs, who waits, and what for
"""


def main(argv: list[str] | None = None, *, commands: Mapping[str, EntryPoint] | None = None) -> int:
    """Exit codes: the command's own, 2 for a wrong flag or manifest (one line on stderr), 130 for Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else argv
    if commands is None:
        commands = {entry.name: entry for entry in entry_points(group=GROUP)}
    match arguments:
        case [] | ["-h" | "--help" | "help"]:
            print(help_text(commands), end="")
            return 0
        case ["help", name, *_]:
            return _run(commands, name, ["--help"])
        case ["-V" | "--version" | "version", *_]:
            print(f"fermata {version('fermata')}")
            return 0
        case [name, *rest]:
            return _run(commands, name, rest)
        case _:
            raise AssertionError("a list is empty or has a first item")


def help_text(commands: Mapping[str, EntryPoint]) -> str:
    ours = [name for name in SUMMARIES if name in commands]
    others = sorted(set(commands) - set(ours))
    width = max((len(name) for name in commands), default=0)
    lines = [
        f"  {name:<{width}}  {SUMMARIES.get(name, commands[name].value)}" for name in ours + others
    ]
    return _HELP.format(commands="\n".join(lines))


def _run(commands: Mapping[str, EntryPoint], name: str, argv: list[str]) -> int:
    if name not in commands:
        print(f"fermata: no command {name!r} ({_suggestion(name, commands)})", file=sys.stderr)
        return EXIT_CONFIG
    try:
        # The group's contract; a wrong one fails right here, at the call.
        command = cast("Callable[[list[str]], int]", commands[name].load())
        return command(argv)
    except ConfigError as error:
        print(f"fermata {name}: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _suggestion(name: str, commands: Mapping[str, EntryPoint]) -> str:
    if name.startswith("-"):
        return "options come after the command; see fermata --help"
    close = get_close_matches(name.lower(), commands, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else "see fermata --help"


if __name__ == "__main__":
    sys.exit(main())
