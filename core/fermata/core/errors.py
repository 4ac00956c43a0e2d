"""Errors that cross a component's border. The tree:

FermataError
  ConfigError           a manifest, flag or model folder is wrong (names file, field and fix)
  TurnError             a turn can not be served; carries what the caller's dialect needs
    InvalidTurn         400  the request itself is wrong
    NotFound            404  no such model or route
    ContextTooLong      400  the prompt does not fit the window
    Overloaded          529  every eligible slot busy and the queue full; carries retry_after_s
    NoWorker            503  no worker for `noWorkerWait`
    PoisonTurn          500  in flight at two worker deaths
    NotResumable        500  its worker died after the first token and the turn can not be continued
    TurnFailed          500  the engine or Fermata itself failed
"""

from __future__ import annotations

from typing import ClassVar


class FermataError(Exception):
    """Base of every error of ours."""


class ConfigError(FermataError):
    def __init__(self, message: str, *, where: str = "", fix: str = "") -> None:
        self.where = where
        self.fix = fix
        head = f"{where}: " if where else ""
        super().__init__(f"{head}{message}" + (f" ({fix})" if fix else ""))


class TurnError(FermataError):
    """A turn ends with this instead of an answer, exactly once."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidTurn(TurnError):
    status = 400
    code = "invalid_request"


class NotFound(TurnError):
    status = 404
    code = "not_found"


class ContextTooLong(InvalidTurn):
    code = "context_length_exceeded"


class Overloaded(TurnError):
    status = 529
    code = "overloaded"


class NoWorker(TurnError):
    status = 503
    code = "no_worker"


class PoisonTurn(TurnError):
    code = "poison_request"


class NotResumable(TurnError):
    code = "not_resumable"


class TurnFailed(TurnError):
    code = "turn_failed"
