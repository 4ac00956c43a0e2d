"""A tiny router, worker or frontend with the real flags and the real wire, for tests of the runner alone.

It misbehaves on demand: the deployment's annotation `stand-in/NAME` (of a process, a group or a kind) may say
`exit-2`, `crash`, `crash-once`, `refuse-policy`, `never-ready`, `deaf` (ignores SIGTERM) or `grandchild` (leaves a
process behind).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from fermata.core.ids import RouterId
from fermata.core.spec import RouterPolicySpec
from fermata.wire.messages import (
    Drain,
    DrainStatus,
    Hello,
    PolicyAck,
    Ring,
    Role,
    SetPolicy,
    Status,
    StatusRequest,
    Welcome,
    WorkerInfo,
)
from fermata.wire.socket import Link, Listener, Packet, Peer, new_context

ALIVE_S = 1.0


def main() -> None:
    kind = sys.argv[1]
    parser = argparse.ArgumentParser()
    for flag in (
        "id",
        "number",
        "deployment",
        "listen",
        "policy",
        "group",
        "revision",
        "routers",
        "epoch",
        "metrics-port",
        "keys",
    ):
        parser.add_argument(f"--{flag}")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--reuse-port", action="store_true")
    flags = parser.parse_args(sys.argv[2:])
    deployment = json.loads(Path(flags.deployment).read_text())
    notes = deployment["metadata"].get("annotations", {})
    mood = next(
        (notes[f"stand-in/{n}"] for n in (flags.id, flags.group, kind) if f"stand-in/{n}" in notes),
        "",
    )
    print(f"level=INFO id={flags.id} mood={mood} argv={sys.argv[1:]}", flush=True)
    misbehave(mood, Path(flags.deployment).parent / f"crashed-{flags.id}")
    asyncio.run({"router": router, "worker": worker, "frontend": frontend}[kind](flags, mood))


def misbehave(mood: str, marker: Path) -> None:
    if mood == "exit-2":
        print("fermata: the flag is wrong (put it right)", flush=True)
        sys.exit(2)
    if mood == "crash" or (mood == "crash-once" and not marker.exists()):
        marker.touch()
        print("Traceback: it broke", flush=True)
        sys.exit(1)
    if mood == "grandchild":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "grandchild"])


async def until_terminated(mood: str) -> None:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, (lambda: None) if mood == "deaf" else over.set)
    await over.wait()


async def router(flags: argparse.Namespace, mood: str) -> None:
    seen: dict[str, float] = {}
    state = {"revision": 0}

    def receive(peer: Peer, packet: Packet) -> None:
        match packet.message:
            case Hello(role="worker", id=name):
                seen[name] = time.monotonic()
                listener.send(
                    peer,
                    Welcome(RouterId(flags.id), 0, 1, Ring(1, []), state["revision"], len(seen)),
                )
            case SetPolicy() as policy if mood == "refuse-policy":
                listener.send(
                    peer,
                    PolicyAck(policy.uid, policy.generation, policy.revision, False, ["too odd"]),
                )
            case SetPolicy() as policy:
                state["revision"] = policy.revision
                print(
                    f"policy revision={policy.revision} epoch={policy.ring.epoch} {policy.spec!r}",
                    flush=True,
                )
                listener.send(peer, PolicyAck(policy.uid, policy.generation, policy.revision, True))
            case StatusRequest():
                ready = [n for n, at in seen.items() if time.monotonic() - at < ALIVE_S]
                listener.send(
                    peer,
                    Status(
                        flags.id,
                        {"policy_revision": state["revision"], "workers_ready": len(ready)},
                        {"workers": ",".join(ready), "state": "serving"},
                    ),
                )
            case Drain():
                listener.send(peer, DrainStatus("drained", 0))
            case _:
                pass

    context = new_context()
    listener = Listener(context, flags.listen, role=Role.ROUTER, receive=receive)
    assert json.loads(Path(flags.policy).read_bytes()) is not None
    assert RouterPolicySpec()
    await until_terminated(mood)
    listener.close()
    context.destroy(linger=0)


async def worker(flags: argparse.Namespace, mood: str) -> None:
    over = asyncio.Event()
    me = Peer(Role.WORKER, flags.id, time.time_ns())

    def receive(peer: Peer, packet: Packet) -> None:
        match packet.message:
            case StatusRequest():
                state = "starting" if mood == "never-ready" else "serving"
                listener.send(
                    peer,
                    Status(flags.id, {"requests": 0}, {"state": state, "revision": flags.revision}),
                )
            case Drain(deadline_s=deadline_s):
                print(f"drain deadline_s={deadline_s}", flush=True)
                listener.send(peer, DrainStatus("drained", 0))
                over.set()
            case _:
                pass

    context = new_context()
    listener = Listener(context, flags.listen, role=Role.WORKER, receive=receive)
    links = [
        Link(context, member.partition("=")[2], me=me, receive=lambda packet: None)
        for member in flags.routers.split(",")
    ]
    info = WorkerInfo(listener.endpoint, "m", 1, 64, 64, {"device": 1}, 1, 1, 1)
    terminated = asyncio.create_task(until_terminated(mood))
    drained = asyncio.create_task(over.wait())
    while not (terminated.done() or drained.done()):
        for link in links:
            if not link.blocked:
                link.send(Hello("worker", flags.id, me.incarnation, info))
        await asyncio.wait({terminated, drained}, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.05)  # lets the DrainStatus go out
    for endpoint in (listener, *links):
        endpoint.close()
    context.destroy(linger=0)


async def frontend(flags: argparse.Namespace, mood: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1].decode()
        while (await reader.readline()).strip():
            pass
        body = json.dumps(
            {"id": flags.id, "turns": 0, "prompts": {"cached_tokens": 9, "tokenised_tokens": 1}}
        )
        status = "503 no" if path == "/ready" and mood == "never-ready" else "200 OK"
        writer.write(f"HTTP/1.0 {status}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, flags.host, flags.port, reuse_port=flags.reuse_port)
    async with server:
        await until_terminated(mood)


if __name__ == "__main__":
    main()
