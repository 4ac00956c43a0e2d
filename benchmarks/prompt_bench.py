"""What a turn costs on the prompt path: an agent's session of 213 messages and 128k tokens against one of 8k.

Every turn measured brings text that no cache has seen. Turns of both sessions alternate, so that both find the
processor's caches as a server's mixed traffic leaves them. CPU time (threads included), medians.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fermata.core.hashing import TOKEN_BYTES, hash_seed, sequence_hashes
from fermata.core.model_folder import ModelFolder, default_model_folder
from fermata.frontend.prompt import PromptModel

BLOCK = 64
SEED = hash_seed()
TURNS = 40
GENERATION_PROMPT = "<|im_start|>assistant\n"
_decode = msgspec.json.Decoder().decode


class Source:
    """Text of our own sources, cut anew each time, with the last words of every line shuffled."""

    def __init__(self) -> None:
        root = Path(__file__).resolve().parent.parent
        files = sorted((root / "core").rglob("*.py")) + sorted(root.glob("*.md"))
        self._lines = "\n".join(file.read_text(encoding="utf-8") for file in files).splitlines()
        self._rng = random.Random(7)

    def text(self, chars: int) -> str:
        lines: list[str] = []
        while chars > 0:
            words = self._rng.choice(self._lines).split(" ")
            self._rng.shuffle(words)
            lines.append(" ".join(words)[:chars])
            chars -= len(lines[-1]) + 1
        return "\n".join(lines)


@dataclass
class Session:
    """An agent's history and a way to ask for its next turn, always from the same history."""

    model: PromptModel
    source: Source
    messages: list[dict[str, Any]]

    @classmethod
    def of_tokens(
        cls, model: PromptModel, source: Source, *, tokens: int, messages: int
    ) -> Session:
        """`messages` messages that render to `tokens` tokens, to the token."""
        session = cls(model, source, [])
        chars = int(tokens / messages * 2.2)
        session.messages = [
            {"role": "system", "content": source.text(chars)},
            {"role": "user", "content": source.text(chars)},
        ]
        while len(session.messages) < messages - 1:
            session.messages += session.step(chars)
        session.messages = [*session.messages[: messages - 1], {"role": "user", "content": ""}]
        missing = tokens - session.tokens
        # Words to come near, then single letters, which are a token each.
        last = session.messages[-1]
        while missing > 0:
            last["content"] += source.text(missing) if missing > 40 else " q" * min(missing, 4)
            missing = tokens - session.tokens
        while missing < 0:
            last["content"] = last["content"][:-1]
            missing = tokens - session.tokens
        return session

    @property
    def tokens(self) -> int:
        """Up to the last safe boundary, from which on the next turn is tokenised."""
        text = self.model.render(self.messages, add_generation_prompt=False)
        return len(self.model.tokenizer.encode(text))

    def step(self, chars: int) -> list[dict[str, Any]]:
        """What one turn adds: a call of a tool, and what the tool said."""
        arguments = json.dumps({"command": self.source.text(60)})
        call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        said = {"role": "assistant", "content": self.source.text(chars // 4), "tool_calls": [call]}
        return [said, {"role": "tool", "tool_call_id": "c", "content": self.source.text(chars)}]

    def body(self, addition: list[dict[str, Any]]) -> bytes:
        return json.dumps(
            {"model": "m", "messages": [*self.messages, *addition], "stream": True}
        ).encode()

    def prepare(self) -> None:
        text = self.model.render(self.messages)
        self.model.path.prepare(text, seed=SEED)


@dataclass
class Prepared:
    """CPU microseconds of one prompt's way from text to frames, and how much it touched."""

    find: float
    tokenise: float
    finish: float
    hash: float
    """Part of `finish`, measured once more by itself."""
    tokens: int
    blocks: int

    @property
    def prepare(self) -> float:
        return self.find + self.tokenise + self.finish

    @property
    def tokenise_and_hash(self) -> float:
        return self.tokenise + self.hash


def prepare(session: Session, text: str) -> Prepared:
    path = session.model.path
    clock = time.process_time_ns
    begun = clock()
    pending = path.begin(text, seed=SEED)
    found = clock()
    pending.encode()
    encoded = clock()
    prompt = path.finish(pending)
    finished = clock()
    known = len(prompt.hashes) - prompt.hashed_blocks
    rest = memoryview(prompt.tokens)[known * BLOCK * TOKEN_BYTES :]
    rested = clock()
    again = sequence_hashes(rest, BLOCK, seed=SEED, parent=prompt.hashes[known - 1])
    hashed = clock()
    assert again == prompt.hashes[known:]
    return Prepared(
        find=(found - begun) / 1000,
        tokenise=(encoded - found) / 1000,
        finish=(finished - encoded) / 1000,
        hash=(hashed - rested) / 1000,
        tokens=prompt.tokenised_tokens,
        blocks=prompt.hashed_blocks,
    )


@dataclass
class Turn:
    """CPU microseconds of a turn from the body of the request to frames."""

    json: float
    render: float
    prepared: Prepared

    @property
    def whole(self) -> float:
        return self.json + self.render + self.prepared.prepare


def run_turn(session: Session, body: bytes) -> Turn:
    clock = time.process_time_ns
    begun = clock()
    request = _decode(body)
    decoded = clock()
    text = session.model.render(request["messages"])
    rendered = clock()
    return Turn((decoded - begun) / 1000, (rendered - decoded) / 1000, prepare(session, text))


def addition_of(session: Session, tokens: int) -> list[dict[str, Any]]:
    """An addition of exactly that many tokens, its text new."""
    addition = session.step(int(tokens * 1.6))
    last = addition[-1]
    encode, render = session.model.tokenizer.encode, session.model.render

    def missing() -> int:
        text = render([session.messages[0], *addition])
        return tokens - len(encode(text[text.index("<|im_start|>assistant") :]))

    while (short := missing()) != 0:
        last["content"] = last["content"] + " q" * short if short > 0 else last["content"][:-1]
    return addition


def sessions_of(model: PromptModel) -> tuple[Session, Session]:
    source = Source()
    long = Session.of_tokens(model, source, tokens=128_000, messages=213)
    short = Session.of_tokens(model, source, tokens=8_000, messages=13)
    for session in (long, short):
        session.prepare()
    return long, short


def prompts_of(sessions: tuple[Session, Session]) -> tuple[list[Prepared], list[Prepared]]:
    """Text to frames alone: the texts are rendered before."""
    texts = [
        [s.model.render([*s.messages, *addition_of(s, 500)]) for _ in range(TURNS)]
        for s in sessions
    ]
    found: tuple[list[Prepared], list[Prepared]] = ([], [])
    for pair in zip(*texts, strict=True):
        for session, text, prompts in zip(sessions, pair, found, strict=True):
            prompts.append(prepare(session, text))
    return found


def turns_of(sessions: tuple[Session, Session]) -> tuple[list[Turn], list[Turn]]:
    found: tuple[list[Turn], list[Turn]] = ([], [])
    for _ in range(TURNS):
        for session, turns in zip(sessions, found, strict=True):
            turns.append(run_turn(session, session.body(addition_of(session, 500))))
    return found


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def detokenise_us(model: PromptModel, *, bunch: int) -> float:
    ids = model.tokenizer.encode(Source().text(40_000))
    best = float("inf")
    for _ in range(3):
        stream = model.detokenizer()
        frames = [memoryview(ids[i : i + bunch]) for i in range(0, len(ids), bunch)]
        started = time.process_time_ns()
        for frame in frames:
            stream.push(frame)
        stream.flush()
        best = min(best, (time.process_time_ns() - started) / 1000 / len(ids))
    return best


def tokenise_us(model: PromptModel) -> float:
    ids = array("I")
    source = Source()
    spent = 0
    for _ in range(4):
        text = source.text(60_000)
        started = time.process_time_ns()
        ids += model.tokenizer.encode(text)
        spent += time.process_time_ns() - started
    return spent / 1000 / len(ids)


def row(name: str, value: float, unit: str, target: float | None = None) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit, "target": target, "better": "lower"}


def measurements() -> Iterator[dict[str, object]]:
    folder = ModelFolder.load(default_model_folder())
    model = PromptModel.load(folder, block_size=BLOCK, cache_bytes=1 << 28)
    sessions = sessions_of(model)
    long, short = prompts_of(sessions)
    touched = {(p.tokens, p.blocks) for p in long} ^ {(p.tokens, p.blocks) for p in short}
    new = median(p.tokenise_and_hash for p in long)
    new_short = median(p.tokenise_and_hash for p in short)
    yield row("prompt: tokenise + hash 500 new, 128k against 8k", new / new_short, "ratio", 1.3)
    yield row("prompt: tokens and blocks touched at one of them only", len(touched), "counts", 0)
    yield row("prompt: tokenise + hash 500 new at 128k", new, "us")
    yield row("prompt: text to frames at 128k", median(p.prepare for p in long), "us")
    yield row("prompt: text to frames at 8k", median(p.prepare for p in short), "us")
    turns, short_turns = turns_of(sessions)
    whole = median(t.whole for t in turns) / 1000
    yield row("prompt: JSON to frames, 213 messages, 128k", whole, "ms", 2.5)
    yield row("prompt: of that, JSON", median(t.json for t in turns), "us")
    yield row("prompt: of that, template", median(t.render for t in turns), "us")
    yield row("prompt: of that, text to frames", median(t.prepared.prepare for t in turns), "us")
    whole = median(t.whole for t in short_turns) / 1000
    yield row("prompt: JSON to frames, 13 messages, 8k", whole, "ms")
    yield row("prompt: tokenise text not seen before", tokenise_us(model), "us/token")
    yield row("prompt: detokenise, 16 tokens a push", detokenise_us(model, bunch=16), "us/token", 2)
    yield row("prompt: detokenise, 1 token a push", detokenise_us(model, bunch=1), "us/token")


if __name__ == "__main__":
    for measured in measurements():
        print(f"{measured['name']:75} {measured['value']:10.3f} {measured['unit']}")
