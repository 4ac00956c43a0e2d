"""Where a simulated engine's words come from: deterministic, so that agents can be driven end to end.

A responder sees the request and says the whole answer at once, as a Speech; the engine then speaks
it token by token. What it needs beyond tokens it asks for by a feature, which the frontend sees in
the Grant: `last_input` is the text of the last user or tool message, `script_inputs` that of every
turn of the history as well, so that nothing about a session is remembered here and any worker can
continue what another began.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Protocol

from xxhash import xxh3_64_intdigest

from fermata.core import spec
from fermata.worker.engine.base import EngineRequest
from fermata.worker.engine.script import Rule, choose, load_rules
from fermata.worker.engine.speech import Speech
from fermata.worker.engine.vocabulary import Vocabulary

__all__ = ["Echo", "Lorem", "Responder", "Script", "make_responder"]


class Responder(Protocol):
    @property
    def features(self) -> tuple[str, ...]:
        """What it wants to be told with Generate."""
        ...

    def speak(self, request: EngineRequest, *, context_length: int) -> Speech: ...


def make_responder(responder: spec.Responder, *, folder: Path) -> Responder:
    """`folder` is the model's. Raises ConfigError for a model or a script that can not be used."""
    vocabulary = Vocabulary(folder)
    match responder:
        case spec.Echo():
            return Echo(vocabulary)
        case spec.Lorem():
            return Lorem(vocabulary, length=responder.tokens)
        case spec.Script():
            return Script(vocabulary, load_rules(Path(responder.path)))


class Echo:
    """Says the last user or tool message back."""

    features = ("last_input",)

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def speak(self, request: EngineRequest, *, context_length: int) -> Speech:
        text = request.script_inputs[-1] if request.script_inputs else ""
        return self._vocabulary.speech(text)


class Script:
    """Speaks by rules; where none applies, as Echo."""

    features = ("script_inputs",)

    def __init__(self, vocabulary: Vocabulary, rules: tuple[Rule, ...]) -> None:
        self._rules = rules
        self._vocabulary = vocabulary
        self._lines = [vocabulary.speech(rule.say, delay_s=rule.delay_s) for rule in rules]
        self._echo = Echo(vocabulary)

    def speak(self, request: EngineRequest, *, context_length: int) -> Speech:
        chosen = choose(self._rules, request.script_inputs)
        if chosen is None:
            return self._echo.speak(request, context_length=context_length)
        return self._lines[chosen]


_TEXT = (
    "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore et"
    " dolore magna aliqua enim ad minim veniam quis nostrud exercitation ullamco laboris nisi aliquip ex ea"
    " commodo consequat duis aute irure in reprehenderit voluptate velit esse cillum eu fugiat nulla"
    " pariatur excepteur sint occaecat cupidatat non proident sunt culpa qui officia deserunt mollit anim"
)


class Lorem:
    """Sentences seeded by the turn's prompt, hence the same on every worker and after a migration.

    As long as `max_tokens` says, or `length` where the request named none. A frontend fills an
    unnamed max_tokens up to the context window, so one that reaches the window counts as unnamed.
    """

    features: tuple[str, ...] = ()

    def __init__(self, vocabulary: Vocabulary, *, length: int) -> None:
        words = _TEXT.split()
        self._eos = vocabulary.eos
        self._length = length
        self._first = vocabulary.encode("Lorem ipsum")
        self._inner = [vocabulary.encode(f" {word}") for word in words]
        self._capital = [vocabulary.encode(f" {word.capitalize()}") for word in words]
        self._stop = vocabulary.encode(".")

    def speak(self, request: EngineRequest, *, context_length: int) -> Speech:
        prompt = request.length - request.resumed
        named = prompt + request.sampling.max_tokens < context_length
        seed = xxh3_64_intdigest(memoryview(request.tokens)[: 4 * prompt])
        return Speech(
            array("I"),
            eos=self._eos,
            length=request.sampling.max_tokens if named else self._length,
            more=chain.from_iterable(self._sentences(random.Random(seed))),
        )

    def _sentences(self, dice: random.Random) -> Iterator[array[int]]:
        yield self._first
        while True:
            yield from islice(iter(lambda: dice.choice(self._inner), None), dice.randint(3, 11))
            yield self._stop
            yield dice.choice(self._capital)
