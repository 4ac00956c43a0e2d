"""Errors as clients of the OpenAI dialects read them: `{"error": {message, type, code, param}}`.

TurnError (fermata.core.errors)
  Unauthorized     401  no key, or one that is not known
  MethodNotAllowed 405
  BodyTooLarge     413
  NotJson          415
  SlowBody         408  the rest of a request did not come
  HeadTooLarge     431
"""

from __future__ import annotations

import math

import msgspec

from fermata.core.errors import TurnError


class Unauthorized(TurnError):
    status = 401
    code = "invalid_api_key"


class MethodNotAllowed(TurnError):
    status = 405
    code = "method_not_allowed"


class SlowBody(TurnError):
    status = 408
    code = "request_timeout"


class BodyTooLarge(TurnError):
    status = 413
    code = "request_too_large"


class NotJson(TurnError):
    status = 415
    code = "unsupported_media_type"


class HeadTooLarge(TurnError):
    status = 431
    code = "request_header_fields_too_large"


_MOST_CHARS = 1000
_TYPES = {401: "authentication_error", 529: "overloaded_error"}


def error_body(error: TurnError) -> bytes:
    kind = _TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    message = error.message
    if len(message) > _MOST_CHARS:  # it may quote what the client sent
        message = message[:_MOST_CHARS] + "..."
    said = {"message": message, "type": kind, "code": error.code, "param": error.param}
    return msgspec.json.encode({"error": said})


def error_headers(error: TurnError) -> list[tuple[bytes, bytes]]:
    headers = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", b"POST"))
    return headers
