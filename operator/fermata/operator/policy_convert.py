"""Dynamo's router policy (its YAML, and the flags of its frontend) as a RouterPolicy.

Everything that was said is either carried over or named as dropped, with the reason; and where Dynamo's default is not
ours, the manifest says Dynamo's, so that what is converted behaves as what it came from. Flags come first and the file
wins over them, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from fermata.core.errors import ConfigError
from fermata.core.spec import API_VERSION, RouterPolicy
from fermata.operator.dynamo_settings import (
    DROPPED,
    MODES,
    ORDERS,
    RENAMED,
    SETTINGS,
    THUNDER_AGENT,
)

Values = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Note:
    """`what` is a path in the file, or a flag."""

    what: str
    why: str


@dataclass(slots=True)
class Converted:
    name: str
    spec: dict[str, Any] = field(default_factory=dict[str, Any])
    dropped: list[Note] = field(default_factory=list[Note])
    changed: list[Note] = field(default_factory=list[Note])
    """Carried over, but not as it was."""

    def put(self, path: str, value: object) -> None:
        *heads, last = path.split(".")
        at = self.spec
        for head in heads:
            at = at.setdefault(head, {})
        at[last] = value

    def get(self, path: str) -> object:
        at: dict[str, Any] = self.spec
        *heads, last = path.split(".")
        for head in heads:
            at = at.get(head, {})
        return at.get(last)

    def drop(self, what: str, why: str) -> None:
        self.dropped.append(Note(what, why))

    def manifest(self) -> dict[str, Any]:
        return {
            "apiVersion": API_VERSION,
            "kind": "RouterPolicy",
            "metadata": {"name": self.name},
            "spec": self.spec,
        }


def convert(policy: object, flags: Sequence[str], *, name: str) -> Converted:
    """`policy` is the YAML's value, None without a file. ConfigError names what can not be honoured."""
    converted = Converted(name)
    said = parse_flags(flags)
    if policy is not None:
        said.pop("router-policy-config", None)  # that is this file
    for flag, value in said.items():
        _setting(converted, f"--{flag}", flag, value)
    if policy is not None:
        _file(converted, policy)
    _fill_in(converted, has_file=policy is not None)
    _check(converted)
    return converted


def parse_flags(words: Sequence[str]) -> dict[str, object]:
    """`--name value`, `--name=value`, `--name`, `--no-name`; words before the first flag are a command's own."""
    said: dict[str, object] = {}
    waiting = ""
    for word in words:
        if word.startswith("--"):
            waiting, has_value, value = word[2:].partition("=")
            if has_value:
                said[waiting], waiting = value, ""
            elif waiting.startswith("no-"):
                said[waiting[3:]], waiting = False, ""
            else:
                said[waiting] = True
        elif waiting:
            said[waiting], waiting = word, ""
    return said


def _setting(converted: Converted, where: str, name: str, value: object) -> None:
    """One knob, by its name as a flag or as a key of the file's `router` section."""
    key = name.replace("-", "_").removeprefix("router_")
    key = RENAMED.get(key, key)
    if key == "mode":
        _mode(converted, where, value)
    elif key == "load_aware":
        if _boolean(value, where):
            converted.put("scheduler.kvAware.tierWeights.device", 0.0)
            converted.put("kv.events", False)
            converted.changed.append(Note(where, "as no credit for cached blocks and no KV events"))
    elif key in SETTINGS:
        setting = SETTINGS[key]
        converted.put(setting.path, _read(setting.kind, value, where))
    else:
        converted.drop(where, DROPPED.get(key, "not a setting of the router that is known here"))


def _mode(converted: Converted, where: str, value: object) -> None:
    mode = MODES.get(str(value))
    if mode is None:
        converted.drop(where, f"no policy here is like {value}; the default is used")
        return
    converted.put("scheduler.type", mode.scheduler)
    if mode.why:
        converted.changed.append(Note(where, f"{value} as {mode.scheduler}: {mode.why}"))


def _file(converted: Converted, policy: object) -> None:
    sections: dict[str, Callable[[Converted, object], None]] = {
        "router": _router,
        "request_classifier": _classifier,
        "worker_selection": _selection,
        "policy_classes": lambda c, v: None,  # with what they refer to, below
        "uncached_isl_buckets": lambda c, v: None,
        "default_policy_family": lambda c, v: c.put("queue.defaultClass", _name(c, "", str(v))),
    }
    fields = _mapping(policy, "the file")
    for key, value in fields.items():
        section = sections.get(key)
        if section is None:
            converted.drop(
                key, DROPPED.get(key, "not a part of a router policy that is known here")
            )
        else:
            section(converted, value)
    _classes(converted, fields.get("policy_classes"), fields.get("uncached_isl_buckets"))


def _router(converted: Converted, value: object) -> None:
    for key, inner in _mapping(value, "router").items():
        _setting(converted, f"router.{key}", key, inner)


def _classifier(converted: Converted, value: object) -> None:
    fields = _mapping(value, "request_classifier")
    kind = fields.get("type")
    if kind != "thunderagent":
        converted.drop("request_classifier", f"there is no classifier like {kind!r} here")
        return
    converted.put("scheduler.type", "ThunderAgent")
    # There, all gaps weigh the same.
    weight: object = 1
    for key, inner in _mapping(
        fields.get("parameters", {}), "request_classifier.parameters"
    ).items():
        where = f"request_classifier.parameters.{key}"
        setting = THUNDER_AGENT.get(key)
        if key == "acting_token_weight":
            weight = _read("number", inner, where)
        elif setting is None:
            converted.drop(where, DROPPED.get(key, "not a parameter that is known here"))
        else:
            converted.put(setting.path, _read(setting.kind, inner, where))
    for gap in ("toolGapWeight", "humanGapWeight"):
        converted.put(f"scheduler.thunderAgent.{gap}", weight)
    _leave_out(converted, fields, {"type", "parameters"}, "request_classifier")


def _selection(converted: Converted, value: object) -> None:
    """Which selector serves what. ThunderAgent's own only follows its classifier, so it says nothing more."""
    fields = _mapping(value, "worker_selection")
    types: dict[str, object] = {}
    for index, inner in enumerate(
        _sequence(fields.get("instances", []), "worker_selection.instances")
    ):
        where = f"worker_selection.instances[{index}]"
        instance = _mapping(inner, where)
        types[str(instance.get("name"))] = instance.get("type")
        for key in _mapping(instance.get("parameters", {}) or {}, f"{where}.parameters"):
            converted.drop(f"{where}.parameters.{key}", "selectors take no parameters here")
        _leave_out(converted, instance, {"name", "type", "parameters"}, where)
    aggregated = fields.get("aggregated")
    if aggregated is not None and types.get(str(aggregated), aggregated) != "thunderagent":
        converted.drop("worker_selection.aggregated", f"no selector like {aggregated} here")
    for stage in ("prefill", "decode"):
        if stage in fields:
            why = "prefill and decode are placed by one policy here"
            converted.drop(f"worker_selection.{stage}", why)
    _leave_out(
        converted, fields, {"instances", "aggregated", "prefill", "decode"}, "worker_selection"
    )


def _classes(converted: Converted, classes: object, buckets: object) -> None:
    starts: dict[str, object] = {}
    for index, inner in enumerate(
        _sequence([] if buckets is None else buckets, "uncached_isl_buckets")
    ):
        bucket = _mapping(inner, f"uncached_isl_buckets[{index}]")
        starts[str(bucket.get("bucket"))] = bucket.get("min_tokens", 0)
    found: list[dict[str, Any]] = []
    for index, inner in enumerate(_sequence([] if classes is None else classes, "policy_classes")):
        where = f"policy_classes[{index}]"
        found.append(_class(converted, where, _mapping(inner, where), starts))
    if found:
        converted.put("queue.classes", found)


_CLASS_FIELDS = {
    "quantum": ("quantum", "whole"),
    "prefill_busy_threshold": ("thresholdTokens", "whole"),
    "prefill_busy_threshold_frac": ("threshold", "number"),
    "busy_worker_ratio": ("busyShare", "number"),
    "request_queue_limit_per_worker": ("limit", "whole"),
    "raw_isl_token_queue_limit_per_worker": ("inputTokensLimit", "whole"),
    "cached_token_queue_limit_per_worker": ("cachedTokensLimit", "whole"),
}


def _class(
    converted: Converted, where: str, said: Values, starts: Mapping[str, object]
) -> dict[str, Any]:
    made: dict[str, Any] = {"name": _name(converted, f"{where}.name", str(said.get("name")))}
    for key, value in said.items():
        at = f"{where}.{key}"
        if key == "policy_family":
            made["family"] = _name(converted, at, str(value))
        elif key == "cache_bucket":
            if str(value) not in starts:
                raise ConfigError(f"no bucket {value!r}", where=at, fix="name one of the file's")
            made["minUncachedTokens"] = _read("whole", starts[str(value)], at)
        elif key == "queue_policy":
            made["order"] = _order(value, at)
        elif key in _CLASS_FIELDS:
            name, kind = _CLASS_FIELDS[key]
            if value is not None:
                made[name] = _read(kind, value, at)
        elif key != "name":
            converted.drop(at, "not a field of a class that is known here")
    return made


def _fill_in(converted: Converted, *, has_file: bool) -> None:
    """Dynamo's defaults where ours differ."""
    if converted.get("scheduler.type") is None:
        converted.put("scheduler.type", "KVAware" if has_file else "RoundRobin")
    is_thunder = converted.get("scheduler.type") == "ThunderAgent"
    if converted.get("sessionAffinity.ttl") is None:
        if converted.get("sessionAffinity.mode") is not None:
            converted.drop("--router-session-affinity-mode", "affinity is off without its ttl")
        converted.spec["sessionAffinity"] = {"mode": "None"}
        why = "off, as there: --router-session-affinity-ttl-secs was not given"
        converted.changed.append(Note("session affinity", why))
    elif converted.get("sessionAffinity.mode") is None:
        converted.put("sessionAffinity.mode", "Hard")
    if is_thunder and converted.get("sessionAffinity.mode") == "Hard":
        converted.put("sessionAffinity.mode", "Soft")
        why = "Soft, as Hard leaves ThunderAgent nowhere to resume a program"
        converted.changed.append(Note("session affinity", why))
    if converted.get("kv.events") is False and converted.get("kv.approximate") is None:
        converted.put("kv.approximate", "Ttl")


def _check(converted: Converted) -> None:
    try:
        policy = msgspec.convert(converted.manifest(), RouterPolicy)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"can not be carried over: {error}", fix="change it in the file or flag it comes from"
        ) from None
    for at, what, fix in policy.spec.problems():
        raise ConfigError(what, where=f"spec.{at}", fix=fix)


def _name(converted: Converted, where: str, said: str) -> str:
    name = said.lower().replace("_", "-").replace(".", "-")
    if name != said and where:
        converted.changed.append(Note(where, f"{said} is called {name}"))
    return name


def _order(value: object, where: str) -> str:
    order = ORDERS.get(str(value))
    if order is None:
        raise ConfigError(f"no order {value!r}", where=where, fix="use fcfs, lcfs or wspt")
    return order


def _read(kind: str, value: object, where: str) -> object:
    match kind:
        case "boolean":
            return _boolean(value, where)
        case "order":
            return _order(value, where)
        case "affinity" | "approximate":
            names = {"hard": "Hard", "soft": "Soft", "ttl": "Ttl", "lru": "Lru"}
            if str(value) not in names:
                raise ConfigError(f"{value!r} is not known", where=where, fix=f"use {kind} modes")
            return names[str(value)]
        case _:
            return _number(value, where, whole=kind == "whole")


def _number(value: object, where: str, *, whole: bool) -> float | int:
    wrong = ConfigError(f"{value!r} is no number", where=where, fix="give a number")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise wrong
    try:
        number = float(value)
    except ValueError:
        raise wrong from None
    return int(number) if whole or number.is_integer() else number


def _boolean(value: object, where: str) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    raise ConfigError(f"{value!r} is neither true nor false", where=where, fix="use one of them")


def _mapping(value: object, where: str) -> Values:
    if not isinstance(value, dict):
        raise ConfigError("must be a mapping", where=where, fix="write `key: value` lines")
    return cast("Values", value)  # YAML's keys are text here, or show up as unknown


def _sequence(value: object, where: str) -> Sequence[object]:
    if not isinstance(value, list):
        raise ConfigError("must be a list", where=where, fix="begin each item with `- `")
    return cast("Sequence[object]", value)


def _leave_out(converted: Converted, said: Values, known: set[str], where: str) -> None:
    for key in said:
        if key not in known:
            converted.drop(f"{where}.{key}", DROPPED.get(key, "not known here"))
