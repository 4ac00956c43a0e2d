"""`fermata worker`: one engine replica."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from fermata.core.clock import Clock, SystemClock
from fermata.core.errors import ConfigError
from fermata.core.ids import WorkerId
from fermata.core.model_folder import default_model_folder
from fermata.core.ring import Ring
from fermata.core.spec import AgentDeploymentSpec, WorkerGroupSpec
from fermata.core.spec.boot import read_deployment
from fermata.wire.keyring import load_keyring
from fermata.wire.socket import new_context
from fermata.worker.engine.base import Engine
from fermata.worker.engine.paced import SimulatedRank
from fermata.worker.engine.responder import make_responder
from fermata.worker.metrics import serve_metrics
from fermata.worker.service import WorkerConfig, WorkerService

log = logging.getLogger("fermata.worker")

_DESCRIPTION = """\
Runs one replica of a worker group: its engine (each data-parallel rank of it), its KV events and
its leases. It announces itself to every router of the ring and takes turns from frontends.
"""
_EPILOG = """\
example:
  fermata worker --id sim-0 --group sim --deployment build/deployment.json \\
      --routers router-0=tcp://127.0.0.1:5570 --epoch 1

SIGTERM or SIGINT drains: running turns end, or are handed back after --drain seconds. A second one
exits at once.
"""


def main(argv: list[str]) -> int:
    """Exit codes: 0 drained, 1 the engine broke; ConfigError is for the caller to print."""
    flags = _parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="time=%(asctime)s level=%(levelname)s logger=%(name)s %(message)s",
    )
    file = Path(flags.deployment)
    deployment = read_deployment(file)
    group = _group(deployment.spec, flags.group)
    config = WorkerConfig(
        id=WorkerId(flags.id),
        incarnation=time.time_ns(),
        deployment=deployment,
        group=group,
        ring=Ring.parse(flags.epoch, flags.routers),
        listen=flags.listen,
        revision=flags.revision,
        drain_s=flags.drain,
    )
    clock = SystemClock(deployment.spec.clock.speedup)
    engines = _engines(deployment.spec, group, base=file.parent, clock=clock)
    log.info(
        "starting id=%s group=%s engine=%s ranks=%d block_size=%d kv_blocks=%d speedup=%g "
        "revision=%s epoch=%d routers=%s",
        config.id, group.name, group.engine, len(engines), group.block_size,
        engines[0].info.kv_blocks["device"], clock.speedup, config.revision or "-",
        config.ring.epoch, ",".join(f"{name}={at}" for name, at in config.ring.members.items()),
    )  # fmt: skip
    keys = Path(flags.keys) if flags.keys else None
    return uvloop.run(_serve(config, clock, engines, keys, flags.metrics_port))


async def _serve(
    config: WorkerConfig,
    clock: Clock,
    engines: Sequence[Engine],
    keys: Path | None,
    metrics_port: int | None,
) -> int:
    context = new_context(load_keyring(keys) if keys else None)
    service = WorkerService(config, clock=clock, context=context, engines=engines)
    _handle_signals(service, config.drain_s)
    stop_metrics = (
        serve_metrics(service.numbers, host="127.0.0.1", port=metrics_port)
        if metrics_port is not None
        else None
    )
    try:
        await service.run()
    except Exception:
        # Supervisor boundary: whoever started us starts us again.
        log.exception("stopped by a fault id=%s", config.id)
        return 1
    finally:
        if stop_metrics is not None:
            stop_metrics()
        context.destroy(linger=500)
    log.info("stopped id=%s", config.id)
    return 0


def _handle_signals(service: WorkerService, drain_s: float) -> None:
    told: list[int] = []

    def stop() -> None:
        if told:
            os._exit(1)
        told.append(1)
        service.drain(drain_s)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


def _group(spec: AgentDeploymentSpec, name: str) -> WorkerGroupSpec:
    for group in spec.workers:
        if group.name == name:
            return group
    names = ", ".join(group.name for group in spec.workers)
    raise ConfigError(f"the deployment has no worker group {name!r}", where="--group", fix=names)


def _engines(
    spec: AgentDeploymentSpec, group: WorkerGroupSpec, *, base: Path, clock: Clock
) -> list[Engine]:
    """One engine a data-parallel rank."""
    if group.engine != "Simulated":
        raise ConfigError(
            f"this build has no {group.engine} engine",
            where=f"workers[{group.name}].engine",
            fix="use Simulated",
        )
    folder = base / spec.model.path if spec.model.path else default_model_folder()
    responder = make_responder(group.simulated.responder, folder=folder)
    return [
        SimulatedRank(
            group,
            rank=rank,
            routing_block_size=spec.routing_block_size,
            context_length=spec.model.context_length,
            clock=clock,
            responder=responder,
        )
        for rank in range(group.data_parallel)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fermata worker",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--id", required=True, help="this replica's name, unique among workers")
    add("--group", required=True, help="worker group of the deployment")
    add("--deployment", required=True, metavar="FILE", help="AgentDeployment as JSON")
    add("--routers", required=True, metavar="NAME=ENDPOINT[,...]", help="members of the ring")
    add("--epoch", type=int, default=1, help="of the ring (%(default)s)")
    add("--listen", default="tcp://127.0.0.1:*", help="where frontends send turns (%(default)s)")
    add("--revision", default="", help="of the group's template, reported to routers")
    add("--drain", type=float, default=30.0, metavar="SECONDS", help="see below (%(default)s)")
    add("--keys", metavar="FILE", help="CURVE keyring; without it nothing is encrypted")
    add("--metrics-port", type=int, help="serve /metrics there, on loopback")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
