"""docs/router-policy.md names every field there is, with its default, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from fermata.core.spec import RouterPolicySpec, load_manifests

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `([\w.\[\]]+)` \| (.*?) \|", re.MULTILINE)
DOCUMENTED = dict(ROW.findall((ROOT / "docs" / "router-policy.md").read_text()))


def spec_of(kind: Any) -> type[msgspec.Struct] | None:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return None


def fields(kind: type[msgspec.Struct], path: str = "") -> dict[str, Any]:
    """Path in a manifest -> default."""
    found: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for field in msgspec.structs.fields(kind):
        at, hint = f"{path}{field.encode_name}", hints[field.name]
        inner = spec_of(hint)
        listed = spec_of(get_args(hint)[0]) if get_origin(hint) is list else None
        if inner is not None:
            found |= fields(inner, f"{at}.")
        elif listed is not None:
            found |= {name: ... for name in fields(listed, f"{at}[].")}
        else:
            found[at] = field.default
    return found


def test_every_field_is_documented_and_nothing_else() -> None:
    assert set(DOCUMENTED) == set(fields(RouterPolicySpec))


def test_every_default_is_the_documented_one() -> None:
    for path, default in fields(RouterPolicySpec).items():
        said = DOCUMENTED[path].strip("`")
        if default is ...:
            continue
        if default is None:
            assert said == "none", path
        elif isinstance(default, bool):
            assert said == str(default).lower(), path
        elif isinstance(default, str):
            assert said == default, path
        else:
            assert float(said) == default, path


MANIFESTS = [p for p in sorted((ROOT / "examples").glob("*.yaml")) if "kind:" in p.read_text()]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_example_is_a_manifest_that_could_be_run(path: Path) -> None:
    assert load_manifests(path).policy.spec.problems() == []
