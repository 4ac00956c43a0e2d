"""Manifest files to typed resources, with errors that name file, field and fix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fermata.core.spec.agent_deployment import AgentDeployment
from fermata.core.spec.router_policy import RouterPolicy


@dataclass(frozen=True, slots=True)
class Manifests:
    """One AgentDeployment and the RouterPolicy it names (of defaults where it names none)."""

    deployment: AgentDeployment
    policy: RouterPolicy


def load_manifests(path: Path) -> Manifests:
    """Raises ConfigError, one line that names file, field and fix."""
    raise NotImplementedError(path)  # the local runner's helper completes this
