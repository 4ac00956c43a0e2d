"""Name in a policy -> admission rule: the only place that knows them all."""

from __future__ import annotations

from collections.abc import Callable

from fermata.core.spec import ThunderAgentSpec
from fermata.router.admission.seam import Admission, Facts
from fermata.router.admission.watermark import Watermark


def _watermark(spec: ThunderAgentSpec, facts: Facts) -> Admission:
    return Watermark(spec, facts)


def _aimd(spec: ThunderAgentSpec, facts: Facts) -> Admission:
    return Watermark(spec, facts, counts_programs=True)


_RULES: dict[str, Callable[[ThunderAgentSpec, Facts], Admission]] = {
    "Watermark": _watermark,
    # The same order of things, with a window of programs in the place of tokens.
    "Aimd": _aimd,
}


def admission_rule(spec: ThunderAgentSpec, facts: Facts) -> Admission:
    return _RULES[spec.admission](spec, facts)
