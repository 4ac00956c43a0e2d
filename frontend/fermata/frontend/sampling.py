"""How a request wants its tokens picked, as the engine is told. Limits are clamped; nonsense is refused by name."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from fermata.core.errors import ContextTooLong, InvalidTurn
from fermata.frontend.request import ChatBody, CompletionBody, GenerationBody, Number
from fermata.wire.messages import Sampling

MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_STOP_TOKENS = 4096
MAX_GRAMMAR_BYTES = 1 << 20
"""As they travel to the worker, far below what a message may have."""
_SEEDS = 1 << 63
_NESTING_MARGIN = 64
_MOST_TOP_K = (1 << 31) - 1
_NUMBERS = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 100.0),
)
"""Name and range of what is passed on as it is; unsaid is the engine's default."""


def sampling_of(
    body: ChatBody | CompletionBody,
    *,
    input_tokens: int,
    context_length: int,
    eos_token_ids: tuple[int, ...],
) -> Sampling:
    """ContextTooLong where the prompt leaves no room, InvalidTurn for a value that can not be meant."""
    check_fits(body, input_tokens=input_tokens, context_length=context_length)
    room = context_length - input_tokens
    wanted = _max_tokens(body)
    max_tokens = room if wanted is None else min(max(wanted, 1), room)
    said: dict[str, Any] = {}
    for name, low, high in _NUMBERS if _says_numbers(body) else ():
        value = getattr(body, name)
        if value is not None:
            said[name] = _within(value, low, high, name)
    if body.min_tokens is not None:
        said["min_tokens"] = min(max(_whole(body.min_tokens, 0, "min_tokens"), 0), max_tokens)
    if body.top_k is not None:
        said["top_k"] = min(max(_whole(body.top_k, 0, "top_k"), 0), _MOST_TOP_K)
    if body.seed is not None:
        said["seed"] = _whole(body.seed, 0, "seed") % _SEEDS
    eos = () if body.ignore_eos else eos_token_ids
    return Sampling(
        max_tokens=max_tokens,
        stop_token_ids=[*eos, *_token_ids(body.stop_token_ids)],
        ignore_eos=bool(body.ignore_eos),
        logprobs=_logprobs(body),
        structured=_structured(body),
        **said,
    )


def _says_numbers(body: GenerationBody) -> bool:
    """Most requests say none of them, and one look finds that out."""
    said = {
        body.temperature, body.top_p, body.min_p, body.presence_penalty, body.frequency_penalty,
        body.repetition_penalty,
    }  # fmt: skip
    return said != {None}


def check_fits(body: ChatBody | CompletionBody, *, input_tokens: int, context_length: int) -> None:
    """A prompt must leave room for a token."""
    if input_tokens >= context_length:
        raise ContextTooLong(
            f"This model's maximum context length is {context_length} tokens. "
            f"However, your prompt has {input_tokens} tokens. Please shorten it.",
            param="messages" if isinstance(body, ChatBody) else "prompt",
        )


def check_supported(body: ChatBody | CompletionBody) -> None:
    """What this server does not do must not be ignored silently where the answer would differ."""
    if _whole(body.n, 1, "n") != 1:
        raise InvalidTurn("n must be 1: send the request several times", param="n")
    if len(body.stops) > MAX_STOPS:
        raise InvalidTurn(f"at most {MAX_STOPS} stop sequences", param="stop")
    if any(len(stop) > MAX_STOP_CHARS for stop in body.stops):
        raise InvalidTurn(f"a stop sequence has at most {MAX_STOP_CHARS} characters", param="stop")
    if isinstance(body, CompletionBody):
        if _whole(body.best_of, 1, "best_of") != 1:
            raise InvalidTurn("best_of must be 1", param="best_of")
        if body.suffix:
            raise InvalidTurn("this model can not fill in before a suffix", param="suffix")


def is_resumable(body: ChatBody | CompletionBody, sampling: Sampling) -> bool:
    """Whether another worker can go on after the first token: not where state beyond the tokens decides them."""
    grammar = sampling.structured is not None
    call = isinstance(body, ChatBody) and body.must_call_a_tool
    return not (grammar or call or body.prompt_logprobs)


def _max_tokens(body: ChatBody | CompletionBody) -> int | None:
    said = body.asked_tokens
    return None if said is None else _whole(said, 0, "max_tokens")


def _logprobs(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, ChatBody):
        if not body.logprobs:
            return None
        said: Number | None = body.top_logprobs or 0
    else:
        said = body.logprobs
    return None if said is None else min(max(_whole(said, 0, "logprobs"), 0), MAX_LOGPROBS)


def _structured(body: GenerationBody) -> dict[str, Any] | None:
    """vLLM's words for it, which other engines' adapters translate."""
    if body.structured_outputs:
        return _checked(body.structured_outputs, "structured_outputs")
    for word, said in (
        ("json", body.guided_json),
        ("regex", body.guided_regex),
        ("choice", body.guided_choice),
        ("grammar", body.guided_grammar),
    ):
        if said is not None:
            return _checked({word: said}, f"guided_{word}")
    return _checked(_response_format(body.response_format), "response_format")


def _checked(grammar: dict[str, Any] | None, param: str) -> dict[str, Any] | None:
    """It is any JSON, and goes on in another form: what that can not hold is said here, not found out on the way."""
    if grammar is None:
        return None
    wrapped: object = grammar
    for _ in range(_NESTING_MARGIN):
        wrapped = [wrapped]  # so that what is too deep for the worker's stack is so for ours
    try:
        size = len(msgspec.msgpack.encode(wrapped))
    except (OverflowError, ValueError, RecursionError) as error:
        raise InvalidTurn(f"this grammar can not be passed on: {error}", param=param) from error
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidTurn(f"a grammar may have {MAX_GRAMMAR_BYTES} bytes", param=param)
    return grammar


def _response_format(said: dict[str, Any] | None) -> dict[str, Any] | None:
    kind = None if said is None else said.get("type")
    match kind:
        case None | "text":
            return None
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            named: Any = None if said is None else said.get("json_schema")
            if isinstance(named, dict) and "schema" in named:
                return {"json": named["schema"]}
            raise InvalidTurn("json_schema needs a schema", param="response_format.json_schema")
        case _:
            raise InvalidTurn(
                f"no response_format is called {kind!r}", param="response_format.type"
            )


def _within(said: Number, low: float, high: float, name: str) -> float:
    if not low <= said <= high:
        raise InvalidTurn(f"{name} must be between {low:g} and {high:g}", param=name)
    return float(said)


def _whole(said: Number | None, unsaid: int, name: str) -> int:
    if said is None:
        return unsaid
    if isinstance(said, float) and not math.isfinite(said):
        raise InvalidTurn(f"{name} must be a number", param=name)
    return int(said)


def _token_ids(said: list[int] | None) -> list[int]:
    ids = said or []
    if len(ids) > MAX_STOP_TOKENS:
        raise InvalidTurn(f"at most {MAX_STOP_TOKENS} stop_token_ids", param="stop_token_ids")
    if any(not 0 <= token < 1 << 32 for token in ids):
        raise InvalidTurn("stop_token_ids must be token ids", param="stop_token_ids")
    return ids
