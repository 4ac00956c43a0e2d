"""OpenAI chat completions, streamed and whole.

Chunks are a prefix and a suffix made once an answer, around the JSON text of what is new: 0.1 us where building an
object costs ten times that. Every stream names a finish reason: without one a known client asks again for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fermata.core.errors import TurnError
from fermata.frontend.http.dialect import WriterSpec
from fermata.frontend.http.errors import error_body
from fermata.frontend.output import Delta, TokenLogprobs
from fermata.wire.messages import Usage

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def failure_event(error: TurnError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n" + DONE


class ChatWriter:
    def __init__(self, spec: WriterSpec) -> None:
        self._spec = spec
        if spec.streams:
            self._compose(spec)

    def _compose(self, spec: WriterSpec) -> None:
        """What all chunks of this answer share."""
        head = _encode({
            "id": f"chatcmpl-{spec.request}",
            "object": "chat.completion.chunk",
            "created": spec.created,
            "model": spec.model,
        })  # fmt: skip
        usage = b',"usage":null' if spec.include_usage else b""
        self._head = b"data: " + head[:-1] + b","
        self._prefix = self._head + b'"choices":[{"index":0,"delta":'
        self._tail = b',"finish_reason":null}]' + usage + b"}\n\n"
        self._text_prefix = self._prefix + b'{"content":'
        self._text_suffix = b'},"logprobs":null' + self._tail
        self._usage = usage

    def opening(self) -> bytes:
        # Without content: some clients take an empty text before a tool call for the whole answer.
        return self._prefix + b'{"role":"assistant"},"logprobs":null' + self._tail

    def keep_alive(self) -> bytes:
        return self._prefix + b'{},"logprobs":null' + self._tail

    def deltas(self, deltas: Sequence[Delta], logprobs: Sequence[TokenLogprobs]) -> bytes:
        if logprobs:
            return self._with_logprobs(deltas, logprobs)
        return b"".join(
            [self._text_prefix + _encode(delta.text) + self._text_suffix for delta in deltas]
        )

    def closing(self, *, reason: str, usage: Usage) -> bytes:
        last = self._head + b'"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":'
        end = last + _encode(reason) + b"}]" + self._usage + b"}\n\n"
        if self._spec.include_usage:
            end += self._head + b'"choices":[],"usage":' + _encode(usage_of(usage)) + b"}\n\n"
        return end + DONE

    def failure(self, error: TurnError) -> bytes:
        return failure_event(error)

    def whole(
        self,
        deltas: Sequence[Delta],
        logprobs: Sequence[TokenLogprobs],
        *,
        reason: str,
        usage: Usage,
    ) -> bytes:
        spec = self._spec
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": _text(deltas), "refusal": None},
            "logprobs": self._logprobs(logprobs) if logprobs else None,
            "finish_reason": reason,
        }
        return _encode({
            "id": f"chatcmpl-{spec.request}",
            "object": "chat.completion",
            "created": spec.created,
            "model": spec.model,
            "choices": [choice],
            "usage": usage_of(usage),
        })  # fmt: skip

    def _with_logprobs(self, deltas: Sequence[Delta], logprobs: Sequence[TokenLogprobs]) -> bytes:
        """In one chunk: which token made which character is not told apart."""
        text = _encode({"content": _text(deltas)})
        return (
            self._prefix + text + b',"logprobs":' + _encode(self._logprobs(logprobs)) + self._tail
        )

    def _logprobs(self, rows: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {
            "content": [
                {**self._token(*row[0]), "top_logprobs": [self._token(*one) for one in row[1:]]}
                for row in rows
                if row
            ]
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        said = self._spec.token_bytes(token)
        text = said.decode("utf-8", "replace")
        return {"token": text, "logprob": logprob, "bytes": list(said)}


def _text(deltas: Sequence[Delta]) -> str:
    return "".join([delta.text for delta in deltas])
