"""`fermata policy`: RouterPolicy manifests from elsewhere."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from fermata.core.errors import ConfigError
from fermata.core.spec.document import read_documents
from fermata.operator.policy_convert import Converted, Note, convert

_POLICY = """\
Makes RouterPolicy manifests. `fermata policy convert` takes a router policy of Dynamo: its YAML file, the flags its
frontend is started with, or both.
"""
_CONVERT = """\
Writes Dynamo's router policy as a RouterPolicy: FILE is its YAML (`--router-policy-config`), and what follows `--` are
the flags of its frontend. Whatever has no counterpart here is named on standard error, with the reason, and in the
manifest's head.
"""
_CONVERT_END = """\
examples:
  fermata policy convert thunderagent.yaml -o policy.yaml -- \\
      --router-mode kv --router-session-affinity-ttl-secs 1800 --router-session-affinity-mode soft
  fermata policy convert -- --router-mode kv --router-queue-threshold 16

exit codes: 0 written, also where something was dropped; 2 the file or a flag can not be honoured.
"""


def policy(argv: list[str]) -> int:
    argv, flags = _split(argv)
    given = _parser().parse_args(argv)
    file: Path | None = given.file
    if file is None and not flags:
        raise ConfigError("nothing to convert", fix="give a FILE, or flags after --")
    converted = convert(None if file is None else _read(file), flags, name=given.name)
    text = written(converted, source=file.name if file else "flags")
    if given.output is None:
        print(text, end="")
    else:
        given.output.write_text(text)
    for line in told(converted):
        print(line, file=sys.stderr)
    return 0


def written(converted: Converted, *, source: str) -> str:
    """The manifest, with what became of the rest in its head."""
    head = [f"# Converted from {source}.", *(f"# {line}" for line in told(converted))]
    body: str = yaml.safe_dump(converted.manifest(), sort_keys=False, allow_unicode=True, width=100)  # pyright: ignore[reportUnknownMemberType]  # its stubs
    return "\n".join(head) + "\n" + body


def told(converted: Converted) -> list[str]:
    return [
        *(_line("changed", note) for note in converted.changed),
        *(_line("dropped", note) for note in converted.dropped),
    ]


def _line(what: str, note: Note) -> str:
    return f"{what}: {note.what}: {note.why}"


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Ours, and the flags of Dynamo's frontend after `--`."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _read(file: Path) -> object:
    try:
        text = file.read_text()
    except OSError as error:
        raise ConfigError(
            f"can not be read: {error.strerror}", where=str(file), fix="give a YAML file"
        ) from None
    documents = read_documents(text, where=str(file))
    if len(documents) != 1:
        raise ConfigError(
            f"holds {len(documents)} documents", where=str(file), fix="give one policy a file"
        )
    return documents[0].data


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fermata policy",
        description=_POLICY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    make = commands.add_parser(
        "convert",
        help="a RouterPolicy from Dynamo's",
        description=_CONVERT,
        epilog=_CONVERT_END,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    make.add_argument("file", nargs="?", type=Path, metavar="FILE", help="Dynamo's policy, as YAML")
    make.add_argument("--name", default="converted", help="of the RouterPolicy (converted)")
    make.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="where to (standard output)"
    )
    return parser
