"""From a decoded body to a turn: model, identity, hints, prompt, limits. What is wrong is said here, as a TurnError.

All of it is cheap but rendering very many messages and tokenising a long text that is new. Those go to a thread, so
other clients' streams and our own heartbeats go on meanwhile; the cache lookup before tokenising and the insertion
after it stay in the loop, which alone touches the cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sized
from concurrent.futures import Executor
from functools import partial
from random import getrandbits
from typing import Any, Literal, TypeVar, cast

import msgspec

from fermata.core.errors import InvalidTurn, NotFound
from fermata.core.hashing import TOKEN_BYTES, hash_seed
from fermata.core.ids import RequestId, new_request_id
from fermata.frontend.config import FrontendConfig
from fermata.frontend.hints import cache_salt, namespace_of, parse_hints, said_program_ids
from fermata.frontend.identity import (
    Identity,
    ScopedIdentity,
    capped,
    identify,
    inferred,
    scoped,
    unknown,
)
from fermata.frontend.keys import Caller
from fermata.frontend.lineage import Lineages
from fermata.frontend.prompt import Prompt, PromptModel
from fermata.frontend.request import ChatBody, CompletionBody, message_inputs
from fermata.frontend.sampling import (
    check_fits,
    check_supported,
    is_resumable,
    sampling_of,
)
from fermata.frontend.turn_model import TurnSpec

_Made = TypeVar("_Made")
InputTrigger = Literal["user_message", "tool_result", "other"]
_TRIGGERS: dict[str, InputTrigger] = {
    "user": "user_message",
    "tool": "tool_result",
    "function": "tool_result",
}


class Intent(msgspec.Struct, frozen=True):
    """A turn that may be submitted, and what the answer and the trace want to know of it."""

    spec: TurnSpec
    identity: Identity
    """As the client said it; the spec has the scoped one."""
    prompt: Prompt
    trigger: InputTrigger
    client_request_id: str


class Farewell(msgspec.Struct, frozen=True, gc=False):
    """A client that only ends its session: no engine is asked."""

    request: RequestId
    model: str
    who: ScopedIdentity
    """Without a session it says good-bye to nobody."""
    identity: Identity
    trigger: InputTrigger
    client_request_id: str


class _Asker(msgspec.Struct, frozen=True, gc=False):
    caller: Caller
    headers: Mapping[str, str]
    identity: Identity
    namespace: str
    seed: int


class Intake:
    def __init__(
        self,
        config: FrontendConfig,
        *,
        model: PromptModel,
        lineages: Lineages,
        context_length: int,
        threads: Executor,
    ) -> None:
        self.context_length = context_length
        self._config = config
        self._names = frozenset(config.model_names)
        self._served = config.model.name
        self._block_size = config.block_size
        self._model = model
        self._lineages = lineages
        self._threads = threads

    async def chat(
        self, body: ChatBody, caller: Caller, headers: Mapping[str, str]
    ) -> Intent | Farewell:
        asker = self._check(body, caller, headers)
        if asker.identity.final and (_is_brief(body) or not body.messages):
            return self._farewell(body, asker)
        if not body.messages:
            raise InvalidTurn("messages is missing or empty", param="messages")
        render = partial(
            self._model.render,
            body.messages,
            tools=body.shown_tools,
            documents=body.documents,
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=body.template_variables,
        )
        many = _parts(body) > self._config.http.thread_parts
        text = await self._in_thread(render) if many else render()
        return self._intent(body, await self._prepare(text, body, asker), asker)

    async def completion(
        self, body: CompletionBody, caller: Caller, headers: Mapping[str, str]
    ) -> Intent | Farewell:
        asker = self._check(body, caller, headers)
        if asker.identity.final and _is_brief(body):
            return self._farewell(body, asker)
        asked = body.single_prompt()
        if isinstance(asked, str):
            prompt = await self._prepare(asked, body, asker, add_special_tokens=True)
        else:
            path = self._model.path
            check_fits(body, input_tokens=len(asked), context_length=self.context_length)
            prompt = path.prepare_ids(asked, seed=asker.seed, lineage=asker.identity.session)
        return self._intent(body, prompt, asker)

    def _check(
        self, body: ChatBody | CompletionBody, caller: Caller, headers: Mapping[str, str]
    ) -> _Asker:
        if body.model is not None and body.model not in self._names:
            names = ", ".join(self._config.model_names)
            raise NotFound(f"no model {body.model!r} here, only {names}", param="model")
        check_supported(body)
        salt = cache_salt(body.nvext, body.cache_salt, headers)
        namespace = namespace_of(caller.tenant, salt)
        identity = identify(headers, said_program_ids(body.nvext, body.program_id))
        return _Asker(caller, headers, identity, namespace, hash_seed(namespace=namespace))

    def _farewell(self, body: ChatBody | CompletionBody, asker: _Asker) -> Farewell:
        request, identity = new_request_id(), asker.identity
        who = scoped(identity, tenant=asker.caller.tenant) if identity.session else unknown(request)
        return Farewell(
            request=request,
            model=self._config.model.name,
            who=who,
            identity=identity,
            trigger=_trigger(body),
            client_request_id=capped(asker.headers.get("x-request-id", "")),
        )

    async def _prepare(
        self,
        text: str,
        body: ChatBody | CompletionBody,
        asker: _Asker,
        *,
        add_special_tokens: bool = False,
    ) -> Prompt:
        path = self._model.path
        pending = path.begin(
            text,
            seed=asker.seed,
            lineage=asker.identity.session,
            add_special_tokens=add_special_tokens,
        )
        if pending.new_chars > self._config.http.thread_chars:
            await self._in_thread(pending.encode)
        else:
            pending.encode()
        # Before it is hashed and remembered: what can not be served must not push out what can.
        tokens = pending.input_tokens
        check_fits(body, input_tokens=tokens, context_length=self.context_length)
        return path.finish(pending)

    async def _in_thread(self, work: Callable[[], _Made]) -> _Made:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _intent(self, body: ChatBody | CompletionBody, prompt: Prompt, asker: _Asker) -> Intent:
        headers, identity = asker.headers, asker.identity
        sampling = sampling_of(
            body,
            input_tokens=prompt.input_tokens,
            context_length=self.context_length,
            eos_token_ids=self._model.folder.eos_token_ids,
        )
        request = RequestId(f"{getrandbits(128):032x}")  # unique; nothing rests on its secrecy
        who = self._session(request, body, prompt, asker)
        spec = TurnSpec(
            request=request,
            key=who.key,
            model=self._served,
            prompt=prompt.tokens,
            hashes=prompt.hashes.tobytes(),
            block_size=self._block_size,
            seed=asker.seed,
            sampling=sampling,
            session=who.session,
            parent=who.parent,
            inferred=who.inferred,
            final=identity.final,
            streaming=bool(body.stream),
            resumable=is_resumable(body, sampling),
            namespace=asker.namespace,
            hints=parse_hints(body.nvext, headers),
            policy_class=capped(headers.get("x-dynamo-meta-policy-class", "")),
            client_timeout_s=_seconds(headers.get("x-stainless-timeout", "")),
            tool_call_tokens=self._model.tool_call_tokens,
            inputs=partial(_inputs, self._model, body, prompt),
        )
        client_request = capped(headers.get("x-request-id", ""))
        return Intent(spec, identity, prompt, _trigger(body), client_request)

    def _session(
        self, request: RequestId, body: ChatBody | CompletionBody, prompt: Prompt, asker: _Asker
    ) -> ScopedIdentity:
        if asker.identity.session:
            return scoped(asker.identity, tenant=asker.caller.tenant)
        if not self._config.infer_sessions:
            return unknown(request)
        full = len(prompt.hashes) * self._block_size * TOKEN_BYTES
        lineage = self._lineages.infer(
            scope=asker.caller.scope,
            hashes=prompt.hashes,
            tail=prompt.tokens[full:],
            messages=len(body.messages) if isinstance(body, ChatBody) else 0,
        )
        return unknown(request) if lineage is None else inferred(lineage)


def _parts(body: ChatBody) -> int:
    """What a template walks, near enough."""
    count = len(body.messages) + len(body.tools or ()) + len(body.documents or ())
    for message in body.messages:
        if type(message) is dict:
            said = cast("dict[str, Any]", message)
            for inner in (said.get("content"), said.get("tool_calls")):
                if isinstance(inner, list):
                    count += len(cast("Sized", inner))
    return count


def _inputs(model: PromptModel, body: ChatBody | CompletionBody, prompt: Prompt) -> list[str]:
    """As a simulated responder reads the history; a completion's prompt is its one message."""
    if isinstance(body, ChatBody):
        return message_inputs(body.messages)
    return [model.text_of(prompt)]


def _trigger(body: ChatBody | CompletionBody) -> InputTrigger:
    last: Any = body.messages[-1] if isinstance(body, ChatBody) and body.messages else None
    if not isinstance(last, dict):
        return "other"
    return _TRIGGERS.get(str(cast("dict[str, Any]", last).get("role")), "other")


def _is_brief(body: ChatBody | CompletionBody) -> bool:
    """Nobody wants an answer of a token: such a request is there for its headers."""
    tokens = body.asked_tokens
    return tokens is not None and tokens <= 1


def _seconds(text: str) -> float:
    try:
        seconds = float(text) if text else 0.0
    except ValueError:
        return 0.0
    return seconds if 0.0 < seconds < 1e6 else 0.0
