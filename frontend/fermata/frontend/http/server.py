"""uvicorn inside a loop of ours: our socket, our connection class, our signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn

from fermata.core.errors import ConfigError
from fermata.frontend.http.app import FrontendApp
from fermata.frontend.http.connection import ClientConnection

BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """`serve_until_told` runs until `stop`; then it takes no connection more and ends when the last answer has."""

    def __init__(
        self,
        app: FrontendApp,
        *,
        host: str,
        port: int,
        reuse_port: bool = False,
        head_wait_s: float = 30.0,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=ClientConnection,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=75,
                proxy_headers=False,
            )
        )
        self._head_wait_s = head_wait_s
        self.listening = asyncio.Event()
        self.socket = _listen(host, port, reuse_port=reuse_port)

    @property
    def port(self) -> int:
        return int(self.socket.getsockname()[1])

    async def serve_until_told(self) -> None:
        await self.serve(sockets=[self.socket])

    def stop(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # once a second
            self._hang_up_on_the_late()
        return await super().on_tick(counter)

    def _hang_up_on_the_late(self) -> None:
        before = asyncio.get_running_loop().time() - self._head_wait_s
        connections: list[object] = list(self.server_state.connections)
        for connection in connections:
            if isinstance(connection, ClientConnection) and connection.is_late(before=before):
                connection.transport.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """The process has more to end than HTTP: `cli` handles signals for all of it."""
        yield


def _listen(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"can not listen on {host}:{port}: {error.strerror}",
            where="--port",
            fix="choose a free one",
        ) from error
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener
