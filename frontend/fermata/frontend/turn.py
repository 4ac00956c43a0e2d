"""One turn, from its first Route to its end: a pure state machine.

    routing -> granted -> generating -> ended
       ^__________|___________|            a lost attempt is routed again, with the tokens so far

Messages come in with `now`, effects go out for the shell to act on. What it promises, whatever is
lost, repeated or late:

* It ends exactly once: Finished, Failed or Cancelled.
* Every lease it took from a Grant is reported finished, cancelled or failed exactly once.
* `tokens` only grows, by the engine's tokens in order: Output of another attempt is dropped, what
  repeats is dropped by index, a gap is a lost worker. So the client reads one unbroken stream.

`deaths` counts workers that died with the turn in flight: at the second it is refused as poison.
`migrations` counts moves that a worker caused. A refusal, a router's boot and our own are neither:
no work was lost by them but the attempt's, and they say nothing about the turn.
"""

from __future__ import annotations

from array import array
from typing import Literal

from fermata.core.errors import (
    InvalidTurn,
    NotResumable,
    NoWorker,
    PoisonTurn,
    TurnError,
    TurnFailed,
)
from fermata.core.hashing import HASH_BYTES, TOKEN_BYTES, sequence_hashes
from fermata.core.ids import LeaseId, WorkerId
from fermata.frontend.turn_model import (
    REJECTIONS,
    Abort,
    Ask,
    Cancelled,
    Dispatch,
    Effect,
    Effects,
    Failed,
    Finished,
    Outcome,
    Reader,
    Report,
    RevokeReason,
    Stage,
    Times,
    TurnLimits,
    TurnSpec,
    Withdraw,
)
from fermata.wire.messages import Grant, Hold, LeaseProgress, OutputEntry, Refused, Reject, Usage

MAX_DEATHS = 2
MAX_MIGRATIONS = 2
MAX_ATTEMPTS = 32
"""Of any kind, refusals and boots included: reached only when something is wrong for good."""

_NOTHING: Effects = ()


class Turn:
    """Fields are for reading; the methods alone change them. Each is O(1) but for the tokens it
    copies."""

    def __init__(
        self,
        spec: TurnSpec,
        *,
        reader: Reader,
        now: float,
        limits: TurnLimits,
        waited_s: float = 0.0,
    ) -> None:
        """`waited_s`: so long it has waited already, as a turn that it repeats."""
        self.spec = spec
        self.reader = reader
        self.stage = Stage.ROUTING
        self.attempt = 0
        self.lease: LeaseId | None = None
        self.grant: Grant | None = None
        """Of the live lease, else of the last one."""
        self.hold_reason = ""
        """Of the hold it is in, else of the last one."""
        self.tokens = array("I")
        self.logprobs: list[list[tuple[int, float]]] = []
        """One row a token, when asked for."""
        self.cached_tokens = -1
        self.prefilled = False
        self.told_tokens = 0
        self.deaths = 0
        self.migrations = 0
        self.avoid: list[WorkerId] = []
        self.ended = False
        self.outcome: Outcome | None = None
        self.times = Times(received=now)
        self._limits = limits
        self._usage: Usage | None = None
        self._past: set[LeaseId] = set()
        self._base = 0
        self._hashes: bytes | None = spec.hashes
        self._refusals = 0
        self._waiting_since = now - waited_s
        self._held_since: float | None = None
        self._ask_at = now + limits.ask_again_s
        self._silent_at = now + limits.silence_s

    @property
    def is_held(self) -> bool:
        return self._held_since is not None

    @property
    def resumed(self) -> int:
        """Tokens of earlier attempts, at the end of the present one's input."""
        return self._base

    @property
    def attempt_tokens(self) -> int:
        return len(self.tokens) - self._base

    @property
    def input_tokens(self) -> int:
        """Of the present attempt: the prompt and what earlier attempts made."""
        return self.spec.input_tokens + self._base

    def input_frame(self) -> bytes:
        """u32 frame of the present attempt's input. Copies only where there is something to add."""
        if not self._base:
            return self.spec.prompt
        return self.spec.prompt + self.tokens[: self._base].tobytes()

    def input_hashes(self) -> bytes:
        """u64 frame of the input's full blocks; hashes only what was added to the prompt."""
        if self._hashes is None:
            self._hashes = self.spec.hashes + _hash_rest(self.spec, self.tokens[: self._base])
        return self._hashes

    @property
    def usage(self) -> Usage:
        """As the client sees it: the first prompt, all tokens."""
        if self._usage is not None:
            return self._usage
        prompt = self.spec.input_tokens
        cached = min(max(self.cached_tokens, 0), prompt)
        return Usage(prompt, len(self.tokens), cached)

    def waited_s(self, now: float) -> float:
        """Since it began to wait for a slot: the age that another router would not know."""
        return max(0.0, now - self._waiting_since)

    def queue_age_s(self, now: float) -> float:
        """How long it has waited, or did until it was granted; a turn that repeats it has waited as long."""
        return self.waited_s(now if self.stage is Stage.ROUTING else self.times.granted)

    def start(self) -> Effects:
        return [Ask(self)]

    def tick(self, now: float) -> Effects:
        """Asks again, or gives up on silent routers. Matters only while routing; call at will."""
        if self.stage is not Stage.ROUTING:
            return _NOTHING
        if now >= self._silent_at:
            waited = self._limits.silence_s
            return [
                Withdraw(self),
                *self._fail(NoWorker(f"no router answered for {waited:.0f} s"), now),
            ]
        if now < self._ask_at:
            return _NOTHING
        self._asked(now)
        return [Ask(self)]

    def ask_again(self, now: float) -> Effects:
        """A router booted, or the ring moved: whoever answers for the key now has not heard of it."""
        if self.stage is not Stage.ROUTING:
            return _NOTHING
        self._silent_at = max(self._silent_at, now + self._limits.silence_s)
        self._asked(now)
        return [Ask(self)]

    def held(self, hold: Hold, now: float) -> Effects:
        if self.stage is not Stage.ROUTING or hold.attempt != self.attempt:
            return _NOTHING
        self._end_hold(now)
        self._held_since = now
        self.hold_reason = hold.reason
        self._ask_at = max(self._ask_at, now + self._limits.ask_again_held_s)
        self._silent_at = now + hold.deadline_s + self._limits.silence_s
        self.reader.wake()
        return _NOTHING

    def granted(self, grant: Grant, now: float) -> Effects:
        if grant.lease == self.lease or grant.lease in self._past:
            return _NOTHING
        if self.stage is not Stage.ROUTING or grant.attempt != self.attempt:
            self._past.add(grant.lease)
            return [Report(self, LeaseProgress(grant.lease, "cancelled", reason="stale"))]
        self._end_hold(now)
        self.grant = grant
        self.lease = grant.lease
        self.stage = Stage.GRANTED
        if not self.times.first_token:
            self.times.granted = now
        return [Dispatch(self)]

    def rejected(self, reject: Reject, now: float) -> Effects:
        if self.stage is not Stage.ROUTING or reject.attempt != self.attempt:
            return _NOTHING
        error = REJECTIONS[reject.code]
        return self._fail(error(reject.message, retry_after_s=reject.retry_after_s or None), now)

    def accepted(self, lease: LeaseId) -> Effects:
        if self.stage is not Stage.GRANTED or lease != self.lease:
            return _NOTHING
        self.stage = Stage.GENERATING
        return [self._told("accepted")]

    def refused(self, refused: Refused, now: float) -> Effects:
        if self.stage is not Stage.GRANTED or refused.lease != self.lease:
            return _NOTHING
        if refused.code == "invalid":
            end = self._close_lease("failed", reason="refused: invalid")
            return [end, *self._fail(InvalidTurn(refused.message), now)]
        self._refusals += 1
        first, most = self._limits.backoff_first_s, self._limits.backoff_most_s
        delay = min(most, first * 2 ** (self._refusals - 1)) if refused.code == "full" else 0.0
        failed_at = refused.code == "failed"
        return self._lose(f"refused: {refused.code}", now, migration=failed_at, delay_s=delay)

    def output(self, entry: OutputEntry, tokens: memoryview, now: float) -> Effects:
        """`tokens` is the entry's own part of the frame, as bytes. Dropped unless the present attempt's."""
        if entry.lease != self.lease or entry.attempt != self.attempt or self.ended:
            return _NOTHING
        have = self.attempt_tokens
        if entry.first > have:
            return self._lose("gap", now, death=True, abort=True)
        effects: list[Effect] = []
        if self.stage is Stage.GRANTED:  # Accepted was lost; output says as much
            effects.extend(self.accepted(entry.lease))
        if entry.cached_tokens >= 0 and self.cached_tokens < 0:
            self.cached_tokens = entry.cached_tokens
        if entry.first + entry.count > have:
            self._append(entry, tokens, have - entry.first, now)
            if not self.prefilled:
                self.prefilled = True
                effects.append(self._told("prefilled"))
            if len(self.tokens) > self.spec.sampling.max_tokens:
                return [*effects, *self._cut(now)]
        elif not entry.finish:
            return effects
        if entry.finish:
            effects.extend(self._finish(entry, now))
        self.reader.wake()
        return effects

    def revoked(self, lease: LeaseId, reason: RevokeReason, now: float) -> Effects:
        """The router ended the lease. What it says last about itself is still reported, and ignored."""
        if lease != self.lease or self.ended:
            return _NOTHING
        # Before the engine had it, the turn can not have been what killed its worker.
        had_it = self.stage is Stage.GENERATING
        death = had_it and reason in ("worker_lost", "worker_stalled")
        worker = reason not in ("owner_lost", "unknown")
        return self._lose(
            reason, now, death=death, migration=worker, abort=reason != "worker_lost", avoid=worker
        )

    def disowned(self, now: float) -> Effects:
        """We were taken for dead and come back under a new incarnation: no lease of ours holds."""
        if self.lease is None:
            return self.ask_again(now)
        return self._lose("owner_lost", now, avoid=False)

    def stop(self, now: float) -> Effects:
        """The client's side has all it wants (a stop string): ends like an engine's own stop."""
        if self.ended:
            return _NOTHING
        if self.stage is Stage.ROUTING:  # between two attempts
            return [Withdraw(self), *self._end(Finished("stop"), now)]
        abort = self._abort()
        end = self._close_lease("finished", reason="stop", usage=self.usage)
        return [end, abort, *self._end(Finished("stop"), now)]

    def cancel(self, now: float) -> Effects:
        """The client went away."""
        if self.ended:
            return _NOTHING
        if self.stage is Stage.ROUTING:
            return [Withdraw(self), *self._end(Cancelled(), now)]
        abort = self._abort()
        return [self._close_lease("cancelled"), abort, *self._end(Cancelled(), now)]

    def fail(self, error: TurnError, now: float) -> Effects:
        """The frontend itself can not go on with it."""
        if self.ended:
            return _NOTHING
        if self.stage is Stage.ROUTING:
            return [Withdraw(self), *self._fail(error, now)]
        abort = self._abort()
        return [self._close_lease("failed", reason=error.code), abort, *self._fail(error, now)]

    def progress(self) -> LeaseProgress | None:
        """What a router should hear each second of a long output; None when nothing is new."""
        if self.stage is not Stage.GENERATING or self.attempt_tokens == self.told_tokens:
            return None
        return self._told("tokens").progress

    def _append(self, entry: OutputEntry, tokens: memoryview, skip: int, now: float) -> None:
        self.tokens.frombytes(tokens[skip * TOKEN_BYTES :] if skip else tokens)
        if entry.logprobs is not None:
            self.logprobs.extend(entry.logprobs[skip:])
        if not self.times.first_token:
            self.times.first_token = now
        self.times.last_token = now

    def _cut(self, now: float) -> Effects:
        """An engine that says more than it was asked for might never end."""
        most = self.spec.sampling.max_tokens
        del self.tokens[most:], self.logprobs[most:]
        abort = self._abort()
        end = self._close_lease("finished", reason="length", usage=self.usage)
        return [end, abort, *self._end(Finished("length"), now)]

    def _finish(self, entry: OutputEntry, now: float) -> Effects:
        match entry.finish:
            case "stop" | "length" as reason:
                end = self._close_lease(
                    "finished", reason=reason, usage=self.usage, event=entry.event_sequence
                )
                return [end, *self._end(Finished(reason, entry.stop_token), now)]
            case "error":
                end = self._close_lease("failed", reason="error")
                return [end, *self._fail(TurnFailed(entry.error or "the engine failed"), now)]
            case _:
                return self._lose(entry.error or "aborted", now, migration=True)

    def _lose(
        self,
        reason: str,
        now: float,
        *,
        death: bool = False,
        migration: bool = False,
        abort: bool = False,
        avoid: bool = True,
        delay_s: float = 0.0,
    ) -> Effects:
        """The attempt is over and the turn is not: on to the next one, if it may."""
        assert self.grant is not None
        effects: list[Effect] = [self._abort()] if abort else []
        if avoid and self.grant.worker not in self.avoid:
            self.avoid.append(self.grant.worker)
        effects.append(self._close_lease("failed", reason=reason))
        self.deaths += death
        if (
            len(self.tokens) >= self.spec.sampling.max_tokens
        ):  # only the word that it is done was lost
            return [*effects, *self._end(Finished("length"), now)]
        error = self._may_not_go_on(reason, counted=death or migration)
        if error is not None:
            return [*effects, *self._fail(error, now)]
        self.migrations += death or migration
        self._next_attempt(now)
        if delay_s:
            self._ask_at = now + delay_s
            return effects
        return [*effects, Ask(self)]

    def _may_not_go_on(self, reason: str, *, counted: bool) -> TurnError | None:
        if self.deaths >= MAX_DEATHS:
            return PoisonTurn(f"in flight at the death of {self.deaths} workers; refused")
        if self.tokens and not self.spec.resumable:
            return NotResumable(
                f"its worker was lost ({reason}) and this kind of turn can not be resumed"
            )
        if counted and self.migrations >= MAX_MIGRATIONS:
            return TurnFailed(f"lost its worker {self.migrations + 1} times (last: {reason})")
        if self.attempt + 1 >= MAX_ATTEMPTS:
            return TurnFailed(f"could not be placed in {MAX_ATTEMPTS} attempts (last: {reason})")
        return None

    def _next_attempt(self, now: float) -> None:
        self.stage = Stage.ROUTING
        self.attempt += 1
        self.prefilled = False
        self.told_tokens = 0
        self._base = len(self.tokens)
        self._hashes = None
        self._waiting_since = now
        self._silent_at = now + self._limits.silence_s
        self._asked(now)

    def _asked(self, now: float) -> None:
        again = self._limits.ask_again_held_s if self.is_held else self._limits.ask_again_s
        self._ask_at = now + again

    def _end_hold(self, now: float) -> None:
        if self._held_since is not None:
            held = now - self._held_since
            self.times.held += held
            holds = self.times.holds
            if holds is None:
                holds = self.times.holds = {}
            holds[self.hold_reason] = holds.get(self.hold_reason, 0.0) + held
            self._held_since = None

    def _told(self, kind: Literal["accepted", "prefilled", "tokens"]) -> Report:
        assert self.lease is not None
        self.told_tokens = self.attempt_tokens
        return Report(self, LeaseProgress(self.lease, kind, self.told_tokens))

    def _close_lease(
        self,
        kind: Literal["finished", "cancelled", "failed"],
        *,
        reason: str = "",
        usage: Usage | None = None,
        event: int = -1,
    ) -> Report:
        assert self.lease is not None
        lease, self.lease = self.lease, None
        self._past.add(lease)
        gap = self._gap(reason) if kind == "finished" else ""
        return Report(
            self,
            LeaseProgress(lease, kind, self.attempt_tokens, usage, reason, event, gap=gap),
        )

    def _gap(self, reason: str) -> Literal["", "tool", "human"]:
        """What its session waits for now. O(output), once."""
        marks = self.spec.tool_call_tokens
        if any(mark in self.tokens for mark in marks):
            return "tool"
        return "human" if marks and reason == "stop" else ""

    def _abort(self) -> Abort:
        assert self.grant is not None
        assert self.lease is not None
        return Abort(self, self.grant.endpoint, self.lease)

    def _fail(self, error: TurnError, now: float) -> Effects:
        return self._end(Failed(error), now)

    def _end(self, outcome: Outcome, now: float) -> Effects:
        assert self.outcome is None
        self._end_hold(now)
        self.outcome = outcome
        self.stage = Stage.ENDED
        self.ended = True
        self._usage = self.usage
        self.times.ended = now
        self.reader.wake()
        return _NOTHING


def _hash_rest(spec: TurnSpec, added: array[int]) -> bytes:
    """Sequence hashes of the blocks that `added` fills, from the prompt's last full block on."""
    full = len(spec.hashes) // HASH_BYTES
    rest = spec.prompt[full * spec.block_size * TOKEN_BYTES :] + added.tobytes()
    parent = int.from_bytes(spec.hashes[-HASH_BYTES:], "little") if full else None
    return sequence_hashes(rest, spec.block_size, seed=spec.seed, parent=parent).tobytes()
