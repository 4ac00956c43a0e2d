"""The rules of a Script responder: a YAML file, validated whole, and the choice among them.

rules:
  - when: 'weather'        # regular expression, searched in the last user or tool message
    say: '<tool_call>...'  # raw model output, markup included
    delayS: 2              # deployment seconds before the first token
    times: 1               # how often in one session; absent: always
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, inspect

from fermata.core.errors import ConfigError
from fermata.core.spec.check import Problem, check
from fermata.core.spec.document import Document, dotted, read_documents


class _RuleSpec(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"delay_s": "delayS"}
):
    when: str
    say: str
    delay_s: Annotated[float, Meta(ge=0.0, le=86_400.0)] = 0.0
    times: Annotated[int, Meta(ge=1)] | None = None


class _ScriptSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rules: Annotated[list[_RuleSpec], Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class Rule:
    when: re.Pattern[str]
    say: str
    delay_s: float = 0.0
    times: int | None = None


def load_rules(path: Path) -> tuple[Rule, ...]:
    """Raises ConfigError, one line that names file, line, rule, field and fix."""
    where = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"can not be read: {error}", where=where, fix="give a YAML file"
        ) from None
    documents = read_documents(text, where=where)
    if len(documents) != 1:
        raise ConfigError(
            f"holds {len(documents)} documents", where=where, fix="write one, with a list of rules"
        )
    document = documents[0]
    problems = list(check(document.data, inspect.type_info(_ScriptSpec)))
    if problems:
        raise _error(min(problems, key=lambda p: document.line(p.path)), document, where)
    script = msgspec.convert(document.data, _ScriptSpec)
    return tuple(_rule(r, number, document, where) for number, r in enumerate(script.rules))


def choose(rules: Sequence[Rule], inputs: Sequence[str]) -> int | None:
    """Index of the rule for the last of a session's inputs; None: no rule applies.

    How often each was used follows from the inputs before, so it is the same on every worker. Those
    are walked only where a rule is limited.
    """
    used = [0] * len(rules)
    chosen: int | None = None
    if all(rule.times is None for rule in rules):
        inputs = inputs[-1:]
    for text in inputs:
        chosen = next(
            (i for i, rule in enumerate(rules) if _may(rule, used[i]) and rule.when.search(text)),
            None,
        )
        if chosen is not None:
            used[chosen] += 1
    return chosen


def _may(rule: Rule, used: int) -> bool:
    return rule.times is None or used < rule.times


def _rule(raw: _RuleSpec, number: int, document: Document, where: str) -> Rule:
    try:
        pattern = re.compile(raw.when)
    except re.error as error:
        problem = Problem(
            ("rules", number, "when"), f"no regular expression: {error}", "escape it, or mend it"
        )
        raise _error(problem, document, where) from None
    return Rule(when=pattern, say=raw.say, delay_s=raw.delay_s, times=raw.times)


def _error(problem: Problem, document: Document, where: str) -> ConfigError:
    at = dotted(problem.path)
    return ConfigError(
        f"{at}: {problem.what}" if at else problem.what,
        where=f"{where}:{document.line(problem.path)}",
        fix=problem.fix,
    )
