"""`fermata frontend`: one server process."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import uvloop

from fermata.core.clock import SystemClock
from fermata.core.ids import OwnerId
from fermata.core.model_folder import ModelFolder, default_model_folder
from fermata.core.ring import Ring
from fermata.core.spec import ModelSpec
from fermata.core.spec.boot import read_deployment
from fermata.frontend.config import FrontendConfig
from fermata.frontend.http.app import FrontendApp
from fermata.frontend.http.server import HttpServer
from fermata.frontend.prompt import PromptModel
from fermata.frontend.service import FrontendService
from fermata.trace import TraceWriter
from fermata.wire.keyring import Keyring, load_keyring
from fermata.wire.socket import new_context

log = logging.getLogger("fermata.frontend")

_DESCRIPTION = """\
Serves the OpenAI API of one deployment: renders and tokenises prompts, asks a router for a worker, and streams what the
worker says. Any number of frontends may serve one deployment.
"""
_EPILOG = """\
example:
  fermata frontend --id frontend-0 --deployment build/deployment.json \\
      --routers router-0=tcp://127.0.0.1:5570 --epoch 1 --port 8000

SIGTERM or SIGINT stops taking connections, ends when the last answer has, and exits with 0; a second one exits at once.
"""


def main(argv: list[str]) -> int:
    """Exit codes: 0 after a clean stop; ConfigError is for the caller to print."""
    config, folder, keys = configure(argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="time=%(asctime)s level=%(levelname)s logger=%(name)s %(message)s",
    )
    model = PromptModel.load(
        folder, block_size=config.block_size, cache_bytes=config.frontend.session_cache_bytes
    )
    _log_start(config, model)
    uvloop.run(_serve(config, model, keys))
    log.info("stopped id=%s", config.id)
    return 0


def configure(argv: list[str]) -> tuple[FrontendConfig, ModelFolder, Keyring | None]:
    """Flags and files to values. ConfigError names what is wrong and the fix."""
    flags = _parser().parse_args(argv)
    file = Path(flags.deployment)
    deployment = read_deployment(file)
    config = FrontendConfig(
        id=OwnerId(flags.id),
        deployment=deployment,
        ring=Ring.parse(flags.epoch, flags.routers),
        host=flags.host,
        port=flags.port,
        reuse_port=flags.reuse_port,
    )
    keys = load_keyring(Path(flags.keys)) if flags.keys else None
    return config, _model_folder(deployment.spec.model, file.parent), keys


async def _serve(config: FrontendConfig, model: PromptModel, keys: Keyring | None) -> None:
    clock = SystemClock(config.deployment.spec.clock.speedup)
    context = new_context(keys)
    trace = _trace(config)
    service = FrontendService(config, clock=clock, context=context)
    app = FrontendApp(config, service=service, model=model, trace=trace)
    server = HttpServer(
        app,
        host=config.host,
        port=config.port,
        reuse_port=config.reuse_port,
        head_wait_s=config.http.head_wait_s,
    )
    # What was loaded lives as long as the process: a collector that walks it each time costs every stream.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    _handle_signals(service, server)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(service.run()), tasks.create_task(app.run())]
            await server.serve_until_told()
            for task in running:
                task.cancel()
    finally:
        if trace is not None:
            trace.close()
        context.destroy(linger=500)


def _handle_signals(service: FrontendService, server: HttpServer) -> None:
    def stop() -> None:
        if service.is_draining:
            os._exit(1)
        log.info("draining turns=%d", len(service.table))
        service.is_draining = True
        server.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


def _trace(config: FrontendConfig) -> TraceWriter | None:
    spec = config.frontend.trace
    return TraceWriter(Path(spec.path), roll_bytes=spec.roll_bytes) if spec.enabled else None


def _log_start(config: FrontendConfig, model: PromptModel) -> None:
    spec = config.deployment.spec
    log.info(
        "starting id=%s listen=%s:%d model=%s folder=%s block_size=%d speedup=%g keys=%d trace=%s epoch=%d routers=%s",
        config.id, config.host, config.port, spec.model.name, model.folder.path, config.block_size,
        spec.clock.speedup, len(config.frontend.api_keys), config.frontend.trace.enabled, config.ring.epoch,
        ",".join(f"{name}={at}" for name, at in config.ring.members.items()),
    )  # fmt: skip
    choice = model.choice
    log.info(
        "tokenizer library=%s reason=%s probes=%d probe_s=%.3f",
        choice.library, choice.reason.replace(" ", "_"), choice.probes, choice.probe_s,
    )  # fmt: skip


def _model_folder(model: ModelSpec, base: Path) -> ModelFolder:
    path = base / model.path if model.path else default_model_folder()
    template = base / model.chat_template if model.chat_template else None
    return ModelFolder.load(path, chat_template=template)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fermata frontend",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--id", required=True, help="this process's name, unique among frontends")
    add("--deployment", required=True, metavar="FILE", help="AgentDeployment as JSON")
    add("--routers", required=True, metavar="NAME=ENDPOINT[,...]", help="members of the ring")
    add("--epoch", type=int, default=1, help="of the ring (%(default)s)")
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (%(default)s)")
    add("--keys", metavar="FILE", help="CURVE keyring; without it nothing is encrypted")
    add("--reuse-port", action="store_true", help="let several processes share the port")
    return parser


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
