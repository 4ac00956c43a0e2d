"""Everything that is not a turn: models, tokenize, health, metrics, status. FastAPI, since nothing here is hot."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException

from fermata.core.errors import InvalidTurn, NotFound, TurnError, TurnFailed
from fermata.core.hashing import SEED
from fermata.frontend.config import FrontendConfig
from fermata.frontend.http.errors import (
    MethodNotAllowed,
    Unauthorized,
    error_body,
    error_headers,
)
from fermata.frontend.http.exchange import (
    ClientGone,
    connection_of,
    headers_of,
    read_json_body,
)
from fermata.frontend.http.programs import add_programs
from fermata.frontend.keys import ApiKeys
from fermata.frontend.prompt import PromptModel
from fermata.frontend.request import decode_body
from fermata.frontend.service import FrontendService

_Made = TypeVar("_Made")


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Text, or a chat that is rendered first."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


@dataclass(frozen=True, slots=True)
class SlowRoom:
    config: FrontendConfig
    service: FrontendService
    model: PromptModel
    keys: ApiKeys
    registry: CollectorRegistry
    threads: Executor
    context_length: int
    created: int


def slow_app(room: SlowRoom) -> FastAPI:
    app = FastAPI(
        title="Fermata", description="OpenAI-compatible serving of agent sessions", docs_url=None, redoc_url=None
    )  # fmt: skip
    _add_models(app, room)
    _add_tokens(app, room)
    _add_health(app, room)
    add_programs(app, service=room.service, keys=room.keys)
    app.add_exception_handler(TurnError, _on_turn_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, _on_fault)
    return app


def _add_models(app: FastAPI, room: SlowRoom) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _authorise(request, room)
        return _json(
            {"object": "list", "data": [_card(room, name) for name in room.config.model_names]}
        )

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Response:
        _authorise(request, room)
        if name not in room.config.model_names:
            raise NotFound(
                f"no model {name!r} here, only {', '.join(room.config.model_names)}", param="model"
            )
        return _json(_card(room, name))

    _ = models, model


def _add_tokens(app: FastAPI, room: SlowRoom) -> None:
    tokenize_body = msgspec.json.Decoder(TokenizeBody)
    detokenize_body = msgspec.json.Decoder(DetokenizeBody)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = decode_body(await _body(request, room), tokenize_body)
        tokens = await _tokens(body, room)
        said: dict[str, Any] = {
            "count": len(tokens), "max_model_len": room.context_length, "tokens": tokens, "token_strs": None,
        }  # fmt: skip
        if body.return_token_strs:
            said["token_strs"] = await _in_thread(room, lambda: _strings(room, tokens))
        return _json(said)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = decode_body(await _body(request, room), detokenize_body)
        return _json({"prompt": await _in_thread(room, lambda: _text(room, body.tokens))})

    _ = tokenize, detokenize


def _add_health(app: FastAPI, room: SlowRoom) -> None:
    service = room.service

    @app.get("/live")
    async def live() -> Response:
        return _json({"status": "live"})

    @app.get("/health")
    async def health() -> Response:
        """200 while it serves at all; `/ready` says whether a turn would find a worker."""
        said = {
            "status": _state(service),
            "routers": service.routers.answering,
            "workers_ready": service.routers.workers_ready,
        }
        return _json(said, status=503 if service.is_draining else 200)

    @app.get("/ready")
    async def ready() -> Response:
        return _json({"status": _state(service)}, status=200 if service.is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(room.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/fermata/status")
    async def status() -> Response:
        return _json(_status(room))

    _ = live, health, ready, metrics, status


def _status(room: SlowRoom) -> Mapping[str, Any]:
    service, prompts = room.service, room.model.path.counters
    table, routers = service.table, service.routers
    return {
        "id": service.id,
        "role": "frontend",
        "state": _state(service),
        "incarnation": service.incarnation,
        "turns": len(table),
        "turns_routing": len(list(table.routing)),
        "leases": table.leases,
        "links": len(service.workers),
        "migrations": table.migrations,
        "cancellations": table.counters.cancellations,
        "poisons": table.counters.poisons,
        "prompts": {
            "cached_tokens": prompts.cached_tokens,
            "tokenised_tokens": prompts.tokenised_tokens,
            "full_passes": prompts.full_passes,
        },
        "router": {
            "connected": routers.answering > 0,
            "answering": routers.answering,
            "ring_epoch": routers.ring.epoch,
            "workers_ready": routers.workers_ready,
        },
    }


def _state(service: FrontendService) -> str:
    if service.is_draining:
        return "draining"
    return "ready" if service.is_ready else "waiting"


def _card(room: SlowRoom, name: str) -> Mapping[str, Any]:
    model = room.config.model
    return {
        "id": name,
        "object": "model",
        "created": room.created,
        "owned_by": "fermata",
        "root": model.name,
        "parent": None if name == model.name else model.name,
        "context_length": room.context_length,
        "max_model_len": room.context_length,
    }


async def _tokens(body: TokenizeBody, room: SlowRoom) -> list[int]:
    path = room.model.path
    if body.messages is not None:
        render = partial(
            room.model.render,
            body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=body.chat_template_kwargs,
        )
        text = await _in_thread(room, render)
        special = False
    elif body.prompt is not None:
        text, special = body.prompt, body.add_special_tokens is not False
    else:
        raise InvalidTurn("give prompt or messages", param="prompt")
    pending = path.begin(text, seed=SEED, add_special_tokens=special)
    await _in_thread(room, pending.encode)
    return array("I", pending.tokens()).tolist()


def _strings(room: SlowRoom, tokens: list[int]) -> list[str]:
    if len(tokens) > room.context_length:
        raise InvalidTurn(
            f"strings of at most {room.context_length} tokens", param="return_token_strs"
        )
    decode = room.model.tokenizer.decode
    return [decode([token], skip_special_tokens=False) for token in tokens]


def _text(room: SlowRoom, tokens: list[int]) -> str:
    if len(tokens) > room.context_length:
        raise InvalidTurn(f"at most {room.context_length} tokens", param="tokens")
    if any(not 0 <= token < 1 << 32 for token in tokens):
        raise InvalidTurn("tokens must be token ids", param="tokens")
    return room.model.tokenizer.decode(tokens, skip_special_tokens=False)


async def _in_thread(room: SlowRoom, work: Callable[[], _Made]) -> _Made:
    return await asyncio.get_running_loop().run_in_executor(room.threads, work)


async def _body(request: Request, room: SlowRoom) -> bytes:
    _authorise(request, room)
    headers = headers_of(request.scope)
    connection = connection_of(request.scope)
    return await read_json_body(connection, headers, request.receive, limits=room.config.http)


def _authorise(request: Request, room: SlowRoom) -> None:
    if room.keys.caller(headers_of(request.scope)) is None:
        raise Unauthorized("no such API key; send one as `Authorization: Bearer KEY`")


def _json(said: Mapping[str, Any], *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(said), status_code=status, media_type="application/json")


async def _on_turn_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, TurnError)
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_body(error), status_code=error.status, headers=headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = request.url.path
    if error.status_code == 405:
        said: TurnError = MethodNotAllowed(f"{request.method} is not for {where}")
    elif error.status_code == 404:
        said = NotFound(f"nothing at {where}")
    else:
        said = InvalidTurn(str(error.detail))
    headers = {"content-type": "application/json", **(error.headers or {})}
    return Response(error_body(said), status_code=error.status_code, headers=headers)


async def _on_fault(_request: Request, _error: Exception) -> Response:
    """A fault of ours; the server logs it."""
    return Response(error_body(TurnFailed("internal error")), 500, media_type="application/json")


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)
