"""YAML documents as plain data that remember which line each field came from.

PyYAML's own loading forgets positions and lets a repeated key win silently; both matter to whoever has to fix the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import yaml

from fermata.core.errors import ConfigError

FieldPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """`lines` maps the path of a field to its line, counted from 1."""

    data: object
    lines: dict[FieldPath, int] = field(default_factory=dict[FieldPath, int])

    def line(self, path: FieldPath) -> int:
        """Line of the field, or of the nearest thing around it that is written down."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path, 1)


def as_mapping(value: object) -> dict[str, object] | None:
    """With keys as text: YAML's may be numbers or booleans, and then show up as the unknown fields they are."""
    if not isinstance(value, dict):
        return None
    raw = cast("dict[object, object]", value)  # isinstance can not tell the parameters
    return {str(key): inner for key, inner in raw.items()}


def dotted(path: FieldPath) -> str:
    """`("spec", "workers", 0, "name")` -> `spec.workers[0].name`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def parse_path(text: str) -> FieldPath:
    """The reverse of `dotted`."""
    parts: list[str | int] = []
    for piece in text.split("."):
        name, *indexes = piece.split("[")
        parts.append(name)
        parts.extend(int(index.rstrip("]")) for index in indexes)
    return tuple(parts)


def read_documents(text: str, *, where: str) -> list[Document]:
    """Non-empty documents in file order. Raises ConfigError on bad YAML and on a key written twice."""
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"not valid YAML: character {text[error.position]!a} is not allowed",
            where=f"{where}:{line}",
            fix="remove it",
        ) from None
    try:
        return [document for document in _documents(loader, where) if document.data is not None]
    except yaml.YAMLError as error:
        raise _syntax_error(error, where) from None
    except ValueError as error:  # a date that is none
        raise ConfigError(f"not valid YAML: {error}", where=where, fix="put it in quotes") from None
    finally:
        loader.dispose()


def _documents(loader: yaml.SafeLoader, where: str) -> Iterator[Document]:
    while loader.check_node():
        node = loader.get_node()
        assert node is not None, "check_node said there is one"
        lines: dict[FieldPath, int] = {}
        _locate(node, (), lines, (), where)
        yield Document(data=_construct(loader, node), lines=lines)


def _construct(loader: yaml.SafeLoader, node: yaml.Node) -> object:
    return loader.construct_document(node)  # pyright: ignore[reportUnknownMemberType]


def _locate(
    node: yaml.Node,
    path: FieldPath,
    lines: dict[FieldPath, int],
    ancestors: tuple[yaml.Node, ...],
    where: str,
) -> None:
    if node in ancestors:
        raise ConfigError(
            "an alias contains itself",
            where=f"{where}:{node.start_mark.line + 1}",
            fix="write the value out",
        )
    lines.setdefault(path, node.start_mark.line + 1)
    inside = (*ancestors, node)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _locate(item, (*path, index), lines, inside, where)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            at = (*path, str(key.value))
            line = key.start_mark.line + 1
            if at in lines and key.value != "<<":
                raise ConfigError(
                    f"{dotted(at)} is written twice, first on line {lines[at]}",
                    where=f"{where}:{line}",
                    fix="keep one",
                )
            lines[at] = line
            _locate(value, at, lines, inside, where)


def _syntax_error(error: yaml.YAMLError, where: str) -> ConfigError:
    assert isinstance(error, yaml.MarkedYAMLError), "only the reader raises others, and it is done"
    assert error.problem_mark is not None, error
    problem = error.problem or "it can not be read"
    mark = error.problem_mark
    # An open quote or bracket is noticed at the end of the file; the line to fix is where it began.
    if "end of stream" in problem and error.context_mark is not None:
        mark = error.context_mark
    tab = r"'\t'" in problem
    fix = "indent with spaces" if tab else "check indentation, colons and quotes there"
    return ConfigError(f"not valid YAML: {problem}", where=f"{where}:{mark.line + 1}", fix=fix)
