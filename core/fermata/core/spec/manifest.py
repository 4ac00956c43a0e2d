"""Manifest files to typed resources, with errors that name file, line, field and fix.

A file holds one AgentDeployment and any number of RouterPolicies, in any order. What is wrong first in the
file is told first, in one line:

    fleet.yaml:14: AgentDeployment quickstart: spec.workers[0].replica: unknown field (did you mean replicas?)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import inspect

from fermata.core.errors import ConfigError
from fermata.core.spec.agent_deployment import (
    AgentDeployment,
    ModelSpec,
    Script,
    WorkerGroupSpec,
)
from fermata.core.spec.check import Problem, check, describe, nearest
from fermata.core.spec.document import (
    Document,
    FieldPath,
    as_mapping,
    dotted,
    parse_path,
    read_documents,
)
from fermata.core.spec.resource import API_VERSION, Metadata
from fermata.core.spec.router_policy import RouterPolicy

MAX_FILE_BYTES = 1 << 20
"""What the API server takes, and a bound on what is read here."""

KINDS: dict[str, type[AgentDeployment] | type[RouterPolicy]] = {
    "AgentDeployment": AgentDeployment,
    "RouterPolicy": RouterPolicy,
}


@dataclass(frozen=True, slots=True)
class Manifests:
    """One AgentDeployment and the RouterPolicy it names (of defaults where it names none)."""

    deployment: AgentDeployment
    policy: RouterPolicy
    unused_policies: tuple[str, ...] = ()
    """Policies of the file that the deployment does not name: most likely a forgotten `routerPolicyRef`."""


def load_manifests(path: Path) -> Manifests:
    """Raises ConfigError, one line that names file, field and fix. Paths inside come out absolute."""
    where = str(path)
    documents = read_documents(_read(path, where), where=where)
    resources = [(_resource(document, where), document) for document in documents]
    deployment, document = _the_deployment(resources, where)
    policies = _policies_by_name(resources, where)
    policy = _the_policy(deployment, document, policies, where)
    return Manifests(
        deployment=_resolve_paths(deployment, document, path),
        policy=policy,
        unused_policies=tuple(
            name for (_, name), candidate in policies.items() if candidate is not policy
        ),
    )


def _read(path: Path, where: str) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError("no such file", where=where, fix="check the path") from None
    except IsADirectoryError:
        raise ConfigError("is a folder", where=where, fix="name a YAML file") from None
    except OSError as error:
        raise ConfigError(f"can not be read: {error.strerror}", where=where) from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"is above {MAX_FILE_BYTES} bytes", where=where, fix="name a manifest")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError("is not UTF-8", where=f"{where}:{line}", fix="save it as UTF-8") from None


def _resource(document: Document, where: str) -> AgentDeployment | RouterPolicy:
    fields = as_mapping(document.data)
    if fields is None:
        raise ConfigError(
            f"a document must be a mapping, got {describe(document.data)}",
            where=f"{where}:{document.line(())}",
            fix=f"start it with apiVersion: {API_VERSION}",
        )
    # A file written by `kubectl get -o yaml` carries it; it says nothing about what should run.
    fields.pop("status", None)
    kind = _kind(fields, document, where)
    label = _label(kind, fields)
    problems = list(check(fields, inspect.type_info(KINDS[kind])))
    if problems:
        raise _error(min(problems, key=lambda p: document.line(p.path)), document, label, where)
    # A rule that `check` does not know would end in a traceback here; the property test holds the two together.
    resource = msgspec.convert(fields, KINDS[kind])
    for at, what, fix in resource.spec.problems():
        problem = Problem(("spec", *parse_path(at)), what, fix)
        raise _error(problem, document, label, where)
    return resource


def _kind(fields: dict[str, object], document: Document, where: str) -> str:
    for name, choices in (("apiVersion", [API_VERSION]), ("kind", list(KINDS))):
        value = fields.get(name)
        if value in choices:
            continue
        line = document.line((name,))
        if name not in fields:
            raise ConfigError(
                f"{name} is missing",
                where=f"{where}:{line}",
                fix=f"add {name}: {' or '.join(choices)}",
            )
        guess = nearest(value, choices) if isinstance(value, str) else None
        raise ConfigError(
            f"{name}: {describe(value)} is not ours",
            where=f"{where}:{line}",
            fix=f"use {guess or ' or '.join(choices)}",
        )
    return str(fields["kind"])


def _label(kind: str, fields: dict[str, object]) -> str:
    name = (as_mapping(fields.get("metadata")) or {}).get("name")
    return f"{kind} {name}" if isinstance(name, str) and name else kind


def _error(problem: Problem, document: Document, label: str, where: str) -> ConfigError:
    at = dotted(problem.path)
    return ConfigError(
        f"{label}: {at}: {problem.what}" if at else f"{label}: {problem.what}",
        where=f"{where}:{document.line(problem.path)}",
        fix=problem.fix,
    )


Resources = list[tuple[AgentDeployment | RouterPolicy, Document]]


def _the_deployment(resources: Resources, where: str) -> tuple[AgentDeployment, Document]:
    found = [(r, document) for r, document in resources if isinstance(r, AgentDeployment)]
    if not found:
        raise ConfigError(
            "holds no AgentDeployment", where=where, fix=f"add one with apiVersion: {API_VERSION}"
        )
    if len(found) > 1:
        (first, at), (second, again) = found[:2]
        raise ConfigError(
            f"AgentDeployment {second.metadata.name}: a second one, after"
            f" {first.metadata.name} on line {at.line(())}",
            where=f"{where}:{again.line(())}",
            fix="keep one a file",
        )
    return found[0]


def _policies_by_name(resources: Resources, where: str) -> dict[tuple[str, str], RouterPolicy]:
    policies: dict[tuple[str, str], RouterPolicy] = {}
    lines: dict[tuple[str, str], int] = {}
    for resource, document in resources:
        if not isinstance(resource, RouterPolicy):
            continue
        key = (resource.metadata.namespace, resource.metadata.name)
        if key in policies:
            raise ConfigError(
                f"RouterPolicy {key[1]}: named twice, first on line {lines[key]}",
                where=f"{where}:{document.line(())}",
                fix="rename or remove one",
            )
        policies[key] = resource
        lines[key] = document.line(())
    return policies


def _the_policy(
    deployment: AgentDeployment,
    document: Document,
    policies: dict[tuple[str, str], RouterPolicy],
    where: str,
) -> RouterPolicy:
    name = deployment.spec.router_policy_ref
    namespace = deployment.metadata.namespace
    if name is None:
        return RouterPolicy(
            api_version="fermata.dev/v1alpha1",
            kind="RouterPolicy",
            metadata=Metadata(name="default", namespace=namespace),
        )
    if (namespace, name) in policies:
        return policies[namespace, name]
    present = [known for space, known in policies if space == namespace]
    guess = nearest(name, present) or (present[0] if present else None)
    raise _error(
        Problem(
            ("spec", "routerPolicyRef"),
            f"no RouterPolicy {name!r} in this file",
            f"add it, or name {guess}" if guess else "add it, or remove the field to use defaults",
        ),
        document,
        _label(deployment.kind, {"metadata": {"name": deployment.metadata.name}}),
        where,
    )


def _resolve_paths(deployment: AgentDeployment, document: Document, path: Path) -> AgentDeployment:
    """Relative paths are relative to the manifest, wherever the command is run; what they name must exist."""
    resolver = _Resolver(
        folder=path.resolve().parent,
        document=document,
        label=f"AgentDeployment {deployment.metadata.name}",
        where=str(path),
    )
    spec = deployment.spec
    workers = [_resolve_group(group, index, resolver) for index, group in enumerate(spec.workers)]
    return msgspec.structs.replace(
        deployment,
        spec=msgspec.structs.replace(
            spec, model=_resolve_model(spec.model, resolver), workers=workers
        ),
    )


@dataclass(frozen=True, slots=True)
class _Resolver:
    folder: Path
    document: Document
    label: str
    where: str

    def resolve(self, value: str, at: FieldPath, *, folder: bool = False) -> str:
        if not value:
            return value
        full = self.folder / value
        if not (full.is_dir() if folder else full.is_file()):
            what = f"no {'folder' if folder else 'file'} {value!r}"
            fix = f"a relative path starts at {self.folder}"
            raise _error(Problem(at, what, fix), self.document, self.label, self.where)
        return str(full)


def _resolve_model(model: ModelSpec, resolver: _Resolver) -> ModelSpec:
    at = ("spec", "model")
    return msgspec.structs.replace(
        model,
        path=resolver.resolve(model.path, (*at, "path"), folder=True),
        chat_template=resolver.resolve(model.chat_template, (*at, "chatTemplate")),
    )


def _resolve_group(group: WorkerGroupSpec, index: int, resolver: _Resolver) -> WorkerGroupSpec:
    responder = group.simulated.responder
    if not isinstance(responder, Script):
        return group
    at = ("spec", "workers", index, "simulated", "responder", "path")
    found = msgspec.structs.replace(responder, path=resolver.resolve(responder.path, at))
    return msgspec.structs.replace(
        group, simulated=msgspec.structs.replace(group.simulated, responder=found)
    )
