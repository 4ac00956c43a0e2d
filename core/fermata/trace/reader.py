"""Trace segments back to records; a segment may end anywhere, in the middle of a line or of a gzip block."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fermata.trace.record import TraceLine

_GZIP_OR_ZLIB = 47
_CHUNK = 1 << 16


def segment_path(prefix: Path, number: int) -> Path:
    return prefix.with_name(f"{prefix.name}.{number:06d}.jsonl.gz")


def segments(prefix: Path) -> list[tuple[int, Path]]:
    """Number and path of each segment of the prefix, in order."""
    name = re.compile(re.escape(prefix.name) + r"\.(\d{6,})\.jsonl\.gz")
    found: list[tuple[int, Path]] = []
    for path in prefix.parent.glob("*.jsonl.gz"):
        match = name.fullmatch(path.name)
        if match:
            found.append((int(match[1]), path))
    return sorted(found)


def read_trace(prefix: Path) -> Iterator[TraceLine]:
    """All lines of all segments; what is cut off or unreadable is left out (see TraceFile)."""
    for _, path in segments(prefix):
        yield from TraceFile(path).lines()


@dataclass(slots=True)
class TraceFile:
    path: Path
    malformed: int = 0
    """Lines that are no record; they are skipped."""
    was_cut: bool = False
    """The last line or the gzip stream did not end: its writer was killed, or is still at work."""

    def lines(self) -> Iterator[TraceLine]:
        decoder = msgspec.json.Decoder(TraceLine)
        for raw in self._raw_lines():
            try:
                yield decoder.decode(raw)
            except msgspec.MsgspecError:
                self.malformed += 1

    def _raw_lines(self) -> Iterator[bytes]:
        rest = b""
        for chunk in self._chunks():
            *whole, rest = (rest + chunk).split(b"\n")
            yield from (line for line in whole if line)
        if rest:
            self.was_cut = True

    def _chunks(self) -> Iterator[bytes]:
        gzip = zlib.decompressobj(_GZIP_OR_ZLIB)
        with self.path.open("rb") as file:
            while data := file.read(_CHUNK):
                try:
                    yield gzip.decompress(data)
                except zlib.error:
                    break
        self.was_cut = self.was_cut or not gzip.eof
