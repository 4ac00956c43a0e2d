"""Programs over HTTP: the list of a caller's own, the end of one, and why a turn went where it did."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from fermata.core.errors import InvalidTurn, NotFound, NoWorker
from fermata.core.ids import RequestId, SessionId, new_request_id
from fermata.frontend.http.errors import Unauthorized
from fermata.frontend.http.exchange import connection_of, headers_of, read_json_body
from fermata.frontend.identity import Identity, capped, scoped
from fermata.frontend.keys import ApiKeys, Caller
from fermata.frontend.request import decode_body
from fermata.frontend.service import FrontendService
from fermata.wire.messages import Decision, ExplainRequest, ProgramRow, ProgramsRequest

MOST_ROWS = 1000
_NOT_HEARD = "no router answered; the session ends by itself once it was idle for long"


class ReleaseBody(msgspec.Struct, kw_only=True):
    program_id: str


def add_programs(app: FastAPI, *, service: FrontendService, keys: ApiKeys) -> None:
    release_body = msgspec.json.Decoder(ReleaseBody)
    limits = service.config.http

    @app.get("/programs")
    async def programs(request: Request) -> Response:
        """By session, `limit` a page; `next` is what to pass as `after` for the page that follows."""
        tenant = _caller(request, keys).tenant
        limit = _whole(request, "limit", 100, MOST_ROWS)
        after = request.query_params.get("after", "")
        asked = ProgramsRequest(
            request=new_request_id(),
            after=SessionId(_scope(tenant) + after if after else ""),
            prefix=_scope(tenant),
            limit=limit,
        )
        pages = await service.programs(asked)
        if not pages:
            raise NoWorker("no router answered")
        rows = sorted((row for page in pages for row in page.programs), key=lambda r: r.session)
        has_more = len(rows) > limit or any(page.more for page in pages)
        shown = [_row(row, tenant) for row in rows[:limit]]
        return _json({
            "programs": shown,
            "next": shown[-1]["program_id"] if has_more and shown else None,
            "routers": len(pages),
        })  # fmt: skip

    @app.post("/programs/release")
    async def release(request: Request) -> Response:
        caller = _caller(request, keys)
        headers = headers_of(request.scope)
        body = decode_body(
            await read_json_body(
                connection_of(request.scope), headers, request.receive, limits=limits
            ),
            release_body,
        )
        name = capped(body.program_id)
        if not name:
            raise InvalidTurn("program_id is empty", param="program_id")
        who = scoped(Identity(name), tenant=caller.tenant)
        was_known = await service.end_program(new_request_id(), who)
        if was_known is None:
            raise NoWorker(_NOT_HEARD)
        return _json({"program_id": name, "released": was_known})

    @app.get("/programs/explain/{request_id}")
    async def explain(request_id: str, request: Request) -> Response:
        """What routers decided about a turn, newest first; `request_id` is the answer's `x-request-id`."""
        tenant = _caller(request, keys).tenant
        limit = _whole(request, "limit", 20, 100)
        asked = ExplainRequest(RequestId(request_id), prefix=_scope(tenant), limit=limit)
        answers = await service.explain(asked)
        if not answers:
            raise NoWorker("no router answered")
        found = [decision for answer in answers for decision in answer.decisions]
        if not found:
            raise NotFound(f"no router remembers request {request_id!r}")
        found.sort(key=lambda decision: decision.age_s)
        return _json({"request_id": request_id, "decisions": [_decision(d, tenant) for d in found]})

    _ = programs, release, explain


def _caller(request: Request, keys: ApiKeys) -> Caller:
    caller = keys.caller(headers_of(request.scope))
    if caller is None:
        raise Unauthorized("no such API key; send one as `Authorization: Bearer KEY`")
    return caller


def _whole(request: Request, name: str, unsaid: int, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return unsaid
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise InvalidTurn(f"{name} must be a whole number from 1 to {most}", param=name)
    return int(text)


def _scope(tenant: str) -> str:
    """What the names of a tenant's sessions begin with (`identity.scoped`)."""
    return f"{tenant}/" if tenant else ""


def _row(row: ProgramRow, tenant: str) -> dict[str, Any]:
    scope = _scope(tenant)
    return {
        "program_id": row.session.removeprefix(scope),
        "parent": row.parent.removeprefix(scope) or None,
        "phase": row.phase,
        "state": row.state,
        "worker": row.worker or None,
        "rank": row.rank,
        "context_tokens": row.context_tokens,
        "steps": row.steps,
        "turns": row.turns,
        "idle_s": round(row.idle_s, 3),
        "waited_s": round(row.waited_s, 3),
        "reason": row.reason or None,
        "gap": row.gap,
        "marked": row.is_marked,
        "final": row.is_final,
        "inferred": row.inferred,
    }


def _decision(decision: Decision, tenant: str) -> dict[str, Any]:
    said = msgspec.structs.asdict(decision)
    said["session"] = decision.session.removeprefix(_scope(tenant))
    said["candidates"] = [msgspec.structs.asdict(c) for c in decision.candidates]
    return said


def _json(said: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(said), media_type="application/json")
