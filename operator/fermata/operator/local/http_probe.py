"""One small GET on a connection of its own, which is how several processes on one port each get asked."""

from __future__ import annotations

import asyncio

MAX_BYTES = 1 << 20


async def get(
    host: str, port: int, path: str, *, timeout_s: float = 1.0
) -> tuple[int, bytes] | None:
    """Status and body, or None when there is no answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _get(host, port, path)
    except (OSError, TimeoutError, ValueError, IndexError, asyncio.IncompleteReadError):
        return None


async def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        name = f"[{host}]" if ":" in host else host
        writer.write(
            f"GET {path} HTTP/1.0\r\nhost: {name}:{port}\r\nconnection: close\r\n\r\n".encode()
        )
        raw = await reader.read(MAX_BYTES)
        while chunk := await reader.read(MAX_BYTES):
            raw += chunk
    finally:
        writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), body
