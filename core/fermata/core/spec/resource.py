"""What both resources share: strict structs, metadata, bounded number types."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

API_VERSION = "fermata.dev/v1alpha1"

Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, Meta(gt=0.0, le=31_536_000.0)]
SecondsOrZero = Annotated[float, Meta(ge=0.0, le=31_536_000.0)]
Weight = Annotated[float, Meta(ge=0.0, le=1000.0)]
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]


def manifest_name(field: str) -> str:
    """`resume_timeout_s` -> `resumeTimeout`: durations in manifests are plain seconds, without the
    unit in the name."""
    head, *rest = field.removesuffix("_s").split("_")
    return head + "".join(part.capitalize() for part in rest)


class Spec(
    msgspec.Struct, frozen=True, kw_only=True, rename=manifest_name, forbid_unknown_fields=True
):
    """Base of everything under `spec`."""


class Metadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The part of Kubernetes metadata we read; the rest is Kubernetes' own and ignored."""

    name: Name
    namespace: str = "default"
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    uid: str = ""
    generation: int = 0
