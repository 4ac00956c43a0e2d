"""Recorded sessions of a real agent, sent turn by turn: what could be cached is cached, and no id is ever wrong.

The text is that of mini-SWE-agent runs (`../shared/data`); the assistant's side is what our engine answered.
"""

from __future__ import annotations

import gzip
import json
from array import array
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tokenizers

from fermata.core.hashing import sequence_hashes
from fermata.core.model_folder import ModelFolder, default_model_folder
from fermata.frontend.prompt.template import ChatTemplate

BLOCK = 64
TRACE = Path(__file__).parents[3] / "shared/data/lmcache_agent_trace/miniswe.jsonl.gz"
SESSIONS = ("063925", "af281d", "ce5308")
"""First digits of their ids: 30 turns each, of 33k, 145k and 19k characters in the end."""
MANIFEST = """
apiVersion: fermata.dev/v1alpha1
kind: AgentDeployment
metadata: {name: sessions}
spec:
  model: {name: tiny}
  clock: {speedup: 20}
  workers:
    - name: sim
      replicas: 2
      simulated: {responder: {type: Lorem}}
"""


def recorded_sessions() -> Iterator[tuple[str, list[str]]]:
    """(session id, new text of each turn): input k minus input k-1."""
    inputs: dict[str, list[str]] = defaultdict(list)
    with gzip.open(TRACE, "rt") as lines:
        for line in lines:
            call = json.loads(line)
            inputs[call["session_id"]].append(call["input"])
    for wanted in SESSIONS:
        (session,) = [s for s in inputs if s.startswith(wanted)]
        turns = inputs[session]
        yield (
            session,
            [now.removeprefix(before) for before, now in zip(["", *turns], turns, strict=False)],
        )


class InfiniteCache:
    """What a cache that never forgets, on one worker, would have found."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def match(self, tokens: array[int]) -> int:
        """Cached tokens: whole blocks, and never the last token, which must be computed to go on from."""
        blocks = 0
        for value in sequence_hashes(tokens.tobytes(), BLOCK):
            if value not in self._seen:
                break
            blocks += 1
        return min(blocks, (len(tokens) - 1) // BLOCK) * BLOCK

    def add(self, tokens: array[int]) -> None:
        self._seen.update(sequence_hashes(tokens.tobytes(), BLOCK))


@pytest.mark.skipif(not TRACE.exists(), reason="the recorded traces are not beside this checkout")
@pytest.mark.timeout(240)
def test_sessions_stay_cached_and_incremental_ids_equal_a_fresh_tokenisation(stack_factory):
    stack = stack_factory(MANIFEST)
    folder = ModelFolder.load(default_model_folder())
    oracle = tokenizers.Tokenizer.from_file(str(folder.tokenizer_file))
    template = ChatTemplate(folder.chat_template, special_tokens=folder.special_tokens)
    cached = ideal = prompt_tokens = compared = turns = 0
    infinite = InfiniteCache()
    with httpx.Client(base_url=stack.urls[0], timeout=60) as http:
        for session, news in recorded_sessions():
            messages: list[dict[str, str]] = []
            for new in news:
                messages.append({"role": "user", "content": new})
                reply = http.post(
                    "/v1/chat/completions",
                    json={"model": "tiny", "messages": messages, "max_tokens": 96},
                    headers={"x-dynamo-session-id": session},
                ).raise_for_status().json()  # fmt: skip
                answer = reply["choices"][0]["message"]["content"]
                fresh = array(
                    "I", oracle.encode(template.render(messages), add_special_tokens=False).ids
                )
                ours = http.post(
                    "/tokenize", json={"model": "tiny", "messages": messages}
                ).raise_for_status().json()  # fmt: skip
                assert array("I", ours["tokens"]) == fresh, f"turn {turns} of session {session}"
                compared += 1
                usage = reply["usage"]
                assert usage["prompt_tokens"] == len(fresh)
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                prompt_tokens += len(fresh)
                ideal += infinite.match(fresh)
                spoken = oracle.encode(answer, add_special_tokens=False).ids
                infinite.add(fresh + array("I", spoken))
                messages.append({"role": "assistant", "content": answer})
                turns += 1
        status = http.get("/fermata/status").json()
    assert compared >= 60
    assert turns == compared
    share, best = cached / prompt_tokens, ideal / prompt_tokens
    print(
        f"{turns} turns, {prompt_tokens} prompt tokens, cached {share:.4f} of {best:.4f} possible"
    )
    assert best > 0.8, "these sessions share nearly everything: the yardstick itself is off"
    assert share >= best - 0.02
    # Most ids came from the prompt path's cache: those compared above were incremental ones.
    assert status["prompts"]["cached_tokens"] > 5 * status["prompts"]["tokenised_tokens"]
