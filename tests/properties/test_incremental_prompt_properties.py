"""The incremental prompt path against a fresh tokenisation by the reference, over families that cut differently.

Each family has added tokens of every kind: safe ones, and ones at which a cut would be wrong. The oracle is
`tokenizers` on the whole text, and block hashes over its ids.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre

from fermata.core.hashing import hash_seed, sequence_hashes
from fermata.core.model_folder import ModelFolder
from fermata.frontend.prompt import ChatTemplate, PromptModel, PromptPath

BLOCK = 4
WORDS = [
    "the quick", " brown", "fox", " jumps over", "\n", "\n\n", "  ", "   \t", " ", "it's", "don't", "Über",
    "cafe\u0301", "日本語", "🙂", "👩‍👧", "e\u0301", "\u3000", "\xa0", "123", "45.6", "def f(x):\n    return x\n",
    "ﬁ", "İ", "ß", "<", "|", "<|", "|>", "im_start", "<think", "</", "ing", "un", "▁", "##", "Ġ", "x" * 30,
]  # fmt: skip
CORPUS = ["".join(random.Random(i).choices(WORDS, k=60)) for i in range(40)] + [
    "The quick brown fox jumps over the lazy dog. It's 123 times.\n\n  def f(x):\n      return x\n"
] * 20


def added(content: str, **flags: bool) -> AddedToken:
    flags.setdefault("normalized", False)
    return AddedToken(content, **flags)


def qwen_like() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre.Sequence(
        [
            pre.Split(Regex(split), "isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=500, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
        ),
    )
    tokenizer.add_special_tokens(
        [added("<|im_start|>", special=True), added("<|im_end|>", special=True)]
    )
    tokenizer.add_tokens(
        [added("<think>"), added("</think>", rstrip=True), added("<pad>", lstrip=True)]
    )
    tokenizer.add_tokens([added("Word", single_word=True), added("fox jumps", normalized=True)])
    return tokenizer


def gpt2_like() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=450, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
        ),
    )
    tokenizer.add_special_tokens(
        [added("<|im_start|>", special=True), added("<|im_end|>", special=True)]
    )
    tokenizer.add_tokens(
        [added("<mask>", lstrip=True), added("  "), added("<|im", normalized=True)]
    )
    return tokenizer


def llama_like() -> Tokenizer:
    """Spaces written as U+2581 by the normaliser, one put in front of every piece; unknown characters as bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(
        ["▁the▁quick▁brown▁fox▁jumps▁over", "def▁f(x):\n▁▁return▁x", "it's▁12345.6"] * 5,
        trainers.BpeTrainer(
            vocab_size=420, special_tokens=["<unk>", *spelled], show_progress=False
        ),
    )
    # The trainer makes added tokens of them; in a real folder the spelled bytes are plain vocabulary.
    settings = json.loads(tokenizer.to_str())
    settings["added_tokens"] = settings["added_tokens"][:1]
    tokenizer = Tokenizer.from_str(json.dumps(settings))
    tokenizer.add_special_tokens(
        [added("<|im_start|>", special=True), added("<|im_end|>", special=True)]
    )
    tokenizer.add_tokens([added("<think>", lstrip=True), added("▁▁▁"), added("\n\n")])
    return tokenizer


def unigram_like() -> Tokenizer:
    """A space in front of the *first* piece only: the reason why a cut takes the added token along."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=250, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        ),
    )
    tokenizer.add_special_tokens(
        [added("<|im_start|>", special=True), added("<|im_end|>", special=True)]
    )
    tokenizer.add_tokens([added("<think>", normalized=True), added("</think>")])
    return tokenizer


def wordpiece_like() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False),
    )
    tokenizer.add_special_tokens(
        [added("<|im_start|>", special=True), added("<|im_end|>", special=True)]
    )
    tokenizer.add_tokens([added("<think>"), added("ing", single_word=True)])
    return tokenizer


def overlapping() -> Tokenizer:
    """Tokens that contain, cover and repeat one another: few of them are safe."""
    tokenizer = qwen_like()
    tokenizer.add_tokens(
        [
            added("<<|im_start|>"),
            added("<|im_start|>user"),
            added("aa"),
            added("<think"),
            added("x</"),
        ]
    )
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "qwen": qwen_like,
    "gpt2": gpt2_like,
    "llama": llama_like,
    "unigram": unigram_like,
    "wordpiece": wordpiece_like,
    "overlapping": overlapping,
}


@dataclass
class Family:
    name: str
    reference: Tokenizer
    model: PromptModel
    contents: list[str]

    def path(self, cache_bytes: int = 1 << 20) -> PromptPath:
        return PromptPath(
            self.model.tokenizer,
            added_tokens=self.model.folder.added_tokens,
            block_size=BLOCK,
            cache_bytes=cache_bytes,
        )

    def check(self, path: PromptPath, text: str, seed: int) -> None:
        prompt = path.prepare(text, seed=seed)
        self.compare(prompt.tokens, prompt.hashes, text, seed)
        assert prompt.cached_tokens + prompt.tokenised_tokens == prompt.input_tokens

    def compare(self, tokens: bytes, hashes: array[int], text: str, seed: int) -> None:
        fresh = array("I", self.reference.encode(text, add_special_tokens=False).ids)
        assert array("I", tokens).tolist() == fresh.tolist(), text
        assert hashes == sequence_hashes(fresh.tobytes(), BLOCK, seed=seed)


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = FAMILIES[request.param]()
    tokenizer.save(str(folder / "tokenizer.json"))
    model = PromptModel.load(ModelFolder.load(folder), block_size=BLOCK, cache_bytes=1 << 20)
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    contents = [token.content for token in model.folder.added_tokens]
    return Family(request.param, reference, model, contents)


def edited(rng: random.Random, text: str, pieces: list[str]) -> str:
    """The text as a client might send it next: longer, cut, rewritten somewhere, or with a token put in or broken."""
    kind = rng.random()
    at = rng.randint(0, len(text))
    more = "".join(rng.choices(pieces, k=rng.randint(1, 8)))
    if kind < 0.45:
        return text + more
    if kind < 0.6:
        return text[:at] + more
    if kind < 0.8:
        return text[:at] + more + text[at:]
    return text[:at] + text[at + rng.randint(1, 9) :]


def test_any_row_of_edits_gives_the_ids_of_a_fresh_tokenisation(family: Family) -> None:
    pieces = WORDS + family.contents * 3
    cuts = 0

    @settings(max_examples=150, derandomize=True, deadline=None, database=None)
    @given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1 << 30)), min_size=2, max_size=14))
    def run(steps: list[tuple[int, int]]) -> None:
        nonlocal cuts
        path = family.path()
        texts = [""] * 3
        for slot, number in steps:
            texts[slot] = edited(random.Random(number), texts[slot], pieces)
            family.check(path, texts[slot], seed=hash_seed())
        path.check_integrity()
        cuts += path.counters.prompts - path.counters.full_passes

    run()
    assert cuts > 70


def test_a_long_walk_of_edits_forks_and_evictions_gives_the_ids_of_a_fresh_tokenisation(
    family: Family,
) -> None:
    rng = random.Random(family.name)
    pieces = WORDS + family.contents * 3
    # So small that spans are dropped all the time.
    path = family.path(cache_bytes=24_000)
    seeds = [hash_seed(), hash_seed(namespace="a"), hash_seed(lora="b")]
    texts = [""] * 6
    for step in range(900):
        slot = rng.randrange(len(texts))
        source = texts[rng.randrange(len(texts))] if rng.random() < 0.1 else texts[slot]
        text = edited(rng, source, pieces)
        texts[slot] = text if len(text) < 1500 else "".join(rng.choices(pieces, k=3))
        family.check(path, texts[slot], seed=rng.choice(seeds))
        if step % 50 == 0:
            path.check_integrity()
    path.check_integrity()
    cuts = path.counters.prompts - path.counters.full_passes
    assert cuts > 500, "the walk must take the incremental path"
    assert path.evicted_bytes > 0
    assert path.cache_bytes <= 24_000


TEMPLATES = {
    "plain": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    ),
    "thinking": (
        "{% set last = messages | map(attribute='role') | list %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and 'user' not in last[loop.index:] %}"
        "<think>\n{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n<think>\n"
    ),
    "stripped": "{% for m in messages %}<|im_start|> {{ m.content | trim }} <|im_end|>{% endfor %}",
    "no tokens": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
}


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_sessions_of_any_template_give_the_ids_of_a_fresh_tokenisation(
    family: Family, template: str
) -> None:
    rng = random.Random(template)
    pieces = WORDS + family.contents
    render = ChatTemplate(TEMPLATES[template], special_tokens={}).render
    path = family.path()
    sessions: list[list[dict[str, str]]] = [[] for _ in range(4)]
    for step in range(160):
        messages = rng.choice(sessions)
        said = "".join(rng.choices(pieces, k=rng.randint(1, 10)))
        role = "user" if not messages or rng.random() < 0.3 else rng.choice(("assistant", "tool"))
        messages.append({"role": role, "content": said, "reasoning_content": rng.choice(pieces)})
        if rng.random() < 0.1:
            del messages[rng.randrange(len(messages)) :]
            messages.append({"role": "user", "content": said, "reasoning_content": ""})
        text = render(messages)
        prompt = path.prepare(text, seed=hash_seed(), lineage=str(step % 4))
        family.compare(prompt.tokens, prompt.hashes, text, hash_seed())
    path.check_integrity()
    cuts = path.counters.prompts - path.counters.full_passes
    assert path.counters.prefix_rewrites > 0
    if template == "no tokens":
        return
    assert cuts > 100
    assert path.counters.cached_tokens > path.counters.tokenised_tokens


def test_prompts_that_overtake_one_another_give_the_ids_of_a_fresh_tokenisation(
    family: Family,
) -> None:
    rng = random.Random(family.name)
    pieces = WORDS + family.contents * 3
    path = family.path(cache_bytes=20_000)
    texts = [""] * 3
    overtaken = 0
    for _ in range(200):
        slot = rng.randrange(len(texts))
        texts[slot] = edited(rng, texts[slot], pieces)[:1200]
        pending = path.begin(texts[slot], seed=hash_seed())
        others = rng.randint(0, 3)
        for _ in range(others):
            family.check(path, edited(rng, texts[slot], pieces), seed=hash_seed())
        pending.encode()
        overtaken += others > 0
        prompt = path.finish(pending)
        family.compare(prompt.tokens, prompt.hashes, texts[slot], hash_seed())
        path.check_integrity()
    assert overtaken > 100


def test_the_families_take_both_libraries_and_every_kind_of_added_token(tmp_path: Path) -> None:
    libraries: set[str] = set()
    safe: dict[str, set[str]] = {}
    for name, build in FAMILIES.items():
        folder = tmp_path / name
        folder.mkdir()
        build().save(str(folder / "tokenizer.json"))
        model = PromptModel.load(ModelFolder.load(folder), block_size=BLOCK, cache_bytes=0)
        libraries.add(model.choice.library)
        safe[name] = set(model.path.boundaries.tokens)
    assert libraries == {"fastokens", "tokenizers"}
    assert safe["qwen"] == {"<|im_start|>", "<|im_end|>", "<think>", "</think>"}
    assert safe["overlapping"] == {"<|im_end|>", "<think>", "<<|im_start|>"}
    assert safe["gpt2"] == {"<|im_start|>", "<|im_end|>"}


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_any_chunking_of_output_tokens_gives_the_text_of_the_whole(
    family: Family, skip_special_tokens: bool
) -> None:
    rng = random.Random(family.name)
    size = family.model.tokenizer.vocab_size
    halves = 0
    for _ in range(150):
        spoken = family.reference.encode(
            "".join(rng.choices(WORDS, k=12)), add_special_tokens=False
        ).ids
        noise = [rng.randrange(size + 3) for _ in range(rng.randint(0, 12))]
        ids = spoken + noise if rng.random() < 0.5 else noise + spoken
        whole = family.reference.decode(ids, skip_special_tokens=skip_special_tokens)
        stream = family.model.detokenizer(skip_special_tokens=skip_special_tokens)
        said = ""
        at = 0
        while at < len(ids):
            step = rng.choice((1, 1, 2, 5))
            said += stream.push(memoryview(array("I", ids[at : at + step])))
            at += step
            assert whole.startswith(said), "nothing that is sent is taken back"
            halves += said != family.reference.decode(
                ids[:at], skip_special_tokens=skip_special_tokens
            )
        said += stream.flush()
        assert said == whole, ids
    if family.name in ("qwen", "gpt2", "llama", "overlapping"):
        assert halves > 10, "some pushes must end inside a character"
