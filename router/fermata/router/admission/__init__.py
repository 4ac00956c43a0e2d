"""Admission: which programs may hold KV now. One Protocol, one registry by the name a policy uses."""

from __future__ import annotations

from fermata.router.admission.registry import admission_rule
from fermata.router.admission.seam import Admission, Facts, HoldReason

__all__ = ["Admission", "Facts", "HoldReason", "admission_rule"]
