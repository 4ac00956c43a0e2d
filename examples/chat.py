"""Three turns with the `openai` client against a running `fermata up`, and what was cached in each.

    python examples/chat.py                      (base URL by --url, or OPENAI_BASE_URL)

A system prompt of about 2,000 tokens makes the history worth caching. Exits with 1 when a later turn finds less than
80 % of its prompt in the cache, so it is a check as well as an example.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import uuid
from dataclasses import dataclass

from openai import OpenAI
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam

LEAST_CACHED = 0.80
QUESTIONS = (
    "What does a fermata over a note tell the player?",
    "And over a rest?",
    "How long should it last?",
)
RULES = (
    "You are a patient teacher of music theory.",
    "Answer in plain words, and name the bar you speak of.",
    "Where two editions differ, say so and prefer the older one.",
    "A rest is as much music as a note; treat it so.",
    "Never guess a tempo that the score does not give.",
)


@dataclass
class Turn:
    text: str
    usage: CompletionUsage
    first_s: float
    """Until the first piece of text (the whole, when not streamed)."""

    @property
    def cached_share(self) -> float:
        details = self.usage.prompt_tokens_details
        cached = details.cached_tokens if details is not None else 0
        return (cached or 0) / self.usage.prompt_tokens


def main() -> int:
    flags = parse_flags()
    client = OpenAI(base_url=flags.url, api_key=flags.key, max_retries=0, timeout=60)
    model = flags.model or client.models.list().data[0].id
    failures = 0
    for mode in ("plain", "streaming"):
        print(f"{mode}: {model} at {flags.url}")
        # The header makes the turns of one conversation one session.
        session = client.with_options(
            default_headers={"x-dynamo-session-id": f"chat-{uuid.uuid4().hex}"}
        )
        failures += converse(session, model, streaming=mode == "streaming")
    return 1 if failures else 0


def converse(client: OpenAI, model: str, *, streaming: bool) -> int:
    """Later turns that found too little cached."""
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": system_prompt(uuid.uuid4().hex)}
    ]
    failures = 0
    ask = ask_streaming if streaming else ask_plain
    for number, question in enumerate(QUESTIONS, 1):
        messages.append({"role": "user", "content": question})
        turn = ask(client, model, messages)
        messages.append({"role": "assistant", "content": turn.text})
        enough = number == 1 or turn.cached_share >= LEAST_CACHED
        failures += not enough
        print(
            f"  turn {number}: {turn.usage.prompt_tokens:>5} prompt tokens, {turn.cached_share:>4.0%} cached,"
            f" {turn.usage.completion_tokens:>3} new, first text after {1000 * turn.first_s:>4.0f} ms"
            f"{'' if enough else f'   below {LEAST_CACHED:.0%}'}"
        )
    return failures


def ask_plain(client: OpenAI, model: str, messages: list[ChatCompletionMessageParam]) -> Turn:
    started = time.perf_counter()
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=48)
    took_s = time.perf_counter() - started
    assert answer.usage is not None, "the server did not say what it used"
    return Turn(answer.choices[0].message.content or "", answer.usage, took_s)


def ask_streaming(client: OpenAI, model: str, messages: list[ChatCompletionMessageParam]) -> Turn:
    started = time.perf_counter()
    pieces: list[str] = []
    first_s = 0.0
    usage: CompletionUsage | None = None
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=48,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            first_s = first_s or time.perf_counter() - started
            pieces.append(chunk.choices[0].delta.content)
    assert usage is not None, "the server did not say what it used"
    return Turn("".join(pieces), usage, first_s)


def system_prompt(salt: str) -> str:
    """About 2,000 tokens of the model that ships; the salt keeps runs apart, so the first turn is cold."""
    lines = [f"Lesson {salt}."]
    while sum(len(line.split()) for line in lines) < 1060:
        lines.append(f"{len(lines)}. {RULES[len(lines) % len(RULES)]}")
    return "\n".join(lines)


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    parser.add_argument("--url", default=url, help=f"base URL ({url})")
    parser.add_argument("--key", default=os.environ.get("OPENAI_API_KEY", "none"), help="API key")
    parser.add_argument("--model", default="", help="model (the first the server lists)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
