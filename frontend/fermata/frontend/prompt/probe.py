"""Strings that tell one tokenizer implementation from another: what regexes, normalisers and added tokens trip over.

The same list each time, so that a choice made at start is the choice made at every start.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

PROBES = 500
_LONG_PROBES = 4
_LONG_PIECES = 300

# (first, last) code points: scripts with their own rules for letters, marks, digits and case.
_SCRIPTS = (
    (0x20, 0x7E), (0xA1, 0xFF), (0x100, 0x17F), (0x250, 0x2AF), (0x300, 0x36F), (0x391, 0x3C9),
    (0x410, 0x44F),
    (0x5D0, 0x5EA), (0x621, 0x64A), (0x660, 0x669), (0x905, 0x939), (0x966, 0x96F),
    (0xE01, 0xE3A), (0x1100, 0x115F),
    (0x1E00, 0x1EFF), (0x2010, 0x2027), (0x2070, 0x209C), (0x2150, 0x218B), (0x2190, 0x21FF),
    (0x2500, 0x257F),
    (0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0xF900, 0xFA6D),
    (0xFB00, 0xFB06),
    (0xFF01, 0xFF5E), (0x10330, 0x1034A), (0x1D400, 0x1D7FF), (0x1F300, 0x1F64F),
    (0x1F900, 0x1F9FF), (0x20000, 0x2A6D6),
)  # fmt: skip
_SPACES = (
    " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", "\t\t ", "\xa0", "\u3000", "\u2003",
    "\x85", "\u2028", "\u200b", "\ufeff", "\x0b", "\x0c", "\x1c", "\x00", " " * 17, "\n" * 5, "\u2581",
)  # fmt: skip
_WORDS = (
    "the", "The", "THE", "it's", "IT'S", "we'LL", "don't", "l\u2019eau", "x'y", "caf\u00e9",
    "cafe\u0301", "na\u00efve",
    "\u1e9b\u0323", "\ufb01n", "\u0130stanbul", "Stra\u00dfe",
    "\u03a3\u03af\u03c3\u03c5\u03c6\u03bf\u03c2", "\u0939\u093f\u0928\u094d\u0926\u0940",
    "\ud55c\uad6d\uc5b4", "\u1112\u1161\u11ab", "\u65e5\u672c\u8a9e", "\u0e44\u0e17\u0e22",
    "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd",
    "1234567", "3.14159", "0xFF", "1,000", "\u00bd", "\u2167", "\u0663\u0664", "12ab34",
    "_private", "__init__", "camelCase", "SCREAMING_CASE",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1eb\U0001f1ee", "\u2764\ufe0f",
    "\U0001f44d\U0001f3fd", "\U0010ffff", "\ue000", "\ufffd",
    "antidisestablishmentarianism" * 3, "a" * 70, "=" * 40, "-" * 9, "...", "?!?!", "\u2026",
    "\u2014", "\u201cquoted\u201d",
)  # fmt: skip
_CODE = (
    "def f(x):\n    return x**2\n", "if (a && b) { c++; }", "for i in range(10):\n\tprint(i)\n\n",
    "SELECT * FROM t WHERE a='b';",
    '{"name": "x", "arguments": {"a": [1, 2.5e-3, null]}}', "<div class=\"a\">&nbsp;</div>",
    "http://a.b/c?d=e&f=g#h", "C:\\dir\\file.txt",
    "\x1b[31mred\x1b[0m", "a\\nb\\u00e9", "#!/bin/sh\nset -eu\n",
    "x = [[0] * 3 for _ in y]  # why\r\n", "$$\\int_0^1 x\\,dx$$",
    "| a | b |\n|---|---|\n", "diff --git a/x b/x\n@@ -1,3 +1,4 @@\n-old\n+new\n", "    \n\n    ",
    "</s><s>", "<|", "|>", "<<>>", "[INST]",
)  # fmt: skip


def probe_strings(added_tokens: Sequence[str]) -> list[str]:
    """`PROBES` strings; every added token stands in at least one of them, in an odd place."""
    rng = random.Random(20240229)
    shares = [list(added_tokens[i::PROBES]) for i in range(PROBES)]
    probes = [_probe(rng, share, added_tokens) for share in shares[:-_LONG_PROBES]]
    # Long ones too: implementations cut those into parts that they work on side by side.
    for share in shares[-_LONG_PROBES:]:
        probes.append("".join(_probe(rng, share, added_tokens) for _ in range(_LONG_PIECES)))
    return probes


def _probe(rng: random.Random, share: Sequence[str], added_tokens: Sequence[str]) -> str:
    parts = [_piece(rng) for _ in range(rng.randint(1, 8))]
    extra = rng.sample(added_tokens, k=min(len(added_tokens), rng.choice((0, 0, 1, 3))))
    for token in (*share, *extra):
        parts.insert(rng.randint(0, len(parts)), rng.choice(_PLACEMENTS)(token))
    return "".join(parts)


# Whole, doubled, glued to words and spaces, cut short, run into its own copy, in other case.
_PLACEMENTS: tuple[Callable[[str], str], ...] = (
    lambda token: token,
    lambda token: token,
    lambda token: token + token,
    lambda token: f" {token} ",
    lambda token: f"word{token}word",
    lambda token: f"  \n{token}\t ",
    lambda token: f"\u3000{token}\u3000",
    lambda token: token + token[:-1],
    lambda token: token[: len(token) // 2] + token,
    lambda token: f"{token}{token.upper()}{token.title()}",
)


def _piece(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(_WORDS) + rng.choice(_SPACES)
    if kind < 0.5:
        return rng.choice(_CODE)
    if kind < 0.6:
        return "".join(rng.choices(_SPACES, k=rng.randint(1, 4)))
    if kind < 0.7:
        return "".join(chr(rng.randint(0, 0x7F)) for _ in range(rng.randint(1, 12)))
    first, last = rng.choice(_SCRIPTS)
    return "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 10)))
