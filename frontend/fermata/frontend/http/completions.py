"""OpenAI text completions, streamed and whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fermata.core.errors import TurnError
from fermata.frontend.http.chat import DONE, failure_event, usage_of
from fermata.frontend.http.dialect import WriterSpec
from fermata.frontend.output import Delta, TokenLogprobs
from fermata.wire.messages import Usage

_encode = msgspec.json.encode


class CompletionWriter:
    def __init__(self, spec: WriterSpec) -> None:
        self._spec = spec
        self._offset = 0
        if spec.streams:
            self._compose(spec)

    def _compose(self, spec: WriterSpec) -> None:
        """What all chunks of this answer share."""
        head = _encode({
            "id": f"cmpl-{spec.request}",
            "object": "text_completion",
            "created": spec.created,
            "model": spec.model,
        })  # fmt: skip
        self._usage = b',"usage":null' if spec.include_usage else b""
        self._head = b"data: " + head[:-1] + b","
        self._prefix = self._head + b'"choices":[{"index":0,"text":'
        self._tail = b',"finish_reason":null}]' + self._usage + b"}\n\n"
        self._suffix = b',"logprobs":null' + self._tail

    def opening(self) -> bytes:
        self._offset = len(self._spec.echo)
        return self._prefix + _encode(self._spec.echo) + self._suffix

    def keep_alive(self) -> bytes:
        return self._prefix + b'""' + self._suffix

    def deltas(self, deltas: Sequence[Delta], logprobs: Sequence[TokenLogprobs]) -> bytes:
        text = "".join([delta.text for delta in deltas])
        if logprobs:
            said = b',"logprobs":' + _encode(self._logprobs(logprobs)) + self._tail
            return self._prefix + _encode(text) + said
        return self._prefix + _encode(text) + self._suffix if text else b""

    def closing(self, *, reason: str, usage: Usage) -> bytes:
        last = self._prefix + b'"","logprobs":null,"finish_reason":' + _encode(reason)
        end = last + b"}]" + self._usage + b"}\n\n"
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
        self._offset = len(spec.echo)
        choice = {
            "index": 0,
            "text": spec.echo + "".join([delta.text for delta in deltas]),
            "logprobs": self._logprobs(logprobs) if logprobs else None,
            "finish_reason": reason,
        }
        return _encode({
            "id": f"cmpl-{spec.request}",
            "object": "text_completion",
            "created": spec.created,
            "model": spec.model,
            "choices": [choice],
            "usage": usage_of(usage),
        })  # fmt: skip

    def _token(self, token: int) -> str:
        return self._spec.token_bytes(token).decode("utf-8", "replace")

    def _logprobs(self, rows: Sequence[TokenLogprobs]) -> dict[str, Any]:
        texts = [self._token(row[0][0]) for row in rows if row]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [row[0][1] for row in rows if row],
            "top_logprobs": [
                {self._token(token): logprob for token, logprob in row} for row in rows if row
            ],
            "text_offset": offsets,
        }
