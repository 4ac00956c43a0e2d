"""The path of a turn through HTTP, streamed or whole; the same for every dialect.

The status is decided as late as it can be: until the first byte an error is a proper HTTP status. The first byte goes
out with the first text, or at once when the turn is held (proxies and clients give up on silence), or when the client
has heard nothing for `keep_alive_s`. After it an error is the dialect's own error event.

A client that reads slowly blocks only its own task. Its tokens wait as u32 in the turn, at most `max_tokens` of
them; they become text when they can be sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from fermata.core.errors import TurnError, TurnFailed
from fermata.frontend.config import HttpLimits
from fermata.frontend.http.asgi import Headers, Receive, Scope, Send
from fermata.frontend.http.dialect import Writer, WriterSpec
from fermata.frontend.http.errors import MethodNotAllowed, Unauthorized, error_body, error_headers
from fermata.frontend.http.exchange import (
    ClientGone,
    KeepAlives,
    Waker,
    connection_of,
    headers_of,
    read_json_body,
    watch,
)
from fermata.frontend.http.reply import Reply, reply_to
from fermata.frontend.intake import Farewell, Intent
from fermata.frontend.keys import ApiKeys, Caller
from fermata.frontend.metrics import FrontendMetrics, status_of
from fermata.frontend.output import Delta, Output, PlainText
from fermata.frontend.prompt import PromptModel, StopStrings
from fermata.frontend.request import ChatBody, CompletionBody, decode_body
from fermata.frontend.service import FrontendService
from fermata.frontend.trace_record import farewell_record, record_of
from fermata.frontend.turn import Turn
from fermata.frontend.turn_model import Failed, Finished
from fermata.trace import TraceWriter
from fermata.wire.messages import Usage

log = logging.getLogger(__name__)

_JSON = (b"content-type", b"application/json")
_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_INTERNAL = TurnFailed("internal error")
BodyT = TypeVar("BodyT", ChatBody, CompletionBody)


@dataclass(frozen=True, slots=True)
class TurnRoom:
    """What all turn endpoints of a process share."""

    service: FrontendService
    model: PromptModel
    keys: ApiKeys
    limits: HttpLimits
    metrics: FrontendMetrics
    keep_alives: KeepAlives
    trace: TraceWriter | None


class TurnEndpoint(Generic[BodyT]):
    """One dialect's address: a raw ASGI function."""

    def __init__(
        self,
        name: str,
        room: TurnRoom,
        *,
        decoder: msgspec.json.Decoder[BodyT],
        accept: Callable[[BodyT, Caller, Mapping[str, str]], Awaitable[Intent | Farewell]],
        writer: Callable[[WriterSpec], Writer],
    ) -> None:
        self._name = name
        self._room = room
        self._decoder: msgspec.json.Decoder[BodyT] = decoder
        self._accept: Callable[[BodyT, Caller, Mapping[str, str]], Awaitable[Intent | Farewell]] = (
            accept
        )
        self._writer = writer
        self._loop = asyncio.get_running_loop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = reply_to(send)
        metrics = self._room.metrics
        metrics.started += 1
        try:
            status = await self._serve(scope, receive, reply)
        except ClientGone:
            metrics.disconnected += 1
            status = 499
        except TurnError as error:
            status = error.status
            if not reply.is_begun:
                await reply.whole(status, error_headers(error), error_body(error))
        except Exception:
            # Request boundary: a fault of ours is one client's 500, with a trace in the log.
            metrics.internal_errors += 1
            log.exception("request failed endpoint=%s", self._name)
            status = 500
            if not reply.is_begun:
                await reply.whole(500, error_headers(_INTERNAL), error_body(_INTERNAL))
        metrics.responses[self._name, status] += 1

    async def _serve(self, scope: Scope, receive: Receive, reply: Reply) -> int:
        room = self._room
        clock = room.service.clock
        received = clock.now()
        if scope["method"] != "POST":
            raise MethodNotAllowed(f"send POST to {scope['path']}")
        connection = connection_of(scope)
        headers = headers_of(scope)
        caller = room.keys.caller(headers)
        if caller is None:
            raise Unauthorized("no such API key; send one as `Authorization: Bearer KEY`")
        raw = await read_json_body(connection, headers, receive, limits=room.limits)
        body = decode_body(raw, self._decoder)
        received_unix_ms = clock.unix_ms()
        intent = await self._accept(body, caller, headers)
        if isinstance(intent, Farewell):
            await self._bid_farewell(body, intent, reply, received, received_unix_ms)
            return 200
        answer = self._answer(body, intent, reply, received_unix_ms // 1000)
        unwatch = watch(connection, receive, answer.waker)
        try:
            await (answer.stream() if body.stream else answer.whole())
        except ClientGone:
            raise
        except Exception as fault:
            await answer.break_off(fault if isinstance(fault, TurnError) else _INTERNAL)
            raise
        finally:
            unwatch()
            answer.close()
            room.metrics.turn_ended(answer.turn, received=received)
            if room.trace is not None:
                self._trace(room.trace, intent, answer, received, received_unix_ms)
        return status_of(answer.turn)

    def _trace(
        self, trace: TraceWriter, intent: Intent, answer: Answer, received: float, unix_ms: int
    ) -> None:
        service = self._room.service
        record = record_of(
            intent,
            answer.turn,
            owner=service.id,
            model=service.config.model.name,
            received=received,
            received_unix_ms=unix_ms,
            now_unix_ms=service.clock.unix_ms(),
            reason=answer.reason,
            stop=answer.output.stop,
        )
        trace.put(record)

    async def _bid_farewell(
        self, body: BodyT, farewell: Farewell, reply: Reply, received: float, unix_ms: int
    ) -> None:
        """An empty answer, once the routers know: whoever ends one session and begins another finds its room."""
        room, who = self._room, farewell.who
        service, clock = room.service, room.service.clock
        if who.session and await service.end_program(farewell.request, who) is None:
            room.metrics.unheard_farewells += (
                1  # its program ends by itself, when it was idle for long
            )
        writer = self._writer(
            WriterSpec(
                request=farewell.request,
                model=body.model or farewell.model,
                created=unix_ms // 1000,
                include_usage=body.include_usage,
            )
        )
        room.metrics.farewells += 1
        headers, usage = (b"x-request-id", farewell.request.encode()), Usage(0)
        if body.stream:
            await reply.begin(200, [*_STREAM, headers])
            await reply.end(writer.opening() + writer.closing(reason="stop", usage=usage))
        else:
            said = writer.whole((), (), reason="stop", usage=usage)
            await reply.whole(200, [_JSON, headers], said)
        if room.trace is not None:
            record = farewell_record(
                farewell,
                owner=service.id,
                received=received,
                ended=clock.now(),
                received_unix_ms=unix_ms,
                now_unix_ms=clock.unix_ms(),
            )
            room.trace.put(record)

    def _answer(self, body: BodyT, intent: Intent, reply: Reply, created: int) -> Answer:
        room, spec, streams = self._room, intent.spec, bool(body.stream)
        echoes = isinstance(body, CompletionBody) and body.echo
        echo = room.model.text_of(intent.prompt) if echoes else ""
        writer = self._writer(
            WriterSpec(
                request=spec.request,
                model=body.model or spec.model,
                created=created,
                streams=streams,
                include_usage=body.include_usage,
                token_bytes=room.model.vocabulary.bytes_of,
                echo=echo,
            )
        )
        stops = body.stops
        detokenizer = room.model.detokenizer(
            skip_special_tokens=body.skip_special_tokens is not False
        )
        stop_strings = None
        if stops:
            stop_strings = StopStrings(stops, include_stop=bool(body.include_stop_str_in_output))
        output = Output(detokenizer=detokenizer, stops=stop_strings, parser=PlainText())
        patience = room.limits.keep_alive_s if streams else room.limits.patience_s
        waker = Waker(self._loop, due_at=self._loop.time() + patience)
        if streams or stops:
            turn = room.service.submit(spec, reader=waker)
        else:
            reader = _AtTheEnd(waker)
            turn = reader.turn = room.service.submit(spec, reader=reader)
        return Answer(turn, room=room, output=output, writer=writer, reply=reply, waker=waker)


class _AtTheEnd:
    """A reader that wants the whole answer need not be woken for its parts."""

    def __init__(self, waker: Waker) -> None:
        self.turn: Turn | None = None
        self._waker = waker

    def wake(self) -> None:
        if self.turn is not None and self.turn.ended:
            self._waker.wake()


class Answer:
    """One turn on its way to one client."""

    def __init__(
        self,
        turn: Turn,
        *,
        room: TurnRoom,
        output: Output,
        writer: Writer,
        reply: Reply,
        waker: Waker,
    ) -> None:
        self.turn = turn
        self.output = output
        self.waker = waker
        self.reason = ""
        """What the client was told, once it was."""
        self._room = room
        self._writer = writer
        self._reply = reply
        self._taken = 0
        self._id = (b"x-request-id", turn.spec.request.encode())
        room.keep_alives.add(waker)

    def close(self) -> None:
        """Whatever happened: nothing of the turn may go on without its client."""
        self._room.keep_alives.remove(self.waker)
        if not self.turn.ended:
            self._room.service.cancel(self.turn)

    async def break_off(self, error: TurnError) -> None:
        """In the middle of an answer an error can only be its end, said in the dialect's words."""
        reply = self._reply
        if reply.is_begun and not reply.is_ended:
            streams = self.turn.spec.streaming
            await reply.end(self._writer.failure(error) if streams else error_body(error))

    async def stream(self) -> None:
        turn, reply, waker = self.turn, self._reply, self.waker
        while True:
            await waker.wait()
            chunk = self._new_events()
            if turn.ended:
                await self._finish_stream(chunk)
                return
            if not (chunk or waker.is_due or (turn.is_held and not reply.is_begun)):
                continue
            if not reply.is_begun:
                await reply.begin(200, [*_STREAM, self._id])
                chunk = self._writer.opening() + chunk
            elif not chunk:
                chunk = self._writer.keep_alive()
            await reply.write(chunk)
            waker.sent(keep_alive_s=self._room.limits.keep_alive_s)

    async def _finish_stream(self, chunk: bytes) -> None:
        turn, reply = self.turn, self._reply
        if isinstance(turn.outcome, Failed):
            if not reply.is_begun:
                raise turn.outcome.error
            await reply.end(chunk + self._writer.failure(turn.outcome.error))
            return
        deltas = self.output.flush()
        rest = self._writer.deltas(deltas, ()) if deltas else b""
        self.reason = self._finish_reason()
        end = self._writer.closing(reason=self.reason, usage=turn.usage)
        if not reply.is_begun:
            await reply.begin(200, [*_STREAM, self._id])
            chunk = self._writer.opening() + chunk
        await reply.end(chunk + rest + end)

    def _new_events(self) -> bytes:
        """All that is ready, in one piece. Tells the engine to stop where a stop string came."""
        turn = self.turn
        taken, self._taken = self._taken, len(turn.tokens)
        if taken == self._taken or self.output.has_stopped:
            return b""
        deltas = self.output.push(turn.tokens[taken:])
        logprobs = turn.logprobs[taken : self._taken] if turn.logprobs else ()
        if self.output.has_stopped:
            self._room.service.stop(turn)
        return self._writer.deltas(deltas, logprobs) if deltas or logprobs else b""

    async def whole(self) -> None:
        turn, waker, limits = self.turn, self.waker, self._room.limits
        deltas: list[Delta] = []
        while True:
            await waker.wait()
            taken, self._taken = self._taken, len(turn.tokens)
            if taken < self._taken and not self.output.has_stopped:
                deltas.extend(self.output.push(turn.tokens[taken:]))
                if self.output.has_stopped:
                    self._room.service.stop(turn)
            if turn.ended:
                break
            if waker.is_due:
                if not self._reply.is_begun:
                    await self._reply.begin(200, [_JSON, self._id])
                await self._reply.write(b"\n")
                waker.sent(keep_alive_s=limits.keep_alive_s)
        await self._finish_whole(deltas)

    async def _finish_whole(self, deltas: list[Delta]) -> None:
        turn, reply = self.turn, self._reply
        if isinstance(turn.outcome, Failed):
            if not reply.is_begun:
                raise turn.outcome.error
            await reply.end(error_body(turn.outcome.error))
            return
        deltas.extend(self.output.flush())
        self.reason = self._finish_reason()
        said = self._writer.whole(deltas, turn.logprobs, reason=self.reason, usage=turn.usage)
        if reply.is_begun:
            await reply.end(said)
        else:
            await reply.whole(200, [_JSON, self._id], said)

    def _finish_reason(self) -> str:
        outcome = self.turn.outcome
        assert isinstance(outcome, Finished), outcome
        return "stop" if self.output.has_stopped else outcome.reason
