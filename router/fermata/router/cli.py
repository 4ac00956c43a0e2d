"""`fermata router`: one router process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import uvloop

from fermata.core.clock import Clock, SystemClock
from fermata.core.errors import ConfigError
from fermata.core.ids import RouterId
from fermata.core.spec import AgentDeploymentSpec, RouterPolicySpec
from fermata.core.spec.boot import read_deployment
from fermata.router.core import RouterConfig
from fermata.router.metrics import serve_metrics
from fermata.router.service import RouterService
from fermata.wire.keyring import load_keyring
from fermata.wire.socket import new_context

log = logging.getLogger("fermata.router")

_DESCRIPTION = """\
Decides where turns go: knows which worker holds which prefix, who holds which lease, and the
policy. It carries no tokens and keeps nothing on disk: killed and started again, it is right again
within seconds.
"""
_EPILOG = """\
example:
  fermata router --id router-0 --number 0 --deployment build/deployment.json --listen
  tcp://127.0.0.1:5570

Without --policy it waits for the operator's, 5 s at most, then serves with the defaults.
"""


def main(argv: list[str]) -> int:
    """Exit codes: 0 after a clean stop; ConfigError is for the caller to print."""
    flags = _parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="time=%(asctime)s level=%(levelname)s logger=%(name)s %(message)s",
    )
    spec = read_deployment(Path(flags.deployment)).spec
    policy = _policy(Path(flags.policy)) if flags.policy else None
    config = RouterConfig(
        id=RouterId(flags.id),
        number=flags.number,
        # Seconds: another value each boot, and 48 days before one comes again.
        incarnation=int(time.time()),
        endpoint=flags.listen,
        block_size=spec.routing_block_size,
        models=_models(spec),
        speedup=spec.clock.speedup,
        seed=time.time_ns(),
    )
    log.info(
        "starting id=%s number=%d listen=%s model=%s block_size=%d speedup=%g policy=%s",
        config.id, config.number, flags.listen, spec.model.name, config.block_size, config.speedup,
        policy.scheduler.type if policy else "(to come)",
    )  # fmt: skip
    uvloop.run(
        _serve(
            config,
            SystemClock(config.speedup),
            policy,
            listen=flags.listen,
            keys=Path(flags.keys) if flags.keys else None,
            metrics_port=flags.metrics_port,
        )
    )
    log.info("stopped id=%s", config.id)
    return 0


async def _serve(
    config: RouterConfig,
    clock: Clock,
    policy: RouterPolicySpec | None,
    *,
    listen: str,
    keys: Path | None,
    metrics_port: int | None,
) -> None:
    context = new_context(load_keyring(keys) if keys else None)
    service = RouterService(config, clock=clock, context=context, listen=listen, policy=policy)
    _handle_signals(service)
    stop_metrics = (
        serve_metrics(service.scrape, host="127.0.0.1", port=metrics_port)
        if metrics_port is not None
        else None
    )
    try:
        await service.run()
    finally:
        if stop_metrics is not None:
            stop_metrics()
        context.destroy(linger=200)


def _handle_signals(service: RouterService) -> None:
    told: list[int] = []

    def stop() -> None:
        if told:
            os._exit(1)
        told.append(1)
        service.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


def _policy(file: Path) -> RouterPolicySpec:
    try:
        policy = msgspec.json.decode(file.read_bytes(), type=RouterPolicySpec)
    except OSError as error:
        raise ConfigError(
            f"can not be read: {error.strerror}", where=str(file), fix="give --policy a JSON file"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(str(error), where=str(file), fix="correct the field it names") from error
    for field, what, fix in policy.problems():
        raise ConfigError(what, where=f"{file}: {field}", fix=fix)
    return policy


def _models(spec: AgentDeploymentSpec) -> dict[str, str]:
    return {name: spec.model.name for name in (spec.model.name, *spec.model.aliases)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fermata router",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--id", required=True, help="this router's name in the ring")
    add("--number", type=int, required=True, help="its number, unique in the ring, below 1024")
    add("--deployment", required=True, metavar="FILE", help="AgentDeployment as JSON")
    add("--listen", required=True, metavar="ENDPOINT", help="where everybody links to")
    add("--policy", metavar="FILE", help="RouterPolicy spec as JSON to boot with")
    add("--keys", metavar="FILE", help="CURVE keyring; without it nothing is encrypted")
    add("--metrics-port", type=int, help="serve /metrics there, on loopback")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
