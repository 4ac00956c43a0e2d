"""Plain data against the typed specs, with an answer a person can act on.

`msgspec.convert` decides the same question, but its text names neither the nearest field nor the choices of
an enum. This walk reads the same types, so it knows both; a property test holds the two to one verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import cast

from msgspec import inspect

from fermata.core.spec.document import FieldPath, as_mapping
from fermata.core.spec.resource import manifest_name

MAX_INTEGER = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Problem:
    path: FieldPath
    what: str
    fix: str


def check(value: object, of: inspect.Type, path: FieldPath = ()) -> Iterator[Problem]:
    """Everything wrong with `value`, outermost first; nothing when `msgspec.convert` would take it."""
    match of:
        case inspect.AnyType():
            return
        case inspect.UnionType():
            yield from _check_union(value, of, path)
        case inspect.StructType():
            yield from _check_struct(value, of, path)
        case inspect.ListType():
            yield from _check_list(value, of, path)
        case inspect.DictType():
            yield from _check_dict(value, of, path)
        case inspect.LiteralType():
            if value not in of.values or isinstance(value, bool):
                yield _not_a_choice(value, [str(choice) for choice in of.values], path)
        case inspect.BoolType():
            if not isinstance(value, bool):
                yield Problem(
                    path, f"expected true or false, got {describe(value)}", "write true or false"
                )
        case inspect.IntType() | inspect.FloatType():
            yield from _check_number(value, of, path)
        case inspect.StrType():
            yield from _check_text(value, of, path)
        case _:
            raise NotImplementedError(f"no check for {of}")


def nearest(word: str, choices: Sequence[str]) -> str | None:
    """The choice that was probably meant, whatever its case, underscores or unit suffix."""
    for guess in (manifest_name(word), word):
        for choice in choices:
            if guess.lower() == choice.lower():
                return choice
    by_lower = {choice.lower(): choice for choice in choices}
    close = get_close_matches(word.lower().replace("_", ""), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def describe(value: object) -> str:
    """The value as the author of a manifest would call it."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {_shortened(value)!r}"
        case list():
            return "a list"
        case dict():
            return "a mapping"
        case _:
            return f"{_shortened(str(value))} ({type(value).__name__})"


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_union(value: object, of: inspect.UnionType, path: FieldPath) -> Iterator[Problem]:
    structs = [member for member in of.types if isinstance(member, inspect.StructType)]
    others = [member for member in of.types if not isinstance(member, inspect.NoneType)]
    if value is None and len(others) < len(of.types):
        return
    if len(structs) == len(of.types):
        yield from _check_tagged(value, structs, path)
    else:
        assert len(others) == 1, "a union is of tagged structs, or of one type and null"
        yield from check(value, others[0], path)


def _check_tagged(
    value: object, structs: list[inspect.StructType], path: FieldPath
) -> Iterator[Problem]:
    by_tag = {str(struct.tag): struct for struct in structs}
    field = structs[0].tag_field
    assert field is not None
    mapping = as_mapping(value)
    if mapping is None:
        first = next(iter(by_tag))
        yield Problem(
            path,
            f"expected a mapping with {field!r}, got {describe(value)}",
            f"write {{{field}: {first}}}",
        )
        return
    if field not in mapping:
        yield Problem(path, f"{field!r} is missing", f"add {field}: {' or '.join(by_tag)}")
        return
    tag = mapping[field]
    if not isinstance(tag, str) or tag not in by_tag:
        yield _not_a_choice(tag, list(by_tag), (*path, field))
        return
    yield from _check_struct(value, by_tag[tag], path)


def _check_struct(value: object, of: inspect.StructType, path: FieldPath) -> Iterator[Problem]:
    mapping = as_mapping(value)
    if mapping is None:
        yield Problem(path, f"expected a mapping, got {describe(value)}", _known(of))
        return
    fields = {field.encode_name: field for field in of.fields}
    for key, inner in mapping.items():
        if key in fields:
            yield from check(inner, fields[key].type, (*path, key))
        elif of.forbid_unknown_fields and key != of.tag_field:
            guess = nearest(key, list(fields))
            yield Problem(
                (*path, key), "unknown field", f"did you mean {guess}?" if guess else _known(of)
            )
    for name, field in fields.items():
        if field.required and name not in mapping:
            yield Problem(path, f"{name!r} is missing", f"add {name}")


def _check_list(value: object, of: inspect.ListType, path: FieldPath) -> Iterator[Problem]:
    if not isinstance(value, list):
        yield Problem(path, f"expected a list, got {describe(value)}", "start each item with '- '")
        return
    items = cast("list[object]", value)  # isinstance can not tell the parameter
    if len(items) < (of.min_length or 0):
        yield Problem(path, f"needs at least {of.min_length} item", "add one")
    for index, item in enumerate(items):
        yield from check(item, of.item_type, (*path, index))


def _check_dict(value: object, of: inspect.DictType, path: FieldPath) -> Iterator[Problem]:
    if not isinstance(value, dict):
        yield Problem(
            path, f"expected a mapping, got {describe(value)}", "write it as name: value lines"
        )
        return
    items = cast("dict[object, object]", value)  # isinstance can not tell the parameters
    for key, inner in items.items():
        if isinstance(key, str):
            yield from check(inner, of.value_type, (*path, key))
        else:
            yield Problem(
                (*path, str(key)), f"a key must be text, got {describe(key)}", "put it in quotes"
            )


def _check_number(
    value: object, of: inspect.IntType | inspect.FloatType, path: FieldPath
) -> Iterator[Problem]:
    whole = isinstance(of, inspect.IntType)
    wanted = "a whole number" if whole else "a number"
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        yield Problem(
            path, f"expected {wanted}, got {describe(value)}", _number_fix(value, whole=whole)
        )
        return
    low, strict, high = (of.ge, False, of.le) if of.gt is None else (of.gt, True, of.le)
    if not math.isfinite(value):
        yield Problem(path, f"expected {wanted}, got {value}", "write a finite number")
    elif low is not None and (value <= low if strict else value < low):
        sign = "above" if strict else "at least"
        yield Problem(path, f"{value} is too low", f"use {sign} {low:g}{_up_to(high)}")
    elif high is not None and value > high:
        floor = "" if low is None else f" and {'above' if strict else 'at least'} {low:g}"
        yield Problem(path, f"{value} is too high", f"use at most {high:g}{floor}")
    elif whole and abs(value) > MAX_INTEGER:
        yield Problem(path, f"{value} is too high", f"use at most {MAX_INTEGER}")


def _up_to(high: float | None) -> str:
    return "" if high is None else f" and at most {high:g}"


def _number_fix(value: object, *, whole: bool) -> str:
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return "write digits"
        if math.isfinite(number) and (not whole or number.is_integer()):
            return f"write {int(number) if number.is_integer() else number} without quotes"
    if isinstance(value, float) and whole and math.isfinite(value):
        return f"write {round(value)}"
    return "write digits"


def _check_text(value: object, of: inspect.StrType, path: FieldPath) -> Iterator[Problem]:
    if not isinstance(value, str):
        scalar = isinstance(value, (int, float))
        yield Problem(
            path,
            f"expected text, got {describe(value)}",
            "put it in quotes" if scalar else "write text",
        )
    elif len(value) < (of.min_length or 0):
        yield Problem(path, "is empty", "fill it in")
    elif of.pattern is not None and not _is_name(value):
        yield Problem(
            path,
            f"{_shortened(value)!r} is no valid name",
            "use lower-case letters, digits and '-', starting and ending with a letter or digit",
        )
    elif of.max_length is not None and len(value) > of.max_length:
        yield Problem(path, f"has {len(value)} characters", f"use at most {of.max_length}")


def _is_name(value: str) -> bool:
    """The one pattern of the specs, `Name`; the property test notices a second one."""
    legal = all(c in "abcdefghijklmnopqrstuvwxyz0123456789-" for c in value)
    return legal and value[:1] != "-" and value[-1:] not in {"-", ""}


def _not_a_choice(value: object, choices: list[str], path: FieldPath) -> Problem:
    guess = nearest(value, choices) if isinstance(value, str) else None
    hint = f"did you mean {guess}? " if guess else ""
    return Problem(
        path, f"{describe(value)} is no choice", f"{hint}use {' | '.join(sorted(choices))}"
    )


def _known(of: inspect.StructType) -> str:
    return f"known here: {', '.join(field.encode_name for field in of.fields) or 'nothing'}"
